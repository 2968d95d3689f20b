"""Run upstream Horovod's own tests against Evener's `horovod`: `make upstream-horovod DIR=...`.

DIR is a checkout (or an exported tree) of upstream's public repository that the user has; nothing
of it is kept here. Its tests are run as they are, each in its own pair of processes, because a test
that fails leaves the collectives of its process in an unknown state, and many tests change the
process's environment. (Those of test/single are written for one process, and get one.)

A pair costs a fraction of a second: its processes are forked from a server that has imported torch,
pytest and Evener and done nothing else. `--fresh` starts a new interpreter for each rank
instead, to show that the fork hides nothing. Ranks are told who they are as upstream's launcher
does it (HOROVOD_RANK, ...); the store through which they meet is held here, so no two pairs can
collide on a port.

What counts: a test passes if it passed on a rank and failed on none; it is skipped if all ranks
skipped it. One that is listed in KNOWN fails with upstream's own library too, and does not make the
command fail.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# All of upstream's but for TensorFlow, Spark and MXNet.
FILES = (
    "test/parallel/test_adasum_pytorch.py",
    "test/parallel/test_common.py",
    "test/parallel/test_timeline.py",
    "test/parallel/test_torch.py",
    "test/integration/test_elastic_torch.py",
    "test/integration/test_interactiverun.py",
    "test/integration/test_stall.py",
    "test/integration/test_static_run.py",
    "test/single/test_buildkite.py",
    "test/single/test_compute_service.py",
    "test/single/test_elastic_discovery.py",
    "test/single/test_elastic_driver.py",
    "test/single/test_elastic_run.py",
    "test/single/test_ray.py",
    "test/single/test_ray_elastic.py",
    "test/single/test_ray_elastic_v2.py",
    "test/single/test_run.py",
    "test/single/test_service.py",
    "test/single/test_task_service.py",
    "test/single/test_torch_elastic.py",
    "test/single/test_util.py",
)
# Files whose tests are of one process.
ALONE = ("test/single/", "test/integration/test_e", "test/integration/test_i", "static_run.py")
# Fails beside current torch whatever the library is: what the failure says, and why.
_MUON = ("Muon only supports 2D", "the test gives torch's Muon optimizer a bias, which it refuses")
KNOWN = {
    "test_broadcast_state": _MUON,
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
}
# Tests of what Evener does in another way: patterns of `file::Class.test`, and why they fail.
_DRIVER = "of the inside of upstream's own launcher, in whose place evener launch stands"
OTHERWISE = (
    ("test/single/test_elastic_driver.py::*", _DRIVER),
    ("test/single/test_service.py::*", _DRIVER),
    ("test/single/test_task_service.py::*", _DRIVER),
    ("test/single/test_compute_service.py::*", "of upstream's service for TensorFlow's data"),
    (
        "*test_ray_elastic.py::test_fault_tolerance_hosts_added_and_removed",
        "the hosts that have the state go on here until the others are ready",
    ),
    ("test/integration/test_elastic_torch.py::*", "it replaces parts of " + _DRIVER[3:]),
    (
        "test/integration/test_static_run.py::*",
        "it looks for the lines that upstream's driver prints",
    ),
    ("*test_run.py::*jsrun*", "of IBM's jsrun, which Evener does not drive"),
    ("*test_run.py::*js_run*", "of IBM's jsrun, which Evener does not drive"),
    (
        "*test_run.py::*.test_run_controller",
        "mpirun starts ranks here without an MPI that was built in",
    ),
)
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.optim",
    "pytest",
    "unittest.mock",
    "evener.comm.reducer",
    "evener.horovod.torch",
)
SIZE = 2
# When one rank has failed, its peer often waits for it: so long, and no longer.
GRACE = 8.0


@dataclass
class Report:
    """What one rank said of a test. status: passed, skipped, failed, died, late."""

    status: str
    reason: str = ""
    text: str = ""


@dataclass
class Result:
    """What became of a test. status: pass, skip, fail, known, other."""

    file: str
    test: str
    status: str
    reason: str
    seconds: float
    rank: int | None = None
    output: str = field(default="", repr=False)


# --- one rank ------------------------------------------------------------------------------------


class _Listener:
    """A pytest plugin: keeps the worst that happened."""

    def __init__(self) -> None:
        self.report = Report("died", "pytest reported nothing")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.report = Report("failed", _reason(report.longreprtext), report.longreprtext)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self.report = Report("skipped", str(reason).removeprefix("Skipped: "))
        elif report.when == "call" and self.report.status != "failed":
            self.report = Report("passed")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report = Report("failed", _reason(str(report.longrepr)), str(report.longrepr))


def _reason(text: str) -> str:
    """The first line of the error in a traceback as pytest prints it."""
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next(filter(None, lines), text.strip().rpartition("\n")[2])[:300]


def rank_main(environment: dict[str, str], alias: str, log: str, node: str, send: Any) -> None:
    """The process of one rank: run one test by pytest, send its Report. Does not return."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for name in [n for n in os.environ if n.startswith(("HOROVOD_", "OMPI_", "PMI_"))]:
        del os.environ[name]
    os.environ.update(environment)
    sys.pycache_prefix = environment["PYTHONPYCACHEPREFIX"]  # this interpreter has started already
    sys.path.insert(0, alias)
    listener = _Listener()
    try:
        import faulthandler

        import pytest
        import torch

        faulthandler.register(signal.SIGUSR1, all_threads=True)
        torch.set_num_threads(1)
        try:
            import mock  # noqa: F401, UP026 - what test/utils of upstream wants
        except ImportError:
            import unittest.mock

            sys.modules["mock"] = unittest.mock
        folder = Path(node.partition("::")[0]).parent
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:timeout", "--capture=no"]
        options += ["-c", os.devnull, f"--rootdir={folder}", "--tb=short"]
        file, _, name = node.partition("::")
        if name.endswith("[]"):  # its cases get names when the file is imported
            options.remove("-x")
            options += ["-k", name[:-2].replace("::", " and ")]
            node = file
        pytest.main([*options, node], plugins=[listener])
    except BaseException as error:  # noqa: BLE001 - reported, whatever it is
        listener.report = Report("failed", repr(error))
    sys.stdout.flush()
    sys.stderr.flush()
    data = pickle.dumps(asdict(listener.report))
    if isinstance(send, int):
        os.write(send, data)
    else:
        send.send_bytes(data)
        send.close()
    # The groups of a rank whose peer failed would be waited for.
    os._exit(0)


