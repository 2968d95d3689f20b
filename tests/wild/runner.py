"""Runs a case's script on two CPU ranks, plain and under a door, and compares what they left.

The ranks pretend to be two nodes, so that a door works as over a network. Their store is held here:
no port can collide. A run that takes too long is ended with all that it started.

    plain      what DDP gives
    a door     losses and weights equal bit for bit, or to rounding; all ranks' weights alike

The difference that counts is relative to what training did: |weights - plain's| / |plain's - the
weights at the start|. Where it is more than rounding, plain DDP is run once more: a program whose
own runs differ proves nothing, and is told apart.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evener.door.enter import SITE
from evener.tools.launch.horovod_path import ALIAS
from tests.wild.cases import PLAIN, Case, Door, Program

ROOT = Path(__file__).parent.parent.parent
RANKS = 2
# Training makes more of a last bit with each step; these are differences after some dozen.
ROUNDING = 1e-3
_TAIL = 12
# What the calling shell may have set and what would make another job of it.
_DROPPED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_ENV", "PYTHONHOME")


@dataclass
class Run:
    """What one run of a script left. `problem`: why it left nothing, empty where it went well."""

    problem: str = ""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def alike(self) -> bool:
        """Whether all ranks hold the same parameters."""
        return len({rank["hash"] for rank in self.ranks}) == 1

    @property
    def steps(self) -> int:
        return len(self.ranks[0]["losses"])

    @property
    def step_s(self) -> float:
        """Seconds per step, the median of the second half."""
        return max(rank["step_s"] for rank in self.ranks)


@dataclass
class Row:
    """One line of the table. `result`: bits, rounding, or what is wrong in a word.

    `difference`: of the weights, relative to what training did; `loss`: the largest of the losses,
    relative. `ratio`: the door's time per step over plain DDP's. `said`: what Evener printed.
    """

    case: str
    package: str
    version: str
    door: str
    steps: int = 0
    result: str = ""
    difference: float | None = None
    loss: float | None = None
    ratio: float | None = None
    ok: bool = True
    why: str = ""
    said: list[str] = field(default_factory=list)


def execute(case: Case, door: Door, python: Path, steps: int, keep: Path | None = None) -> Run:
    """Run `case` under `door` with `python`; never longer than the case's time."""
    folder = Path(tempfile.mkdtemp(prefix=f"wild-{case.name}-{door.name}-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    files = [(folder / f"rank{rank}.log").open("wb") for rank in range(RANKS)]
    try:
        argv = [str(python), "-m", f"tests.wild.scripts.{case.script}", *case.args]
        for rank, file in enumerate(files):
            environment = _environment(rank, store.port, door, folder, steps)
            processes.append(
                subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        problem = _wait(processes, case.seconds)
        run = Run(problem, seconds=time.monotonic() - started)
        logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
        run.said = [line for line in logs[0].splitlines() if line.startswith("evener")]
        if problem:
            run.problem = "\n".join(
                [problem]
                + [f"rank {rank}: {line}" for rank in range(RANKS) for line in _tail(logs[rank])]
            )
        else:
            run.ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]
        return run
    finally:
        for process in processes:
            _kill(process)
        for file in files:
            file.close()
        if keep is not None:
            shutil.copytree(folder, keep / f"{case.name}-{door.name}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _environment(rank: int, port: int, door: Door, folder: Path, steps: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("EVENER_", "LIGHT_", "HOROVOD_"))
    }
    return {
        **kept,
        # The repository itself: the wild environment has no Evener, and no copy that could be old.
        # Its sitecustomize is what opens the door without a line, where a door's variables ask so.
        # The Horovod door's folder makes `import horovod` give Evener's.
        "PYTHONPATH": os.pathsep.join(
            [str(ALIAS)] * (door.line == "horovod") + [str(SITE), str(ROOT), str(ROOT / "python")]
        ),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank),
        "GROUP_RANK": str(rank),
        "NCCL_HOSTID": f"node{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "wild",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(folder / "hf"),
        "WANDB_MODE": "disabled",
        "WILD_OUT": str(folder),
        "WILD_STEPS": str(steps),
        "WILD_LINE": door.line,
        **door.env,
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
    """Until all have ended; what went wrong, empty where nothing did."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if all(status == 0 for status in statuses):
            return ""
        for rank, status in enumerate(statuses):
            if status:
                # The others may be about to say the same, or wait for this one for ever.
                time.sleep(2)
                return f"rank {rank} ended with status {status}"
        time.sleep(0.05)
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    return f"not ended after {seconds:g} s: rank {', '.join(map(str, late))}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-_TAIL:]


def judge(case: Case, row: Row, plain: Run, run: Run, close: float = 0.0) -> None:
    """Fill in the row: how `run` compares with `plain`. `close`: see `Door`."""
    row.said, row.steps = run.said, run.steps if run.ranks else 0
    if run.problem:
        row.ok, row.result, row.why = False, "failed", run.problem
        return
    row.ratio = run.step_s / plain.step_s if plain.step_s else None
    if not run.alike:
        row.ok, row.result = False, "ranks differ"
        row.why = "the ranks' parameters are not the same at the end"
    if run.steps != plain.steps:
        row.ok, row.result = False, "steps differ"
        row.why = f"{run.steps} steps, plain DDP took {plain.steps}"
        return
    row.loss = max(_loss(a, b) for a, b in zip(plain.ranks, run.ranks, strict=True))
    row.difference, where = _difference(plain, run)
    if not row.ok:
        return
    if _same(plain, run):
        row.result = "bits"
    elif row.difference <= ROUNDING and row.loss <= ROUNDING:
        row.result = "rounding"
        row.why = case.why
        if case.expects == "bits" and not close:
            row.ok, row.result = False, "not bits"
            row.why = f"the same to rounding, and bit for bit was expected; first in {where}"
    elif row.difference <= close:
        row.result, row.why = "lossy", f"within what lossy forms may do; most in {where}"
    else:
        row.ok, row.result, row.why = False, "differs", f"most in {where}"


def _same(plain: Run, run: Run) -> bool:
    for a, b in zip(plain.ranks, run.ranks, strict=True):
        if a["weights"].keys() != b["weights"].keys():
            return False
        if not _equal(torch.tensor(a["losses"]), torch.tensor(b["losses"])):
            return False
        if not all(_equal(a["weights"][name], b["weights"][name]) for name in a["weights"]):
            return False
    return True


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point():
        a, b = a.nan_to_num(), b.nan_to_num()
    return torch.equal(a, b)


def _loss(a: dict[str, Any], b: dict[str, Any]) -> float:
    x, y = (torch.tensor(each["losses"], dtype=torch.float64).nan_to_num() for each in (a, b))
    return float(((x - y).abs() / (x.abs() + 1e-12)).max()) if len(x) else 0.0


def _difference(plain: Run, run: Run) -> tuple[float, str]:
    """The difference of all weights together, and where the largest entry's is."""
    apart = moved = worst = 0.0
    where = "none"
    for a, b in zip(plain.ranks, run.ranks, strict=True):
        for name, value in a["weights"].items():
            if not value.is_floating_point() or name not in b["weights"]:
                continue
            one = value.double().nan_to_num()
            off = (one - b["weights"][name].double().nan_to_num()).abs()
            apart += float(off.square().sum())
            moved += float((one - a["start"][name].double().nan_to_num()).square().sum())
            if off.numel() and float(off.max()) > worst:
                worst, where = float(off.max()), name
    return (apart / moved) ** 0.5 if moved else float("inf"), where


def alone(program: Program, python: Path) -> Row:
    """Run a program that compares itself; never longer than its time."""
    row = Row(program.name, program.module, "", "itself")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EVENER_", "LIGHT_"))}
    environment = {
        **kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]),
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=f"wild-{program.name}-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(python), "-m", f"tests.wild.{program.module}", *program.args],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                problem = _wait([process], program.seconds)
            finally:
                _kill(process)
        row.result = "equal"
        if problem:
            row.ok, row.result = False, "failed"
            row.why = "\n".join([problem, *_tail(log.read_text(errors="replace"))])
    return row


def compare(
    case: Case,
    doors: Sequence[Door],
    python: Path,
    version: str,
    steps: int,
    keep: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """All rows of a case: plain first, which all others are held against."""
    package = case.package or "(loop)"
    say(f"{case.name}: plain")
    plain = execute(case, PLAIN, python, steps, keep)
    first = Row(case.name, package, version, PLAIN.name)
    if plain.problem:
        first.ok, first.result, first.why = False, "failed", plain.problem
        return [first]
    first.steps, first.result, first.difference, first.ratio = plain.steps, "reference", 0.0, 1.0
    if not plain.alike:
        first.ok, first.result = False, "ranks differ"
        first.why = "plain DDP itself leaves the ranks apart"
    moved = _difference(plain, plain)[0]
    if moved == float("inf"):
        first.ok, first.result, first.why = False, "proves nothing", "no weight moved in training"
    rows = [first]
    if not first.ok:
        return rows
    steady: bool | None = None
    for door in doors:
        row = Row(case.name, package, version, door.name)
        rows.append(row)
        reason = door.reason or case.skip.get(door.name, "")
        if reason:
            row.result, row.why = "not run", reason
            continue
        say(f"{case.name}: {door.name}")
        run = execute(case, door, python, steps, keep)
        judge(case, row, plain, run, door.close)
        if row.ok and not any(door.says in line for line in run.said or [""]):
            row.ok, row.result = False, "stayed out"
            row.why = "\n".join(run.said) or "Evener said nothing"
        if row.result in ("differs", "not bits"):
            if steady is None:
                again = execute(case, PLAIN, python, steps, keep)
                steady = not again.problem and _same(plain, again)
            if not steady:
                row.result = "proves nothing"
                row.why = "two runs of plain DDP differ as well"
    return rows
