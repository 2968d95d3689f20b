"""Inputs of recomputed blocks that wait for the backward pass on the host.

A hook on what autograd saves copies a block's input out as soon as the block has run, and back when
the block after it is recomputed: two are on the accelerator at a time, and the copies run beside
the computation. The bits are those that were saved. What the pool has no room for stays.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from evener.errors import EvenerError
from evener.zero.device import Device, Event
from evener.zero.host import HostMemory
from evener.zero.planner import HELD
from evener.zero.spans import Spans

SMALL = 1 << 20
"""Bytes below which a tensor is not worth a copy."""


@dataclass(eq=False)
class _Saved:
    """What autograd holds in place of a block's input."""

    home: torch.Tensor
    shape: torch.Size
    out: Event
    back: torch.Tensor | None = None
    ready: Event | None = None


@dataclass
class Offload:
    """The pool, and what is saved in it in the order of the forward pass."""

    device: Device
    spans: Spans
    pool: HostMemory
    _free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = field(default_factory=dict)
    _order: list[weakref.ref[_Saved]] = field(default_factory=list)
    _leaving: list[tuple[Event, torch.Tensor]] = field(default_factory=list)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """While a checkpointed block is entered."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def clear(self) -> None:
        """After a backward pass."""
        self._order.clear()
        self._leaving.clear()

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if free := self._free.get((numel, dtype)):
            return free.pop()
        try:
            return self.pool.tensor(numel, dtype)
        except EvenerError:
            return None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        size = tensor.numel() * tensor.element_size()
        if size < SMALL or tensor.device != self.device.device or not tensor.is_floating_point():
            return tensor
        home = self._room(tensor.numel(), tensor.dtype)
        if home is None:
            return tensor
        self.device.wait("d2h", self.device.record("compute"))
        with self.device.on("d2h"), self.spans.device("copy", "d2h", "activations"):
            home.copy_(tensor.detach().reshape(-1), non_blocking=True)
        saved = _Saved(home, tensor.shape, self.device.record("d2h"))
        # When autograd lets go of it its room is free: the next copy into it waits for all that
        # computed before that, so for what still reads it.
        weakref.finalize(saved, self._free.setdefault((home.numel(), home.dtype), []).append, home)
        self._order.append(weakref.ref(saved))
        # The tensor's memory must not be reused before it has left: hold it until it has.
        self._leaving.append((saved.out, tensor.detach()))
        while self._leaving and (self._leaving[0][0].query() or len(self._leaving) > HELD - 2):
            self._leaving.pop(0)[0].synchronize()
        return saved

    def _fetch(self, saved: _Saved) -> None:
        # Allocated where it is used, so that its memory goes round in that stream alone.
        saved.back = torch.empty(saved.shape, dtype=saved.home.dtype, device=self.device.device)
        self.device.wait("h2d", self.device.record("compute"))
        with self.device.on("h2d"), self.spans.device("copy", "h2d", "activations"):
            self.device.wait("h2d", saved.out)
            saved.back.view(-1).copy_(saved.home, non_blocking=True)
            saved.ready = self.device.record("h2d")

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.back is None:
            self._fetch(saved)
        back, ready = saved.back, saved.ready
        assert back is not None and ready is not None
        self.device.wait("compute", ready)
        while self._order:
            last = self._order.pop()()
            if last is not None and last is not saved:
                if last.back is None:
                    self._fetch(last)  # the block before: it is asked for next
                self._order.append(weakref.ref(last))
                break
        return back