# --- a pair --------------------------------------------------------------------------------------


class Pairs:
    """Starts pairs and says what became of them."""

    def __init__(self, root: Path, gpu: bool, timeout: float, fresh: bool, scratch: Path) -> None:
        from evener.tools.launch.horovod_path import ALIAS

        self._root, self._gpu, self._timeout, self._fresh = root, gpu, timeout, fresh
        self._alias, self._scratch = str(ALIAS), scratch
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        # The fork server is started by the first process, and by one thread only.
        self._starting = threading.Lock()

    def run(self, file: str, test: str) -> Result:
        """Run one test; blocks until it has an end."""
        import torch.distributed as dist

        begun = time.monotonic()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        node = f"{self._root / file}::{test.replace('.', '::')}"
        size = 1 if any(part in file for part in ALONE) else SIZE
        logs = [self._scratch / f"{test}.{rank}.log" for rank in range(size)]
        started = [
            self._start(self._environment(rank, size, store.port, file), str(logs[rank]), node)
            for rank in range(size)
        ]
        try:
            reports = self._wait(started)
        finally:
            for process, _ in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait() if isinstance(process, subprocess.Popen) else process.join()
        del store
        return self._judge(file, test, reports, logs, time.monotonic() - begun)

    def _environment(self, rank: int, size: int, port: int, file: str) -> dict[str, str]:
        local, outer = str(rank), os.environ.get("PYTHONPATH")
        folder = str((self._root / file).parent)
        # Tests of Ray pretend that there are GPUs, which Ray refuses where they are hidden.
        hidden = {} if "test_ray" in file else {"CUDA_VISIBLE_DEVICES": ""}
        return {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": local,
            "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # The store at that port is held by the process that started us.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "EVENER_TIMEOUT": f"{max(5.0, self._timeout / 2):g}",
            "OMP_NUM_THREADS": "1",
            # Nothing is written into the user's checkout.
            # Tests start processes that import horovod and what is beside the test, too.
            "PYTHONPATH": os.pathsep.join(filter(None, (self._alias, folder, outer))),
            "PYTHONPYCACHEPREFIX": str(self._scratch / "pycache"),
            **({"HOROVOD_TEST_GPU": "1"} if self._gpu else hidden),
        }

    def _start(self, environment: dict[str, str], log: str, node: str) -> tuple[Any, Any]:
        if self._fresh:
            read, write = os.pipe()
            arguments = json.dumps([environment, self._alias, log, node, write])
            process: Any = subprocess.Popen(
                [sys.executable, __file__, "--rank", arguments],
                pass_fds=[write],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
            )
            os.close(write)
            return process, read
        receive, send = self._context.Pipe(duplex=False)
        with self._starting:
            process = self._context.Process(
                target=rank_main, args=(environment, self._alias, log, node, send), daemon=True
            )
            process.start()
        send.close()
        return process, receive

    def _wait(self, started: Sequence[tuple[Any, Any]]) -> list[Report]:
        from multiprocessing.connection import wait

        found: dict[int, Report] = {}
        deadline = time.monotonic() + self._timeout
        while len(found) < len(started):
            left = {pipe: rank for rank, (_, pipe) in enumerate(started) if rank not in found}
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in left.values():
                    # The stack of every thread goes to the rank's log.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(started[rank][0].pid, signal.SIGUSR1)
                time.sleep(0.2)
                for rank in left.values():
                    found[rank] = Report("late", f"did not end (limit {self._timeout:g} s)")
            for pipe in ready:
                rank = left[pipe]
                try:
                    data = os.read(pipe, 1 << 20) if isinstance(pipe, int) else pipe.recv_bytes()
                    found[rank] = Report(**pickle.loads(data))
                except EOFError:
                    found[rank] = Report("died", "the process died")
                if found[rank].status in ("failed", "died"):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [found[rank] for rank in range(len(started))]

    def _judge(
        self, file: str, test: str, reports: list[Report], logs: list[Path], seconds: float
    ) -> Result:
        worst = ("failed", "died", "late")
        bad = [(worst.index(r.status), rank) for rank, r in enumerate(reports) if r.status in worst]
        if not bad:
            skipped = all(report.status == "skipped" for report in reports)
            reason = reports[0].reason if skipped else ""
            return Result(file, test, "skip" if skipped else "pass", reason, round(seconds, 1))
        rank = min(bad)[1]
        name = test.rpartition(".")[2]
        says, why = KNOWN.get(name, ("", ""))
        status = "known" if says and says in reports[rank].text else "fail"
        place = f"{file}::{test}"
        if other := next((w for p, w in OTHERWISE if fnmatch.fnmatch(place, p)), ""):
            status, why = "other", other
        output = "\n".join(
            f"--- rank {r}: {report.status}\n{_tail(logs[r])}\n" for r, report in enumerate(reports)
        )
        reason = f"rank {rank}: {reports[rank].reason}"
        if status in ("known", "other"):
            reason = f"{why} ({reason})"
        return Result(file, test, status, reason, round(seconds, 1), rank, output)


