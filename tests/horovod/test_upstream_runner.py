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

class Tests(unittest.TestCase):
    def test_pass(self):
        import torch, horovod.torch as hvd
        hvd.init()
        assert hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item() == 3
    def test_skip(self):
        self.skipTest("no moon")
    def test_fail_on_one_rank(self):
        import horovod.torch as hvd
        hvd.init()
        assert hvd.rank() == 0, "rank one is wrong"
    def test_dies(self):
        import horovod.torch as hvd
        hvd.init()
        if hvd.rank() == 1:
            os._exit(3)
        hvd.barrier()
    def test_environment_is_its_own(self):
        assert "LEFT" not in os.environ
        os.environ["LEFT"] = "1"
    def test_environment_is_its_own_too(self):
        self.test_environment_is_its_own()
"""
HANGS = """
import time, unittest

class Tests(unittest.TestCase):
    def test_hangs(self):
        time.sleep(1000)
"""


def test_each_kind_of_end(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "parallel"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(TESTS)
    (folder / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, str(ROOT / "scripts" / "upstream_horovod.py"), str(tmp_path)]
    found = {}
    for name, limit in (("small", "150"), ("hangs", "18")):  # seconds
        words = ["--file", f"test/parallel/test_{name}.py", "--timeout", limit, "--jobs", "6"]
        report = tmp_path / "report.json"
        done = subprocess.run(
            [*command, *words, "--json", str(report), "--logs", str(tmp_path / "logs")],
            capture_output=True,
            text=True,
            timeout=170,
            env={**os.environ, "HOROVOD_RANK": "7"},  # of a job around this one: not theirs
        )
        assert done.returncode == 1, done.stderr
        found |= {row["test"]: row for row in json.loads(report.read_text())["tests"]}
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


IN_A_PAIR = """
import os, time, unittest

RANK = int(os.environ["HOROVOD_RANK"])

class Tests(unittest.TestCase):
    def test_a_pass(self):
        pass
    def test_b_skip(self):
        self.skipTest("no moon")
    def test_c_one_subtest_fails(self):
        for number in range(3):
            with self.subTest(number=number):
                assert number != 1, "not one"
    def test_d_fails_after_another(self):
        os.environ["LEFT"] = "1"
    def test_e_fails_after_another(self):
        assert "LEFT" not in os.environ
    def test_f_fails_on_one_rank(self):
        if RANK == 0:
            time.sleep(100)
        assert RANK == 0, "rank one is wrong"
    def test_g_dies(self):
        if RANK == 1:
            os._exit(3)
    def test_h_is_another(self):
        assert RANK == 7, "_compute_gradients"
    test_grad_aggregation_with_inf_grad = test_h_is_another
    def test_z_pass(self):
        pass
"""


def test_a_pair_for_many_tests(tmp_path: Path) -> None:
    """The runner of TensorFlow's tests: each kind of end, and what runs again as the first."""
    folder = tmp_path / "test" / "parallel"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(IN_A_PAIR)
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts" / "upstream_horovod.py"), str(tmp_path)]
    (folder / "test_broken.py").write_text("import no_such_module\n")
    command += ["--tensorflow", "--file", "test/parallel/test_small.py", "--json", str(report)]
    command += ["--file", "test/parallel/test_broken.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {row["test"].removeprefix("Tests.test_"): row for row in read(report)}
    assert {name: row["status"] for name, row in found.items()} == {
        "a_pass": "pass",
        "b_skip": "skip",
        "c_one_subtest_fails": "fail",
        "d_fails_after_another": "pass",
        "e_fails_after_another": "pass",
        "f_fails_on_one_rank": "fail",
        "g_dies": "fail",
        "grad_aggregation_with_inf_grad": "other",
        "h_is_another": "fail",
        "z_pass": "pass",
        "(import)": "fail",
    }
    assert "not one" in found["c_one_subtest_fails"]["reason"]
    assert "rank 1: AssertionError: rank one is wrong" in found["f_fails_on_one_rank"]["reason"]
    assert "Keras 2" in found["grad_aggregation_with_inf_grad"]["reason"]
    assert not list(tmp_path.rglob("__pycache__"))
    command += ["--resume", "--only", "b_skip", "--only", "h_is_another"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "Tests.test_b_skip" not in again.stdout  # it had its end
    ended = {name for name, row in found.items() if row["status"] != "fail"}
    kept = {row["test"].removeprefix("Tests.test_") for row in read(report)}
    assert kept == ended | {"h_is_another", "(import)"}  # those that failed run again, if chosen


def test_a_rank_that_dies_is_the_failure_although_the_other_is_slow() -> None:
    """The peer had not begun when its grace was over: the death was taken for no result at all."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import upstream_tensorflow as runner
    finally:
        sys.path.pop(0)
    begun = [{"test": "Tests.test_dies", "status": "begun"}]
    cases = runner.judge("test.py", [[], begun], runner.OVER, died={1})
    case = cases["Tests.test_dies"]
    assert (case.status, case.reason) == ("fail", "rank 1: the process died")
    # One that was stopped is not: the next pair runs it.
    assert runner.judge("test.py", [[], begun], runner.OVER, died={0}) == {}


def read(report: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(report.read_text())["tests"]
    return rows
