"""Inputs of recomputed blocks that wait for the backward pass on the host.

A hook on what autograd saves copies a block's input out as soon as the block has run, and back when
the block after it is recomputed: two are on the accelerator at a time, and the copies run beside
the computation. Bits and strides are those that were saved: kernels are chosen by strides, and
recomputation must choose the same ones (T5 hands a transposed position bias to all blocks, and
CUDA's attention has another kernel for it than for a contiguous one). A tensor that several blocks
save leaves once. What is not dense or no plain tensor stays, and so does what the pool has no room
for.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from evener.errors import EvenerError
from evener.zero.device import Device, Event
from evener.zero.edges import unchanged, versioned
from evener.zero.host import HostMemory
from evener.zero.planner import HELD
from evener.zero.spans import Spans

logger = logging.getLogger("evener.zero")

SMALL = 1 << 20
"""Bytes below which a tensor is not worth a copy."""

_waiting: list[list[Callable[[], None]]] = []


@contextlib.contextmanager
def later() -> Iterator[Callable[[], None]]:
    """Inside, what is saved is fetched without what comes next: a block that needs much memory at
    first calls what this gives when it has room for that."""
    held: list[Callable[[], None]] = []

    def now() -> None:
        while held:
            held.pop()()

    _waiting.append(held)
    try:
        yield now
        now()
    finally:
        _waiting.remove(held)


@dataclass(eq=False)
class _Saved:
    """What autograd holds instead of a block's input."""

    home: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    out: Event
    back: torch.Tensor | None = None
    ready: Event | None = None
    asked: bool = False
    """By a block; what is there and was not asked for was fetched ahead."""


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are one piece of memory, in whatever order."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != size:
                return False
            size *= length
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass
class Offload:
    """The pool, and what is saved in it in the order of the forward pass."""

    device: Device
    spans: Spans
    pool: HostMemory
    _free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = field(default_factory=dict)
    _order: list[weakref.ref[_Saved]] = field(default_factory=list)
    _leaving: list[tuple[Event, torch.Tensor, int]] = field(default_factory=list)
    _known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Saved]]] = field(
        default_factory=dict
    )
    """What was saved from which memory: a storage's address alone may be another's by now."""
    _full: bool = False
    """Whether it was said that there is no room."""

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """While a checkpointed block is entered."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def clear(self) -> None:
        """After a backward pass."""
        self._order.clear()
        self._leaving.clear()
        self._known.clear()

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if free := self._free.get((numel, dtype)):
            return free.pop()
        try:
            return self.pool.tensor(numel, dtype)
        except EvenerError as error:
            if not self._full:
                self._full = True
                logger.warning(
                    "activations stay on the accelerator where the host has no room for them: %s",
                    error.problem,
                )
            return None

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | _Saved:
        stays = versioned(tensor)
        size = tensor.numel() * tensor.element_size()
        if size < SMALL or tensor.device != self.device.device or not tensor.is_floating_point():
            return stays
        # A subclass is more than its elements: lazy logits have a graph of their own.
        if type(tensor) not in (torch.Tensor, nn.Parameter) or not _dense(tensor):
            return stays
        storage, strides = tensor.untyped_storage(), tensor.stride()
        key = storage._cdata, tensor.storage_offset(), tensor.shape, strides, tensor._version
        if key in self._known:
            owner, earlier = self._known[key]
            again = earlier()
            if again is not None and owner() is storage:
                return again
        home = self._room(tensor.numel(), tensor.dtype)
        if home is None:
            return stays
        self.device.wait("d2h", self.device.record("compute"))
        with self.device.on("d2h"), self.spans.device("copy", "d2h", "activations"):
            home.copy_(_flat(tensor.detach()), non_blocking=True)
        saved = _Saved(home, tensor.shape, strides, self.device.record("d2h"))
        self._known[key] = weakref.ref(storage), weakref.ref(saved)
        # When autograd lets go of it its room is free: the next copy into it waits for all that
        # computed before that, so for what still reads it.
        weakref.finalize(saved, self._free.setdefault((home.numel(), home.dtype), []).append, home)
        self._order.append(weakref.ref(saved))
        # The tensor's memory must not be reused before it has left: hold it until it has.
        self._leaving.append((saved.out, *versioned(tensor.detach())))
        while self._leaving and (self._leaving[0][0].query() or len(self._leaving) > HELD - 2):
            self._left()
        return saved

    def _left(self) -> None:
        """The first of those that are leaving is on the host, if it is as it was saved."""
        out, tensor, version = self._leaving.pop(0)
        out.synchronize()
        unchanged(tensor, version)

    def _fetch(self, saved: _Saved) -> None:
        # Allocated where it is used, so that its memory goes round in that stream alone.
        saved.back = torch.empty_strided(
            saved.shape, saved.strides, dtype=saved.home.dtype, device=self.device.device
        )
        self.device.wait("h2d", self.device.record("compute"))
        with self.device.on("h2d"), self.spans.device("copy", "h2d", "activations"):
            self.device.wait("h2d", saved.out)
            _flat(saved.back).copy_(saved.home, non_blocking=True)
            saved.ready = self.device.record("h2d")
        self.device.reading("h2d", "compute")  # also if nobody asks for it

    def _unpack(self, saved: tuple[torch.Tensor, int] | _Saved) -> torch.Tensor:
        if isinstance(saved, tuple):
            return unchanged(*saved)
        while self._leaving:  # the last ones of the forward pass
            self._left()
        if saved.back is None:
            self._fetch(saved)
        back, ready = saved.back, saved.ready
        assert back is not None and ready is not None
        self.device.wait("compute", ready)
        if not saved.asked:
            saved.asked = True
            if _waiting:
                _waiting[-1].append(self._ahead)
            else:
                self._ahead()
        return back

    def _ahead(self) -> None:
        """Fetch for the block before: it is asked for next."""
        while self._order:
            last = self._order.pop()()
            if last is not None and last.back is None:
                self._fetch(last)
                break
