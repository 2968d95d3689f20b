"""Ranks on the CPU: torch.distributed's Gloo, one process a rank.

Gloo reduces in place only, so a measurement out of place includes copying the input. The figures
are of the network and of Gloo, and no bound for what GPUs would do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.tools.bench.collectives.buffers import Buffers, needed
from evener.tools.bench.collectives.clock import Ready
from evener.tools.bench.collectives.options import Options
from evener.tools.bench.collectives.shapes import Collective, Shape

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class GlooCarrier:
    """One rank, the process's own."""

    def __init__(self, options: Options, rank: int, ranks: int) -> None:
        size = needed(options.maxbytes, options.unalign)
        try:
            send, receive = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        except RuntimeError as error:
            raise MemoryError(f"two buffers of {size} bytes: {error}") from None
        self.buffers = Buffers(send, receive, rank, ranks, options.unalign)
        self.rank, self.ranks = rank, ranks
        self._marks: list[float] = []

    def start(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int, in_place: bool
    ) -> Ready:
        send = self.buffers.send(shape, kind, in_place)
        receive = self.buffers.receive(shape, kind, in_place)
        call: Callable[[], None]
        if self.ranks == 1 or not shape.count:
            call = (lambda: None) if in_place else (lambda: _copy(receive, send))
        else:
            function: Any = getattr(self, f"_{collective.name}")
            call = function(send, receive, shape.count, op, root, in_place)

        def run(_first: int, count: int, _together: int) -> None:
            for _ in range(count):  # Gloo has no groups: calls follow one another
                call()

        def timed(count: int, together: int) -> tuple[float, float]:
            run(0, 1, 1)
            begin = time.perf_counter()
            run(0, count, together)
            seconds = time.perf_counter() - begin
            return seconds, seconds

        return Ready(run, timed)

    def wait(self) -> None:
        """Calls return when they are done."""

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def between(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True)]

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError("options.check refuses -G on the CPU")

    def fill(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> None:  # fmt: skip
        self.buffers.fill(collective, shape, kind, op, in_place, repetition)

    def wrong(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> int:  # fmt: skip
        return self.buffers.wrong(collective, shape, kind, op, root, in_place, repetition)

    # Each returns a function without arguments, so that nothing is prepared inside the time.

    def _all_reduce(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        def call() -> None:
            if not in_place:
                receive.copy_(send)
            dist.all_reduce(receive, _OPS[op])

        return call

    def _reduce(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        def call() -> None:
            if not in_place:
                receive.copy_(send)
            dist.reduce(receive, root, _OPS[op])

        return call

    def _broadcast(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        def call() -> None:
            if not in_place and self.rank == root:
                receive.copy_(send)
            dist.broadcast(receive, root)

        return call

    def _all_gather(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        parts = list(receive.split(count))
        return lambda: _done(dist.all_gather(parts, send))

    def _reduce_scatter(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        # In place the result lies in the input, which Gloo must not write while it reads.
        result = torch.empty_like(receive) if in_place else receive

        def call() -> None:
            dist.reduce_scatter_tensor(result, send, _OPS[op])
            if in_place:
                receive.copy_(result)

        return call

    def _alltoall(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        source = send.clone() if in_place else send
        return lambda: _done(dist.all_to_all_single(receive, source))

    def _gather(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        parts = list(receive.split(count)) if self.rank == root else None
        return lambda: _done(dist.gather(send, parts, root))

    def _scatter(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        parts = list(send.split(count)) if self.rank == root else None
        return lambda: _done(dist.scatter(receive, parts, root))

    def _sendrecv(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        source = send.clone() if in_place else send

        def call() -> None:
            works = [dist.isend(source, after), dist.irecv(receive, before)]
            for work in works:
                if work is not None:
                    work.wait()

        return call

    def _hypercube(
        self, send: Tensor, receive: Tensor, count: int, op: str, root: int, in_place: bool
    ) -> Callable[[], None]:
        def call() -> None:
            if not in_place:
                receive[self.rank * count : (self.rank + 1) * count].copy_(send)
            mask = 1
            while mask < self.ranks:
                mine = self.rank & ~(mask - 1)
                theirs = mine ^ mask
                peer = self.rank ^ mask
                works = [
                    dist.isend(receive[mine * count : (mine + mask) * count], peer),
                    dist.irecv(receive[theirs * count : (theirs + mask) * count], peer),
                ]
                for work in works:
                    if work is not None:
                        work.wait()
                mask *= 2

        return call


def _copy(receive: Tensor, send: Tensor) -> None:
    receive[: send.numel()].copy_(send)


def _done(_: object) -> None:
    """The call was waited for inside."""
