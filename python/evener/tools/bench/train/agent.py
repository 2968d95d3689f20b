"""The agent of a slot: walks through the plan and forks a fresh process for each run.

`python -m evener.tools.bench.train.agent PLAN` is started once a slot, by the lab, by the loopback
cluster, or by the user's own launcher. It imports torch once and starts no thread, so that a fork
is a process as fresh as a new one without the seconds that the import takes: with four ranks on
two cores those are most of a short run. CUDA, NCCL, Gloo and OpenMP begin in the fork.

All agents take the same plan in the same order and meet in one TCPStore, which a child of rank 0's
agent serves (torchrun's own where it offers one). After each run every agent puts its outcome
there; rank 0's prints them on lines that start with `MARK`, for the command to read. A
rank that fails says so in the store, and the others stop their process rather than wait in a
collective for a peer that is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from evener.errors import EvenerError
from evener.tools.bench.train import clusters
from evener.tools.bench.train.plan import Options, Plan, Run

if TYPE_CHECKING:
    from evener.tools.bench.train.worker import Task

MARK = "@evener-bench "

_POLL_S = 0.25
# How long ranks may go on after a peer has failed, to report an error of their own.
_GRACE_S = 3.0
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that one ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class Place:
    """Where this agent stands among all agents. `nodes[r]`: the node of rank r, by first rank."""

    rank: int
    slot: int
    nodes: tuple[int, ...]

    def group(self, plan: Plan, row: str) -> tuple[int, tuple[int, ...]] | None:
        """(index of its group, the group's ranks) in that row; None where it stays idle."""
        mine = self.nodes[self.rank]
        background = plan.options.background
        if row == "all":
            return 0, tuple(range(len(self.nodes)))
        if row == "node":
            ranks = tuple(rank for rank, node in enumerate(self.nodes) if node == mine)
            return (mine, ranks) if background or mine == 0 else None
        return (self.rank, (self.rank,)) if background or self.rank == 0 else None


class Agent:
    """Runs the plan on one slot."""

    def __init__(self, plan: Plan, given: clusters.Given) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.plan, self.given = plan, given
        self.timeout = timedelta(seconds=plan.options.timeout + 120)
        if given.rank == 0 and not given.store_is_served:
            _serve_store(given.address, given.port)
        store = TCPStore(given.address, given.port, None, False, self.timeout)
        self.prefix = "evener-bench"
        self.store = PrefixStore(self.prefix, store)
        self.place = self._find_place()

    def _find_place(self) -> Place:
        self.store.set(f"host/{self.given.rank}", self.given.host)
        hosts = [self.store.get(f"host/{rank}").decode() for rank in range(self.given.world)]
        order = list(dict.fromkeys(hosts))
        return Place(
            self.given.rank, self.given.local_rank, tuple(order.index(host) for host in hosts)
        )

    def walk(self) -> None:
        """All runs of the plan, in order."""
        for run in self.plan.runs:
            began = time.monotonic()
            outcome = self._take_part(run)
            self.store.set(f"outcome{run.index}/{self.given.rank}", json.dumps(outcome))
            if self.given.rank == 0:
                for rank in range(self.given.world):
                    # A line per rank: who reads them need not take lines of megabytes.
                    part = json.loads(self.store.get(f"outcome{run.index}/{rank}"))
                    _say({"run": run.index, "outcome": part})
                seconds = round(time.monotonic() - began, 3)
                _say({"run": run.index, "seconds": seconds})
                self.store.set(f"next{run.index}", "1")
            self.store.wait([f"next{run.index}"])

    def _take_part(self, run: Run) -> dict[str, Any]:
        from evener.tools.bench.train import worker

        found = self.place.group(self.plan, run.row)
        if found is None:
            return {"status": "idle"}
        group, ranks = found
        nodes = self.place.nodes
        near = [rank for rank in ranks if nodes[rank] == nodes[self.given.rank]]
        whole = run.row == "all" or self.plan.options.background
        task = worker.Task(
            run=run.index,
            row=run.row,
            column=run.column,
            group=group,
            rank=ranks.index(self.given.rank),
            world=len(ranks),
            local_rank=near.index(self.given.rank),
            local_world=len(near),
            slot=self.place.slot,
            everyone=self.given.world if whole else len(ranks),
            address=self.given.address,
            port=self.given.port,
            prefix=self.prefix,
        )
        with _forked(task, self.plan) as child:
            outcome = self._watch(run, child)
        if outcome["status"] == "failed":
            reason = f"rank {self.given.rank}: {outcome['reason']}"
            self.store.set(f"abort{run.index}", reason)
        return outcome

    def _watch(self, run: Run, child: _Child) -> dict[str, Any]:
        """Wait for the child's report or its end, for the timeout, or for a peer's failure."""
        deadline = time.monotonic() + self.plan.options.timeout
        phase, leave = "start", float("inf")
        while True:
            for message in child.messages(_POLL_S):
                if "done" in message:
                    return {"status": "ok", **message["done"]}
                if "error" in message:
                    return {"status": "failed", "phase": phase, **message["error"]}
                phase = message["phase"]
                if self.given.rank == 0:
                    _say({"run": run.index, **message})
            now = time.monotonic()
            if child.ended:
                reason = f"ended with {child.status()} in phase {phase!r}"
                return {"status": "failed", "phase": phase, "reason": reason, "tail": child.tail()}
            if now > deadline:
                reason = f"not done after {self.plan.options.timeout:g} s, in phase {phase!r}"
                return {"status": "failed", "phase": phase, "reason": reason, "tail": child.tail()}
            if leave == float("inf") and self.store.check([f"abort{run.index}"]):
                leave = now + _GRACE_S
            if now > leave:
                reason = self.store.get(f"abort{run.index}").decode()
                return {"status": "stopped", "phase": phase, "reason": reason}


class _Child:
    """A forked run: what it reports through a pipe, what it prints into a file."""

    def __init__(self, pid: int, reports: int, output: IO[bytes]) -> None:
        self.pid, self.reports, self.output = pid, reports, output
        self.buffer = b""
        self.ended = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(reports, selectors.EVENT_READ)

    def messages(self, timeout: float) -> list[dict[str, Any]]:
        """What has come within `timeout` seconds; empty with `ended` set when it closed its end."""
        if not self.selector.select(timeout):
            return []
        data = os.read(self.reports, 1 << 20)
        if not data:
            self.ended = True
            return []
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def status(self) -> str:
        """How it ended, in words."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def tail(self) -> list[str]:
        """The last lines that it printed."""
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        return text.splitlines()[-_TAIL_LINES:]

    def close(self) -> None:
        """End it, if it still runs, and what it holds."""
        if self.pid:
            # A run that is done has left its last barrier and holds nothing that others need.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.selector.close()
        os.close(self.reports)
        self.output.close()


@contextlib.contextmanager
def _forked(task: Task, plan: Plan) -> Iterator[_Child]:
    sys.stdout.flush()
    sys.stderr.flush()
    reports, far_end = os.pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115 (the child object closes it)
    pid = os.fork()
    if pid == 0:
        os.close(reports)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        _be_worker(task, plan, far_end)
    os.close(far_end)
    child = _Child(pid, reports, output)
    try:
        yield child
    finally:
        child.close()


def _be_worker(task: Task, plan: Plan, reports: int) -> None:
    """The forked process: never returns, and leaves without the parent's exit handlers."""
    die_with_parent()
    status = 1

    def report(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(reports, data) :]

    try:
        from evener.tools.bench.train import worker

        worker.execute(task, plan.options, plan.column(task.column), report)
        status = 0
    except BaseException as error:  # noqa: BLE001 (whatever it is, rank 0 must learn of it)
        reason = error.problem if isinstance(error, EvenerError) else _in_a_line(error)
        trace = traceback.format_exc().splitlines()[-_TAIL_LINES:]
        with contextlib.suppress(OSError):
            report({"error": {"reason": reason, "tail": trace}})
    finally:
        os._exit(status)


def _in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _serve_store(address: str, port: int) -> None:
    """Serve the TCPStore from a child, so that this process stays without threads and can fork."""
    ready, told = os.pipe()
    if os.fork() == 0:
        die_with_parent()
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            _store = TCPStore(address, port, None, True, wait_for_workers=False)
            os.write(told, b"1")
            while True:
                signal.pause()
        except BaseException as error:  # noqa: BLE001 (say it and leave; the parent sees the pipe)
            sys.stderr.write(f"no store at {address}:{port}: {_in_a_line(error)}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(ready, "rb") as pipe:
        if not pipe.read(1):
            raise EvenerError(
                f"rank 0 cannot serve the benchmark's store at {address}:{port}",
                "choose another MASTER_PORT",
            )


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def import_early(plan: Plan) -> None:
    """What every fork would import again, but nothing that starts CUDA or a thread."""
    wanted = ["torch", "torch.distributed", "torch.nn.parallel", "evener.tools.bench.train.worker"]
    wanted.append("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    # The first optimizer that is made imports this, for seconds.
    wanted.append("torch._dynamo")
    from evener.tools.bench.train import models

    if not models.is_built_in(plan.options.model):
        wanted.append("torchvision.models")
    if any(column.wrap == "evener" for column in plan.columns):
        wanted.append("evener.ddp")
    if any(column.sharded for column in plan.columns):
        wanted.append("evener.fsdp")
    for name in wanted:
        # What is missing here is reported by the run that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def plan_from_json(text: str) -> Plan:
    """The plan as the command passes it on the command line."""
    from evener.tools.bench.train import columns, plan

    raw = json.loads(text)
    return plan.make(
        Options.from_json(raw["options"]),
        nodes=raw["nodes"],
        slots=raw["slots"],
        sizes=raw["sizes"],
        rows=raw["rows"],
        columns=[columns.column(name) for name in raw["columns"]],
    )


def plan_to_json(plan: Plan) -> str:
    """The inverse of `plan_from_json`."""
    return json.dumps(
        {
            "options": plan.options.to_json(),
            "nodes": plan.nodes,
            "slots": plan.slots,
            "sizes": plan.sizes,
            "rows": [row.name for row in plan.rows],
            "columns": [column.name for column in plan.columns],
        }
    )


def main() -> None:
    """`python -m evener.tools.bench.train.agent PLAN`."""
    # NumPy's OpenBLAS starts its threads when it is imported, and this process must have none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Nor may it wake CUDA, which does not survive a fork: ask NVML what there is.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    plan = plan_from_json(sys.argv[1])
    import_early(plan)
    try:
        Agent(plan, clusters.Given.detect(os.environ)).walk()
    except EvenerError as error:
        _say({"fatal": error.problem, "fix": error.fix})
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