def _tail(log: Path, size: int = 12000) -> str:
    try:
        return log.read_text(errors="replace")[-size:]
    except OSError:
        return "(no output)"


# --- all -----------------------------------------------------------------------------------------


def tests_of(path: Path) -> Iterator[str]:
    """`Class.test_name` of all tests in a file, in its order, without importing it."""

    def cases(function: ast.FunctionDef) -> str:
        expands = any("expand" in ast.unparse(d) for d in function.decorator_list)
        return "[]" if expands else ""

    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name.startswith("test"):
                    yield f"{node.name}.{member.name}{cases(member)}"


def chosen(root: Path, only: Sequence[str], files: Sequence[str]) -> list[tuple[str, str]]:
    """(file, test) to run. `only`: patterns, or parts of a test's name."""
    found = []
    for file in files:
        path = root / file
        if not path.is_file():
            sys.exit(f"error: {path} does not exist\n  fix: give a checkout of upstream's Horovod")
        for test in dict.fromkeys(tests_of(path)):
            name = test.rpartition(".")[2]
            if not only or any(fnmatch.fnmatch(name, p) or p in f"{file}::{test}" for p in only):
                found.append((file, test))
    return found


def lacks(path: Path) -> str:
    """What the file needs and is not installed here, as pip calls it; empty where all is there."""
    names = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    needs = names & {"parameterized", "psutil", "ray"}
    if "parameterized" in names:  # it looks into mock, for which unittest.mock does not do
        needs.add("mock")
    wanted = sorted(name for name in needs if importlib.util.find_spec(name) is None)
    # Upstream's file uses an option of ray.init that newer ones do not have.
    if path.name == "test_ray.py" and "ray" not in wanted:
        version = tuple(int(part) for part in importlib.metadata.version("ray").split(".")[:2])
        if version > (2, 40):
            wanted.append("ray==2.40")
    return " ".join(wanted)


