"""scripts/upstream_horovod.py on a small tree of tests: that it cannot be fooled, and ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time, unittest
import torch, horovod.torch as hvd

class Tests(unittest.TestCase):
    def test_pass(self):
        hvd.init()
        assert hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item() == 3
    def test_skip(self):
        self.skipTest("no moon")
    def test_fail_on_one_rank(self):
        hvd.init()
        assert hvd.rank() == 0, "rank one is wrong"
    def test_dies(self):
        hvd.init()
        if hvd.rank() == 1:
            os._exit(3)
        hvd.barrier()
    def test_hangs(self):
        time.sleep(1000)
    def test_environment_is_its_own(self):
        assert "LEFT" not in os.environ
        os.environ["LEFT"] = "1"
    def test_environment_is_its_own_too(self):
        self.test_environment_is_its_own()
"""


def test_each_kind_of_end(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "parallel"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    command = [sys.executable, str(ROOT / "scripts" / "upstream_horovod.py"), str(tmp_path)]
    command += ["--file", "test/parallel/test_small.py", "--timeout", "18", "--jobs", "7"]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*command, "--json", str(report), "--logs", str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "HOROVOD_RANK": "7"},  # of a job around this one: not theirs
    )
    assert done.returncode == 1, done.stderr
    found = {row["test"]: row for row in json.loads(report.read_text())["tests"]}
    ends = {name.removeprefix("Tests.test_"): row["status"] for name, row in found.items()}
    assert ends == {
        "pass": "pass",
        "skip": "skip",
        "fail_on_one_rank": "fail",
        "dies": "fail",
        "hangs": "fail",
        "environment_is_its_own": "pass",
        "environment_is_its_own_too": "pass",
    }
    assert found["Tests.test_skip"]["reason"] == "no moon"
    assert "rank one is wrong" in found["Tests.test_fail_on_one_rank"]["reason"]
    assert "limit 18 s" in found["Tests.test_hangs"]["reason"]
    assert "in test_hangs" in (tmp_path / "logs" / "Tests.test_hangs.log").read_text()
    assert not list(tmp_path.rglob("__pycache__"))  # nothing is written into the tree


def test_what_a_file_needs_is_named(tmp_path: Path) -> None:
    """A fresh clone has not all that upstream's tests import: they are not run, and not failed."""
    folder = tmp_path / "test" / "single"
    folder.mkdir(parents=True)
    (folder / "test_needs.py").write_text("import parameterized\n\ndef test_one(): pass\n")
    command = [sys.executable, str(ROOT / "scripts" / "upstream_horovod.py"), str(tmp_path)]
    code = "import sys; sys.modules['parameterized'] = None"  # whether it is installed or not
    (tmp_path / "sitecustomize.py").write_text(code)
    done = subprocess.run(
        [*command, "--file", "test/single/test_needs.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"fix: pip install (mock )?parameterized", done.stdout), done.stdout
    assert "not run" in done.stdout


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "upstream_horovod.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "give a checkout of upstream's Horovod" in done.stderr
