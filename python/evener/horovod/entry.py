"""What a rank asks for (`Entry`) among which ranks (`Set`); its caller waits for a `Handle`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener._native import Answer


class Handle:
    """What `synchronize` waits for. `value` and `error` are set before the lock opens."""

    __slots__ = ("error", "lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.value: Any = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return not self.lock.locked()

    def finish(self, value: Any, error: BaseException | None = None) -> None:
        if self.lock.locked():
            self.value, self.error = value, error
            self.lock.release()


@dataclass(slots=True)
class Entry:
    """One operation of one rank.

    inputs: detached, contiguous. outputs: where the results go; None where the executor makes them.
    finish(outputs, answer): what the handle gives; without it, result. The other fields are the
    request's, see `crates/negotiate/src/wire.rs`.
    """

    kind: int
    name: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] | None = None
    set: int = 0
    op: int = 0
    root: int = 0
    factors: tuple[float, float] = (1.0, 1.0)
    splits: Sequence[int] = ()
    labels: Sequence[str] = ()
    finish: Callable[[list[torch.Tensor], Answer], Any] | None = None
    result: Any = None
    ready: Any = None
    # Its caller launches it, so it goes into the caller's stream.
    here: bool = False
    handle: Handle | None = None


@dataclass
class Set:
    """A process set: its global ranks in order, this process's place, its groups."""

    ranks: list[int]
    place: int | None
    cpu: dist.ProcessGroup | None
    cuda: dist.ProcessGroup | None