def show(results: list[Result], wall: float) -> None:
    """The table: what did not pass, with the reason, and the counts."""
    order = {"fail": 0, "known": 1, "other": 2, "skip": 3, "pass": 4}
    for result in sorted(results, key=lambda r: (order[r.status], r.file)):
        if result.status != "pass":
            print(f"{result.status:5}  {result.test}\n         {result.reason}")
    print()
    names = ("pass", "skip", "known", "other", "fail")
    print(f"{'file':34} {'tests':>6} " + " ".join(f"{name:>6}" for name in names))
    for file in [*dict.fromkeys(result.file for result in results), ""]:
        mine = [result for result in results if not file or result.file == file]
        counts = [sum(result.status == name for result in mine) for name in names]
        print(f"{file or 'all':34} {len(mine):6} " + " ".join(f"{count:6}" for count in counts))
    print(f"\n{wall:.0f} s; 'known' fails with upstream's own library as well")
    print("'other': what it tests is done in another way here")


def examples(root: Path, options: argparse.Namespace) -> int:
    """Run the examples instead of the tests."""
    import upstream_examples

    outcomes = []
    limit = max(options.timeout, 600.0)
    for outcome in upstream_examples.run(root, options.only, limit):
        outcomes.append(outcome)
        print(f"{outcome.status:5} {outcome.seconds:6.1f} s  {outcome.example}  {outcome.reason}")
        sys.stdout.flush()
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{outcome.example}.log").write_text(outcome.output)
    if options.json:
        rows = [{k: v for k, v in asdict(o).items() if k != "output"} for o in outcomes]
        document = {"machine": machine(), "lab": upstream_examples.SPEC, "examples": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(outcome.status == "fail" for outcome in outcomes) else 0


def tensorflow(root: Path, options: argparse.Namespace) -> int:
    """Run the tests of TensorFlow and Keras instead of the others."""
    import upstream_tensorflow

    files = options.file or upstream_tensorflow.FILES
    if missing := " ".join(sorted({lacks(root / file) for file in files} - {""})):
        sys.exit(
            f"error: packages that these tests import are missing\n  fix: pip install {missing}"
        )
    names = ("evener", "keras", "tensorflow_cpu")
    versions = {name: _version(name) for name in names}
    document = {"python": platform.python_version(), **versions, "ranks": upstream_tensorflow.SIZE}
    known: list[upstream_tensorflow.Case] = []
    if options.resume and options.json and options.json.exists():
        before = json.loads(options.json.read_text())["tests"]
        cases = [upstream_tensorflow.Case(**row) for row in before]
        known = [case for case in cases if case.status != "fail"]

    def keep(cases: list[upstream_tensorflow.Case]) -> None:
        if options.json:
            rows = [asdict(case) for case in sorted(cases, key=lambda c: (c.file, c.test))]
            options.json.write_text(json.dumps({**document, "tests": rows}, indent=1) + "\n")

    limit = max(options.timeout, 600.0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what has an end is kept
    try:
        cases = upstream_tensorflow.run(root, options.only, files, limit, known, keep, options.logs)
    except KeyboardInterrupt:
        sys.exit("stopped; with --resume and the same --json it goes on")
    statuses = ("pass", "skip", "other", "fail")
    for file in [*dict.fromkeys(case.file for case in cases), ""]:
        mine = [case.status for case in cases if not file or case.file == file]
        counts = "  ".join(f"{mine.count(status):4} {status}" for status in statuses)
        print(f"{file or 'all':56} {counts}")
    return 1 if any(case.status == "fail" for case in cases) else 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> dict[str, Any]:
    """What the results depend on."""
    import torch

    import evener

    return {
        "evener": evener.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path, help="a checkout of upstream's repository")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--file", action="append", metavar="PATH", help="default: all 21")
    parser.add_argument("--jobs", type=int, help="pairs at once; default: cores / 2, at least 2")
    parser.add_argument("--gpu", action="store_true", help="HOROVOD_TEST_GPU=1; needs 2 GPUs")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a test may take")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for each rank")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--logs", type=Path, help="keep the output of failed tests there")
    parser.add_argument("--tensorflow", action="store_true", help="the tests of TensorFlow")
    parser.add_argument(
        "--resume", action="store_true", help="with --tensorflow: leave out what --json has"
    )
    parser.add_argument("--examples", action="store_true", help="the examples, not the tests")
    options = parser.parse_args()
    if options.tensorflow:
        return tensorflow(options.dir.resolve(), options)
    if options.examples:
        return examples(options.dir.resolve(), options)
    jobs = options.jobs or max(2, (os.cpu_count() or 2) // 2)
    root = options.dir.resolve()
    todo = chosen(root, options.only, options.file or FILES)
    if not todo:
        sys.exit(f"error: no test is called {options.only}\n  fix: see test/parallel/test_torch.py")
    if options.gpu:
        import torch

        if torch.cuda.device_count() < SIZE:
            sys.exit(f"error: --gpu needs {SIZE} GPUs, here are {torch.cuda.device_count()}")
    results: list[Result] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="upstream-horovod-") as scratch:
        pairs = Pairs(root, options.gpu, options.timeout, options.fresh, Path(scratch))
        missing = {file: lacks(root / file) for file in dict.fromkeys(file for file, _ in todo)}
        for file, test in todo:
            if wants := missing[file]:
                results.append(Result(file, test, "skip", f"not run: pip install {wants}", 0.0))
        for file, wants in missing.items():
            if wants:
                print(f"{file} is not run\n  fix: pip install {wants}", flush=True)
        todo = [(file, test) for file, test in todo if not missing[file]]
        ended = 0
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(pairs.run, file, test) for file, test in todo]
            try:
                for future in as_completed(waiting):
                    results.append(result := future.result())
                    ended += 1
                    done = f"[{ended}/{len(todo)}]"
                    line = f"{done} {result.status:5} {result.seconds:5.1f} s  {result.test}"
                    print(line, flush=True)
                    if options.logs and result.output:
                        options.logs.mkdir(parents=True, exist_ok=True)
                        (options.logs / f"{result.test}.log").write_text(result.output)
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
    wall = time.monotonic() - begun
    print()
    show(results, wall)
    if options.json:
        document = {
            "machine": machine(),
            "gpu": options.gpu,
            "fresh": options.fresh,
            "jobs": jobs,
            "seconds": round(wall, 1),
            "tests": [
                {k: v for k, v in asdict(result).items() if k != "output"}
                for result in sorted(results, key=lambda r: (r.file, r.test))
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(result.status == "fail" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
