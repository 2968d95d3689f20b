"""Upstream's tests of TensorFlow and Keras: `scripts/upstream_horovod.py DIR --tensorflow`.

TensorFlow takes seconds to import, and a file has up to 143 tests. So the tests of a file run in
one pair of processes, one after the other, until one fails: a test that fails on one rank leaves
the other waiting, and what comes after it fails for that. Then a new pair goes on. A test that
failed and was not the first of its pair runs again as the first of one, so that what ran before it
cannot be the cause. No torch is in these processes.

Each rank writes a line per event (a plug-in of pytest, below), so nothing is lost when a rank dies
or hangs: the test that it was in is the one that failed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = (
    "test/parallel/test_tensorflow.py",
    "test/parallel/test_tensorflow_keras.py",
    "test/parallel/test_tensorflow2_keras.py",
    "test/parallel/test_keras.py",
    "test/parallel/test_tensorflow_process_sets.py",
    "test/parallel/test_tensorflow2_keras_process_sets.py",
    "test/parallel/test_adasum_tensorflow.py",
)
SIZE = 2
# When a rank has failed, its peer is waited for so long; when a rank has said nothing, so long.
GRACE, QUIET = 3.0, 90.0
OVER = "the pair's time is over"  # the test that ran then is the next pair's
# Tests that ask for what is not there: patterns of `file::Class.test`, what the failure says, why.
_KERAS2 = "uses what Keras 2 has and Keras 3 has not"
_V1 = "needs TensorFlow 1"
OTHERWISE = (
    ("*.test_grad_aggregation_with_inf_grad", "_compute_gradients", _KERAS2),
    ("*.test_partial_distributed_optimizer", "_compute_gradients", _KERAS2),
    ("*.test_gradient_aggregation*", "'learning_rate'", _KERAS2),
    ("*.test_process_set_optimizer", "'learning_rate'", _KERAS2),
    ("*.test_legacy_optimizer", "is not supported in Keras 3", _KERAS2),
    ("*.test_sparse_as_dense*", "'lr'", _KERAS2),
    ("*.test_train_model_lr_schedule", "mean_squared_error", _KERAS2),
    (
        "*.test_horovod_syncbn_cpu",
        "Can not convert a Variable",
        "gives a v1 session" + _KERAS2.removeprefix("uses"),
    ),
    (
        "*.test_horovod_reducescatter_grad_cpu_process_sets",
        "np.float16(0.0) not less than 1e-08",
        "wants a float16 0 below 1e-8, which NumPy 2 rounds to 0",
    ),
    ("test/parallel/test_keras.py::*", "'ConfigProto'", _V1),
)


@dataclass
class Case:
    """What became of a test. status: pass, skip, other, fail."""

    file: str
    test: str
    status: str
    reason: str = ""


@dataclass
class Outcome:
    """The outcome of a pair. ended: no test is left. stopped: by the user."""

    cases: dict[str, Case]
    ended: bool
    stopped: bool
    output: str


# --- one rank ------------------------------------------------------------------------------------


class Listener:
    """A plug-in of pytest: one line of JSON per event, and only the tests that are left."""

    def __init__(self, lines: str, done: Collection[str]) -> None:
        self._file = Path(lines)
        self._done = set(done)
        self._worst: tuple[str, str] | None = None

    def _say(self, **fields: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what has an end."""
        if "keras" in sys.modules:
            give_keras_3()
        items[:] = [item for item in items if name_of(item.nodeid) not in self._done]

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a failure of its own."""
        if report.failed:
            text = _reason(str(report.longrepr))
            name = name_of(report.nodeid) or "(import)"
            self._say(test=name, status="fail", reason=text, collect=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._worst = None
        self._say(test=name_of(nodeid), status="begun")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each phase reports, and each subtest: one failure is the test's."""
        if report.failed:
            self._worst = ("fail", _reason(report.longreprtext))
        elif report.skipped and self._worst is None:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self._worst = ("skip", str(why).removeprefix("Skipped: "))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has its end."""
        status, reason = self._worst or ("pass", "")
        self._say(test=name_of(nodeid), status=status, reason=reason)
        if status == "fail":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # what would run next is the new pair's


def name_of(node: str) -> str:
    """`Class.test` of pytest's node id."""
    return ".".join(node.split("::")[1:])


