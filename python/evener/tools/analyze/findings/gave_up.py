"""Which processes' NCCL gave up, and what it said last before.

NCCL prints a warning and then the way of the error through its files, up to the call that the
program made. Where that way ends early, NCCL only tried something and goes on without it.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from evener.tools.analyze.model import Process, Run, Warned

# Where a trail that reaches these files starts, NCCL gave the call up. Networks that are only tried
# leave trails in net.cc, net_ib.cc and socket.cc, NVLS in nvls.cc.
_GIVEN_UP = ("init", "group", "enqueue", "proxy", "transport", "bootstrap")
# Warnings after which nothing goes on, where no trail follows (NCCL_DEBUG=WARN, excerpts).
_FATAL = (
    "Cuda failure", "Got completion", "Error while creating shared memory",
    "Error while attaching to shared memory", "Duplicate GPU", "Socket recv failed",
    "Connection closed by remote peer", "Timeout waiting", "Mismatched", "collective mismatch",
    "essage truncated", "unhandled", "posix_fallocate failed", "failed to extend",
)  # fmt: skip


def gave_up(run: Run) -> set[Process]:
    """Processes whose trail reaches the call that the program made."""
    return {
        process
        for process, trail in run.trails.items()
        if any(PurePosixPath(step.file).stem in _GIVEN_UP for step, _ in trail)
    }


def tried(run: Run, warnings: list[Warned]) -> bool:
    """Whether these are of NVLS only and their trails end in it: NCCL went on without it."""
    processes = {process for w in warnings for process in w.processes}
    return (
        all("nvls" in w.place for w in warnings)
        and bool(processes & run.trails.keys())
        and not processes & gave_up(run)
    )


def failing(run: Run) -> dict[Process, int]:
    """Processes whose NCCL failed, and where their first trail or fatal warning stands."""
    found: dict[Process, int] = {}
    warned = {process for warning in run.warnings.values() for process in warning.processes}
    ups = gave_up(run)
    attempts = {
        process for w in run.warnings.values() if tried(run, [w]) for process in w.processes
    }
    for process, trail in run.trails.items():
        up = process in ups
        if process in attempts and not up:
            continue
        if up and all(step.code in (3, 7) for step, _ in trail) and process not in warned:
            continue  # an abort that the program asked for, or `in progress`
        if up or process in warned:
            found[process] = trail[0][1]
    for text, warning in run.warnings.items():
        if any(fatal in text for fatal in _FATAL) and not tried(run, [warning]):
            for process in warning.processes:
                found[process] = min(found.get(process, warning.where), warning.where)
    return found


def fatal(run: Run) -> list[Warned]:
    """The warnings that stand last before a process's trail: what it gave up for."""
    found = []
    for process in gave_up(run):
        trail = run.trails[process]
        start = next(where for step, where in trail if PurePosixPath(step.file).stem in _GIVEN_UP)
        before = [
            w for w in run.warnings.values()
            if process in w.processes and w.where <= start and w.where >> 40 == start >> 40
        ]  # fmt: skip
        if before:
            found.append(max(before, key=lambda w: w.where))
    return found
