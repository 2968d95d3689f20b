"""Errors that every rank hears of, in time.

A rank that fails leaves the others waiting for a tensor that never comes. So a rank that catches
its own error writes it to the job's store, and a thread of every rank looks there while a step
runs: it aborts the groups, at which the rank's wait ends, and the step raises the error
that was written. A rank that dies cannot write; its neighbours' connections break, they look whose
pulse in the store has stopped, and write that. Where the store is gone with rank 0, that is said.

Pipelines and spread experts have one each: `what` they are, and the class of their errors.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from evener.base.log import logger
from evener.errors import EvenerError

_PULSE = 0.25  # seconds between two pulses
_DEAD = 2.0  # seconds without a pulse


class RankError(EvenerError):
    """A step failed, on this rank or on another. `rank`: where; -1: not known."""

    def __init__(self, problem: str, fix: str = "", rank: int = -1) -> None:
        super().__init__(problem, fix)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.fix, self.rank)


class Watch:
    """Tells the other ranks what went wrong here, and hears of what did there.

    what: of which the ranks are ("pipeline"); name: of this one among all of the job; memory: the
    fix for a rank that is out of memory.
    """

    def __init__(
        self, name: str, rank: int, ranks: int, groups: list[dist.ProcessGroup], *,
        what: str, error: type[RankError], memory: str,
    ) -> None:  # fmt: skip
        self.rank, self.ranks, self.groups = rank, ranks, groups
        self.what, self.error, self.memory = what, error, memory
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"evener/{what}/{name}", store)
        with contextlib.suppress(RuntimeError, NotImplementedError):
            # A connection of its own: the program's may wait for something.
            self._store = PrefixStore(f"evener/{what}/{name}", store.clone())
        self._store.set_timeout(timedelta(seconds=10))
        self._running = threading.Event()
        self._steps = 0  # of all threads: parts of a batch take turns in threads of their own
        self._entering = threading.Lock()
        self._end = threading.Event()
        self.heard: RankError | None = None
        self._beat = 0
        # Before the first step, which may end before the thread's first turn: who is dead without
        # a pulse is not missed.
        self._store.set(f"pulse/{rank}", "0")
        self._thread = threading.Thread(target=self._loop, name=f"evener-{what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._running.set()
        self._thread.join(timeout=5)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Around everything that waits for other ranks. Raises `error`, the same on all."""
        if self.heard is not None:
            raise self.heard
        with self._entering:
            self._steps += 1
            self._running.set()
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if type(error).__name__ == "_StopRecomputationError":
                raise  # no error: how torch's checkpoint() ends a forward pass that it runs again
            raise self._judge(error, what) from error
        finally:
            with self._entering:
                self._steps -= 1
                if not self._steps:
                    self._running.clear()

    def _judge(self, error: Exception, what: str) -> RankError:
        """The error to raise for one that was caught here."""
        if self.heard is None and _from_a_peer(error):
            found = self._silent(error)
        elif self.heard is None:
            found = self._of_own(error, what)
        else:
            return self.heard
        return self._tell(found)

    def _tell(self, error: RankError) -> RankError:
        """Write an error for all, unless another was first."""
        text = json.dumps([error.problem, error.fix, error.rank])
        try:
            first = self._store.compare_set("error", "", text)
            self.heard = self.error(*json.loads(first))
        except RuntimeError as lost:
            logger.debug("the store cannot be reached: %s", lost)
            self.heard = error
        self._abort()
        return self.heard

    def _silent(self, error: Exception) -> RankError:
        """Which rank is dead, by its pulse; what was written meanwhile comes first."""
        deadline = time.monotonic() + _DEAD + 3.0
        seen: dict[int, tuple[bytes, float]] = {}
        while time.monotonic() < deadline:
            if self.heard is not None:
                return self.heard
            try:
                for rank in range(self.ranks):
                    key = f"pulse/{rank}"
                    if rank == self.rank or not self._store.check([key]):
                        continue
                    value = self._store.get(key)
                    if rank not in seen or seen[rank][0] != value:
                        seen[rank] = (value, time.monotonic())
                    elif time.monotonic() - seen[rank][1] > _DEAD:
                        return self.error(
                            f"rank {rank} of the {self.what} is gone (no sign of life for "
                            f"{_DEAD:g} s)",
                            f"see rank {rank}'s own log for why; start again from the last "
                            "checkpoint",
                            rank,
                        )
            except RuntimeError:
                return self._store_gone()
            time.sleep(_PULSE)
        return self.error(
            f"rank {self.rank} lost the connection to a neighbour: {_line(error)}",
            "see the logs of the ranks beside it; start again from the last checkpoint",
            self.rank,
        )

    def _loop(self) -> None:
        failures = 0
        while not self._end.is_set():
            time.sleep(_PULSE)
            try:
                self._beat += 1
                self._store.set(f"pulse/{self.rank}", str(self._beat))
                if self.heard is None and self._store.check(["error"]):
                    self.heard = self.error(*json.loads(self._store.get("error")))
                    self._abort()
                failures = 0
            except (RuntimeError, ValueError) as error:
                failures += 1
                logger.debug("the store cannot be reached: %s", error)
                if failures > _DEAD / _PULSE and self.heard is None and self._running.is_set():
                    self.heard = self._store_gone()
                    self._abort()

    def _abort(self) -> None:
        """End what waits on the groups, here; on Gloo at the other ends too."""
        for group in self.groups:
            try:
                group.abort()
                _close(group)
            except (RuntimeError, AttributeError) as error:
                logger.debug("a group was not aborted: %s", error)

    def _store_gone(self) -> RankError:
        return self.error(
            "rank 0 of the job is gone (its store cannot be reached)",
            "see rank 0's own log for why; start again from the last checkpoint",
            0,
        )

    def _of_own(self, error: Exception, what: str) -> RankError:
        """An error of this rank's own computation, in words."""
        chain = list(_causes(error))
        root = chain[-1]
        for one in chain:
            text = str(one).lower()
            if (isinstance(one, torch.OutOfMemoryError | MemoryError)
                    or "can't allocate memory" in text or "out of memory" in text):  # fmt: skip
                return self.error(
                    f"{what} on rank {self.rank} is out of memory: {_line(one)}",
                    self.memory,
                    self.rank,
                )
        return self.error(
            f"{what} on rank {self.rank} failed: {type(root).__name__}: {_line(root)}",
            f"see rank {self.rank}'s log for the traceback",
            self.rank,
        )


def _close(group: dist.ProcessGroup) -> None:
    """End what waits on a group of Gloo, whose abort() ends nothing.

    A wait of Gloo that runs out of time closes all connections of its group, and with them ends
    every other wait, here and on the ranks at the other ends. So one waits for nothing, briefly.
    """
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return  # a group of GPUs alone
    if isinstance(backend, dist.ProcessGroupGloo) and group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        gloo: Any = backend
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1)], peer, _NOTHING).wait(timedelta(milliseconds=1))


# A tag that nobody sends with.
_NOTHING = 0x65766E


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _from_a_peer(error: BaseException) -> bool:
    """Whether it came over a connection, and so tells of another rank."""
    words = ("connection", "peer", "socket", "timed out", "nccl", "aborted", "gloo")
    return any(
        isinstance(one, dist.DistError) or any(word in str(one).lower() for word in words)
        for one in _causes(error)
    )
