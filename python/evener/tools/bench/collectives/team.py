"""The threads and processes of a run: who is who, barriers, sums.

Rank = (process * threads + thread) * gpus + gpu, as in nccl-tests. Between threads a barrier of
the standard library, between processes a Gloo group.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from evener.comm.world.ranks import detect

T = TypeVar("T")


class Processes:
    """The processes of the job and this one's place among them."""

    def __init__(self) -> None:
        self.rank, self.size, self.local_rank = 0, 1, 0

    @classmethod
    def join(cls) -> Processes:
        """Join the job that a launcher started, or be alone. Raises EvenerError."""
        joined = cls()
        ranks = detect()
        if ranks.size == 1:
            return joined
        import torch.distributed as dist

        from evener.comm.world.rendezvous import init_process_group

        ranks = init_process_group(ranks, backend="gloo", set_device=False)
        joined.rank, joined.size = ranks.rank, ranks.size
        names: list[Any] = [None] * joined.size
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        dist.all_gather_object(names, host)
        joined.local_rank = sum(name == host for name in names[: joined.rank])
        return joined

    def gather(self, value: T) -> list[T]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Process 0's value."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()


class Team:
    """One thread's view: barriers and sums over all threads of all processes."""

    def __init__(self, processes: Processes, threads: int, thread: int, shared: Shared) -> None:
        self.processes, self.threads, self.thread = processes, threads, thread
        self.shared = shared
        self.main = processes.rank == 0 and thread == 0

    def barrier(self) -> None:
        """Wait for every thread of every process."""
        self._led(self.processes.barrier)

    def gather(self, value: T) -> list[T]:
        """Every thread's value, process by process."""
        self.shared.values[self.thread] = value
        nested = self._led(lambda: self.processes.gather(list(self.shared.values)))
        return [one for process in nested for one in process]

    def average(self, value: float, how: int) -> float:
        """nccl-tests' -a: 0 the first's, 1 the mean, 2 the least, 3 the largest."""
        values = self.gather(value)
        if how == 0:
            return values[0]
        if how == 1:
            return sum(values) / len(values)
        return min(values) if how == 2 else max(values)

    def _led(self, function: Callable[[], T]) -> T:
        """Thread 0 calls; all get what it got."""
        shared = self.shared
        shared.wait.wait()
        if self.thread == 0:
            shared.answer = function()
        shared.wait.wait()
        return shared.answer  # type: ignore[no-any-return]


class Shared:
    """What the threads of one process share."""

    def __init__(self, threads: int) -> None:
        self.wait = threading.Barrier(threads)
        self.values: list[Any] = [None] * threads
        self.answer: Any = None