def _reason(text: str) -> str:
    """The first line of the error in a traceback as pytest prints it."""
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next(filter(None, lines), text.strip().rpartition("\n")[2])[:300]


def rank_main(plan: dict[str, Any]) -> int:
    """The process of one rank."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        import mock  # noqa: F401, UP026 - what test/utils of upstream wants
    except ImportError:
        import unittest.mock

        sys.modules["mock"] = unittest.mock
    import pytest

    return int(pytest.main(plan["arguments"], plugins=[Listener(plan["lines"], plan["done"])]))


def give_keras_3() -> None:
    """Two small things of Keras 2 that tests use on their way, so that they come to their point."""
    import keras
    import tensorflow as tf

    # A key for dictionaries.
    keras.Variable.ref = lambda self: id(self)
    plain = keras.layers.BatchNormalization

    def without_fused(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("fused", None)
        return plain(*args, **kwargs)

    import horovod.tensorflow  # noqa: F401 - its layer is a subclass of the plain one

    tf.keras.layers.BatchNormalization = without_fused


# --- pairs ---------------------------------------------------------------------------------------


def run(
    root: Path,
    only: Sequence[str],
    files: Sequence[str],
    timeout: float,
    known: Sequence[Case] = (),
    keep: Callable[[list[Case]], None] | None = None,
    logs: Path | None = None,
) -> list[Case]:
    """Run the files; prints as it goes.

    only: patterns of pytest's -k. timeout: seconds that a pair may take. known: cases that have an
    end already and are not run. keep: called with all cases after each pair. logs: a folder for the
    output of pairs with a failure.
    """
    found = {(case.file, case.test): case for case in known}
    for file in files:
        begun = time.monotonic()
        mine: dict[str, Case] = {case.test: case for case in known if case.file == file}
        again = ""  # failed in the middle of a pair
        outcome = None
        while outcome is None or not outcome.ended:
            outcome = pair(root, file, only, timeout, mine)
            cases = outcome.cases
            first = next(iter(cases), "")
            bad = [case for case in cases.values() if case.status == "fail"]
            second = {case.test for case in bad if case.test not in (first, again)}
            again = next(iter(second), "")
            for case in cases.values():
                if case.test not in second:
                    mine[case.test] = case
                    found[file, case.test] = case
                    if case.status != "pass":
                        print(f"{case.status:5} {case.test}\n        {case.reason}", flush=True)
            if bad and logs:
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"{bad[0].test}.log").write_text(outcome.output)
            if keep:
                keep(list(found.values()))
            if outcome.stopped:
                raise KeyboardInterrupt
        print(f"{file}: {len(mine)} tests, {time.monotonic() - begun:.0f} s", flush=True)
    return list(found.values())


def pair(
    root: Path, file: str, only: Sequence[str], timeout: float, done: Collection[str]
) -> Outcome:
    """Run pytest on both ranks until a test fails."""
    from evener.base.ports import free_port
    from evener.tools.launch.horovod_path import ALIAS

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="upstream-tensorflow-") as scratch:
        lines = [Path(scratch) / f"{rank}.jsonl" for rank in range(SIZE)]
        logs = [Path(scratch) / f"{rank}.log" for rank in range(SIZE)]
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "--capture=no"]
        arguments += ["--tb=short", "-c", os.devnull, f"--rootdir={root}", str(root / file)]
        arguments += [f"-k={' or '.join(only)}"] if only else []
        processes = []
        for rank in range(SIZE):
            lines[rank].touch()
            plan = {"arguments": arguments, "lines": str(lines[rank]), "done": sorted(done)}
            environment = {
                **os.environ,
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(SIZE),
                "HOROVOD_LOCAL_RANK": str(rank),
                "HOROVOD_LOCAL_SIZE": str(SIZE),
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "1",
                "HOROVOD_CONTROLLER": "gloo",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "EVENER_TIMEOUT": "20",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "PYTHONPATH": os.pathsep.join([str(ALIAS), str((root / file).parent)]),
                # Nothing is written into the checkout.
                "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "upstream-pycache"),
            }
            command = [sys.executable, __file__, json.dumps(plan)]
            with logs[rank].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=scratch,
                        start_new_session=True,
                    )
                )
        late, stopped = OVER, False
        try:
            late = _wait(processes, lines, timeout)
        except KeyboardInterrupt:
            stopped = True
        finally:
            died = {rank for rank, process in enumerate(processes) if process.poll() is not None}
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = [
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            for path in lines
        ]
        cases = judge(file, said, late, died)
        output = "\n".join(
            f"--- rank {rank}\n{log.read_text(errors='replace')[-20000:]}"
            for rank, log in enumerate(logs)
        )
        ended = not late and all(process.returncode in (0, 5) for process in processes)
        # What cannot be imported has no tests.
        ended = ended or any("collect" in event for events in said for event in events)
        if not (ended or stopped or cases):
            sys.exit(f"error: pytest did not run {file}\n{output}")
        return Outcome(cases, ended, stopped, output)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], lines: Sequence[Path], timeout: float
) -> str:
    """Wait for both ranks; why they were stopped, or nothing."""
    deadline = time.monotonic() + timeout
    size, quiet = -1, time.monotonic() + QUIET
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if any(process.poll() not in (None, 0, 5) for process in processes):
            deadline = min(deadline, now + GRACE)  # the other one waits for it
        total = sum(path.stat().st_size for path in lines)
        if total != size:
            size, quiet = total, now + QUIET
        if now > min(deadline, quiet):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGUSR1)  # its threads' stacks go to the log
            time.sleep(0.2)
            return f"no end within {QUIET:g} s" if now > quiet else OVER
        time.sleep(0.1)
    return ""


def judge(
    file: str,
    said: Sequence[Sequence[dict[str, Any]]],
    late: str,
    died: Collection[int] = (),
) -> dict[str, Case]:
    """The cases, from the lines of all ranks: the worse of what they say.

    late: why the ranks that were left were stopped, empty where none was. died: ranks that were not
    stopped: a test that such a rank began and did not end is the one that it died in.
    """
    cases: dict[str, Case] = {}
    for rank, events in enumerate(said):
        ends = {event["test"]: event for event in events if event["status"] != "begun"}
        for event in events:
            test = event["test"]
            if event["status"] == "begun" and test in ends:
                continue
            if event["status"] == "begun" and rank in died:
                event = {"status": "fail", "reason": "the process died"}
            elif event["status"] == "begun":
                event = {"status": "none", "reason": late}
            status, reason = event["status"], event.get("reason", "")
            if status in ("fail", "none"):
                reason = f"rank {rank}: {reason}"
            before = cases.get(test)
            if before is None or WORSE.index(status) > WORSE.index(before.status):
                cases[test] = Case(file, test, status, reason)
    # A rank that waited is the failure only where no other rank failed.
    failed = late == OVER or any(case.status == "fail" for case in cases.values())
    for test, case in list(cases.items()):
        if case.status == "none" and failed:
            del cases[test]
        elif case.status == "none":
            case.status = "fail"
        place = f"{file}::{test}"
        for pattern, says, why in OTHERWISE:
            if case.status == "fail" and fnmatch.fnmatch(place, pattern) and says in case.reason:
                case.status, case.reason = "other", f"{why} ({case.reason})"
    return cases


# From the best to the worst; none: begun and not ended.
WORSE = ("skip", "pass", "none", "fail")

if __name__ == "__main__":
    sys.exit(rank_main(json.loads(sys.argv[1])))
