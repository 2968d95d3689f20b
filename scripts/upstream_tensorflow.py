"""Upstream's tests of TensorFlow and Keras: `scripts/upstream_horovod.py DIR --tensorflow`.

TensorFlow takes seconds to import, and a file has up to 143 tests. So the tests of a file run in
one pair of processes, one after the other. Those that failed there run again, each in a pair of its
own: a test that fails on one rank leaves the other waiting, and what comes after it fails for that.
No torch is in these processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "test/parallel/test_tensorflow.py",
    "test/parallel/test_tensorflow2_keras.py",
    "test/parallel/test_tensorflow_keras.py",
    "test/parallel/test_keras.py",
    "test/parallel/test_tensorflow_process_sets.py",
    "test/parallel/test_adasum_tensorflow.py",
)
SIZE = 2
# A helper of upstream's tests wants a package that few have.
PREPARE = """
import sys
import unittest.mock
sys.modules.setdefault("mock", unittest.mock)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass
class Case:
    """What became of a test. status: pass, skip, fail."""

    file: str
    test: str
    status: str
    reason: str = ""


def run(root: Path, only: Sequence[str], files: Sequence[str], timeout: float) -> list[Case]:
    """Run the files; `only`: patterns of pytest's -k. Prints as it goes."""
    found = []
    for file in files:
        begun = time.monotonic()
        cases = pair(root, file, [f"-k={' or '.join(only)}"] if only else [], timeout)
        again = [name for name, case in cases.items() if case.status == "fail"]
        print(f"{file}: {len(cases)} tests, {len(again)} to run again", flush=True)
        for name in again:
            kind, _, test = name.partition(".")
            node = f"{file}::{kind}::{test}" if test else f"{file}::{kind}"
            cases.update(pair(root, node, [], min(timeout, 120.0)))
        for case in cases.values():
            if case.status != "pass":
                print(f"{case.status:5} {case.test}\n        {case.reason}", flush=True)
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
        found.extend(cases.values())
    return found


def pair(root: Path, node: str, options: list[str], timeout: float) -> dict[str, Case]:
    """Run pytest on both ranks; the worse of what they say of each test."""
    from evener.launch.door import ALIAS

    file = node.partition("::")[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="upstream-tensorflow-") as scratch:
        reports = [Path(scratch) / f"{rank}.xml" for rank in range(SIZE)]
        logs = [Path(scratch) / f"{rank}.log" for rank in range(SIZE)]
        processes = []
        for rank in range(SIZE):
            environment = {
                **os.environ,
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(SIZE),
                "HOROVOD_LOCAL_RANK": str(rank),
                "HOROVOD_LOCAL_SIZE": str(SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "EVENER_TIMEOUT": "20",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "PYTHONPATH": os.pathsep.join([str(ALIAS), str((root / file).parent)]),
                # Nothing is written into the checkout; what is compiled already is used.
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            command = [sys.executable, "-c", PREPARE, "-q", "-p", "no:cacheprovider"]
            command += ["-p", "no:timeout", "-c", os.devnull, f"--rootdir={root}", *options]
            command += [f"--junitxml={reports[rank]}", str(root / node)]
            with logs[rank].open("wb") as log:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=scratch)
                )
        deadline = time.monotonic() + timeout
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
        cases: dict[str, Case] = {}
        for rank, report in enumerate(reports):
            if not report.exists():
                tail = logs[rank].read_text(errors="replace").strip().splitlines()
                name = node.partition("::")[2].replace("::", ".")
                reason = f"rank {rank} did not end: {tail[-1] if tail else ''}"
                cases[name] = Case(file, name, "fail", reason)
                continue
            for case in read(file, rank, report):
                before = cases.get(case.test)
                if before is None or case.status == "fail":
                    cases[case.test] = case
        return cases


def read(file: str, rank: int, report: Path) -> list[Case]:
    """The tests of a report in JUnit's form."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        kind = case.get("classname", "").rpartition(".")[2]
        name = case.get("name", "")
        name = name if kind == Path(file).stem else f"{kind}.{name}"
        status, reason = "pass", ""
        for each in case:
            if each.tag in ("failure", "error"):
                text = (each.get("message") or each.text or "").strip()
                status, reason = (
                    "fail",
                    f"rank {rank}: {text.splitlines()[0][:240] if text else ''}",
                )
            elif each.tag == "skipped" and status == "pass":
                status, reason = "skip", each.get("message") or ""
        found.append(Case(file, name, status, reason))
    return found
