"""The command line itself: help without torch, errors without a traceback."""

import json
import subprocess
import sys

import pytest


def evener(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", "from evener.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from evener.cli import evener\n"
        "try:\n    evener(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_bench_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from evener.cli import evener\n"
        "try:\n    evener(['bench', 'train', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_settings_as_json() -> None:
    shown = evener("settings", "--json", LIGHT_TOPK_RATIO="0.001")
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["LIGHT_TOPK_RATIO"]["value"] == "0.001"
    assert rows["LIGHT_TOPK_RATIO"]["set"]


def test_a_wrong_value_is_two_lines_and_exit_status_2() -> None:
    shown = evener("settings", LIGHT_TOPK_RATIO="7")
    assert shown.returncode == 2
    assert "LIGHT_TOPK_RATIO='7'" in shown.stderr
    assert "fix: " in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("verb", ["frobnicate"])
def test_an_unknown_verb_is_refused(verb: str) -> None:
    assert evener(verb).returncode == 2
