"""One process a slot, watched as a launcher watches: the first failure ends all.

One thread reads all pipes with a selector. A rank's lines keep their order within each stream. A
rank is done when its process has ended: descendants that hold its pipes open are not waited for.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from evener.tools.lab.kills import Kills

LineCallback = Callable[[int, str, str, str], None]
_LINGER = 0.5  # seconds in which output may still come after the last process has ended
_LONGEST_LINE = 1 << 20
TIMED_OUT = 124


@dataclass(frozen=True)
class Result:
    """How a launch ended.

    `status`: 0, or the exit status of the process that failed first (-9 for SIGKILL), or 124 after
    the timeout. `rank`, `node`: which one that was, None otherwise. `statuses`: of all ranks, in
    order. `seconds`: from start to end.
    """

    status: int
    rank: int | None
    node: str | None
    statuses: tuple[int, ...]
    seconds: float
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether all of them ended with status 0."""
        return self.status == 0


@dataclass
class _Stream:
    """One pipe of one rank, cut into lines."""

    rank: int
    name: str
    pipe: IO[bytes]
    file: IO[bytes] | None
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    rest: str = ""

    def read(self) -> tuple[list[str], bool]:
        """Whole lines that have come, and whether more may."""
        try:
            data = os.read(self.pipe.fileno(), 65536)
        except BlockingIOError:
            return [], True
        if self.file is not None and data:
            self.file.write(data)
            self.file.flush()
        lines = (self.rest + self.decoder.decode(data, not data)).split("\n")
        self.rest = lines.pop()
        if not data or len(self.rest) > _LONGEST_LINE:
            lines += [self.rest] if self.rest else []
            self.rest = ""
        return [line.removesuffix("\r") for line in lines], bool(data)


class _Ranks:
    """All processes of a launch."""

    def __init__(self, nodes: Sequence[str], on_line: LineCallback, output: Path | None) -> None:
        self.nodes = nodes
        self.on_line = on_line
        self.output = output
        self.processes: list[subprocess.Popen[bytes]] = []
        self.selector = selectors.DefaultSelector()
        self.first_failed: int | None = None
        self.killed: set[int] = set()  # ranks whose end is no failure

    def start(self, start: Callable[[int], subprocess.Popen[bytes]]) -> None:
        for rank in range(len(self.nodes)):
            self.processes.append(start(rank))
            self._follow(rank, "wb")

    def start_again(self, rank: int, start: Callable[[int], subprocess.Popen[bytes]]) -> None:
        self.killed.discard(rank)
        self.processes[rank] = start(rank)
        self._follow(rank, "ab")

    def _follow(self, rank: int, mode: str) -> None:
        process = self.processes[rank]
        self._watch(process.pid, ("ended", rank))
        for name in ("stdout", "stderr"):
            pipe = getattr(process, name)
            os.set_blocking(pipe.fileno(), False)
            file = None
            if self.output is not None:
                file = (self.output / f"rank.{rank}.{name}").open(mode)
            self.selector.register(pipe, selectors.EVENT_READ, _Stream(rank, name, pipe, file))

    def on(self, node: str) -> list[int]:
        return [rank for rank, name in enumerate(self.nodes) if name == node]

    def _watch(self, pid: int, data: object) -> None:
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data)

    @property
    def running(self) -> bool:
        return any(process.returncode is None for process in self.processes)

    @property
    def open(self) -> bool:
        return bool(self.selector.get_map())

    def wait(self, seconds: float | None) -> None:
        """Handle what comes within `seconds`."""
        for key, _ in self.selector.select(None if seconds is None else max(seconds, 0)):
            if isinstance(key.data, _Stream):
                self._read(key.data)
            else:
                self.selector.unregister(key.fd)
                os.close(key.fd)
                rank = key.data[1]
                failed = self.processes[rank].wait() != 0 and rank not in self.killed
                if failed and self.first_failed is None:
                    self.first_failed = rank

    def _read(self, stream: _Stream) -> None:
        lines, more = stream.read()
        if not more:
            self.selector.unregister(stream.pipe)
            stream.pipe.close()
            if stream.file is not None:
                stream.file.close()
        for line in lines:
            self.on_line(stream.rank, self.nodes[stream.rank], stream.name, line)

    def signal(self, *, kill: bool) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill() if kill else process.terminate()

    def end(self, grace: float) -> None:
        """SIGTERM, then SIGKILL: back within `grace` and a second, whatever the processes do."""
        self.signal(kill=False)
        self._until_ended(time.monotonic() + grace)
        if self.running:
            self.signal(kill=True)
            self._until_ended(time.monotonic() + 5)

    def _until_ended(self, deadline: float) -> None:
        while self.running and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def drain(self) -> None:
        """Output that is still in the pipes."""
        deadline = time.monotonic() + _LINGER
        while self.open and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _Stream):
                if key.data.file is not None:
                    key.data.file.close()
            else:
                os.close(key.fd)
        self.selector.close()
        for process in self.processes:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def run_slots(
    start: Callable[[int], subprocess.Popen[bytes]],
    nodes: Sequence[str],
    *,
    timeout: float | None,
    on_line: LineCallback | None,
    prefix: bool,
    quiet: bool,
    output_dir: Path | None,
    grace: float,
    kills: Kills | None = None,
) -> Result:
    """Start one process for each entry of `nodes` (rank by rank), see `Lab.launch`."""
    if on_line is None:
        on_line = _drop if quiet else (_print_prefixed if prefix else _print_plain)
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ranks = _Ranks(nodes, on_line, output_dir)
    timed_out = False
    try:
        try:
            ranks.start(start)
            while ranks.running and ranks.first_failed is None:
                now = time.monotonic()
                left = None if timeout is None else began + timeout - now
                if left is not None and left <= 0:
                    timed_out = True
                    break
                if kills is not None:
                    if kills.due <= now:
                        _come_and_go(ranks, kills, start)
                    until = kills.due - time.monotonic()
                    left = until if left is None else min(left, until)
                ranks.wait(left)
        finally:
            if ranks.running:
                ranks.end(grace)
        ranks.drain()
    finally:
        ranks.close()
    statuses = tuple(process.returncode for process in ranks.processes)
    failed = None if timed_out else ranks.first_failed
    status = TIMED_OUT if timed_out else (0 if failed is None else statuses[failed])
    node = None if failed is None else nodes[failed]
    return Result(status, failed, node, statuses, time.monotonic() - began, timed_out)


def _come_and_go(
    ranks: _Ranks, kills: Kills, start: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    if kills.away is not None:
        for rank in ranks.on(kills.come_back()):
            ranks.start_again(rank, start)
        return
    if any(process.returncode is not None for process in ranks.processes):
        kills.skip()  # the first rank is done: the job is at its end
    else:
        ranks.killed.update(ranks.on(kills.die(list(dict.fromkeys(ranks.nodes)))))


def _drop(*_: object) -> None:
    pass


def _print_prefixed(rank: int, node: str, stream: str, line: str) -> None:
    _print(stream, f"[{rank}@{node}] {line}")


def _print_plain(_rank: int, _node: str, stream: str, line: str) -> None:
    _print(stream, line)


def _print(stream: str, line: str) -> None:
    to = sys.stdout if stream == "stdout" else sys.stderr
    to.write(line + "\n")
    to.flush()
