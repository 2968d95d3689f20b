"""Buckets under TensorFlow: a check in a process without torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

CHECK = Path(__file__).parent / "check_tensorflow.py"
NAMES = Path(__file__).parent / "check_names.py"


def _run(script: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        env={
            **os.environ,
            "EVENER_COMPILE_DIR": str(folder),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert "all right" in _run(CHECK, tmp_path)
    assert list((tmp_path / "xla").glob("evener*")), "XLA kept nothing"


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_functions_of_one_name_find_their_own_forms(tmp_path: Path) -> None:
    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "xla").glob("evener*")}

    assert "all right" in _run(NAMES, tmp_path, "1", "2", "1:tensor:gone", "2:tensor", "1:constant")
    before = kept()
    assert len(before) >= 4
    # Made in another order, and one is not made at all.
    assert "all right" in _run(NAMES, tmp_path, "2:tensor", "1:constant", "1:tensor", "2")
    assert kept() == before
    # Others take their places: the script compares what each gives.
    changed = ("3", "1:sigmoid", "2:constant", "1:constant:gone", "4:constant")
    assert "all right" in _run(NAMES, tmp_path, *changed)
    assert len(kept()) >= len(before) + 3
