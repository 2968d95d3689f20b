"""Making room on the accelerator while training: by a forecast before a pass, or when an allocation
has failed. In the order of what costs least time: recompute every block, take states and weights of
chunks to the host, fetch fewer chunks ahead. Each says what it did in one line.

Bits do not change: a chunk's update and random bits are the same wherever it lives. Nothing comes
back later by itself: a batch that was larger once may come again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from evener.errors import EvenerError
from evener.zero.chunk import Chunk
from evener.zero.host import HostMemory, pages
from evener.zero.planner import HELD, Plan, lost
from evener.zero.profile import Held, Profile, peaks
from evener.zero.states import stride
from evener.zero.store import SMALL, Store, states_of

if TYPE_CHECKING:
    from evener.zero.device import Device
    from evener.zero.gradients import Gradients
    from evener.zero.in_backward import Buffers
    from evener.zero.loading import Loading
    from evener.zero.passes import Passes

logger = logging.getLogger("evener.zero")


class Room:
    """See the head of this file. `settle`: waits for every optimizer step that was begun. `ranks`
    have one copy of the states; `shared`: there are several ranks, whatever each has. `fixed`:
    bytes on the accelerator that no chunk and no pass takes (context, slots). `buffers`: what
    gradients have in common on the host (see `in_backward`)."""

    def __init__(
        self,
        store: Store,
        device: Device,
        passes: Passes,
        loading: Loading,
        gradients: Gradients,
        settle: Callable[[], None],
        *,
        plan: Plan | None,
        ranks: int,
        shared: bool = False,
        fixed: int = 0,
        slack: float = 0.0,
        buffers: Buffers | None = None,
    ) -> None:
        self._store = store
        self._buffers = buffers
        self._device = device
        self._passes = passes
        self._loading = loading
        self._gradients = gradients
        self._settle = settle
        self._plan = plan
        self._ranks = ranks
        self._shared = shared
        self._fixed = fixed
        self._slack = slack
        self._taken = 0
        """Bytes of host memory beyond the plan."""
        self.said: list[str] = []
        """What was done, in words."""

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for _, chunks in self._store.units for chunk in chunks]

    def _repeated(self) -> set[int]:
        units = [unit for unit, _ in self._store.units]
        return {n for n, unit in enumerate(units) if unit.repeated and not unit.once}

    def forecast(self, profile: Profile) -> int:
        """Bytes that a step of this profile takes, everything where it is now."""
        compute, gradient = self._store.dtype.itemsize, self._store.formats.gradient.itemsize
        chunks = [
            Held(
                unit,
                chunk.flat.numel() * compute,
                chunk.flat.numel() * gradient if chunk.group.trainable else 0,
                moves=not chunk.keeps,
                leaves=chunk.group.trainable and not chunk.resident,
                update=0 if self._buffers and chunk.resident and unit else None,
            )
            for unit, (_, mine) in enumerate(self._store.units)
            for chunk in mine
        ]
        weights, rest = peaks(
            profile,
            chunks,
            recompute=self._passes.recompute,
            depth=self._loading.depth,
            offload=HELD if self._passes.offload else 0,
            ranks=self._ranks,
            pools=self._slack > 0,
            shared=self._shared,
        )
        if self._buffers is not None:
            rest += sum(c.gradient for c in chunks if c.unit == 0)  # whole at the end of the pass
        moving = weights + rest + profile.buffers
        loss = lost(profile, self._passes.recompute, moving, self._slack)
        return self._fixed + self.held() + moving + loss

    def held(self) -> int:
        """Bytes of states and weights that stay on the accelerator now."""
        total = 0
        for chunk in self._chunks:
            if chunk.resident:
                total += sum(t.nbytes for t in chunk.states.tensors().values())
                total += 0 if chunk.gradient is None else chunk.gradient.nbytes
                total += 0 if chunk.owed is None else chunk.owed.nbytes
                total += chunk.bytes if self._ranks > 1 else 0
            elif chunk.keeps:
                total += chunk.bytes
        return total

    def fit(self, profile: Profile, budget: int) -> bool:
        """Make what room this profile asks for; whether it then fits."""
        over = self.forecast(profile) - budget
        while over > 0:
            if not self.make(over, f"{over / 1e9:.2f} GB more are expected than the budget has"):
                return False
            over = self.forecast(profile) - budget
        return True

    def make(self, wanted: int, why: str = "an allocation failed") -> bool:
        """At least try to give `wanted` bytes; whether anything was done."""
        more = self._repeated() - self._passes.recompute
        if more:
            self._passes.recompute |= more
            return self._say(f"{len(more)} more blocks are recomputed in the backward pass", why)
        freed, count = self._evict(wanted)
        if count:
            words = f"{freed / 1e9:.2f} GB of weights and states of {count} chunks go to the host"
            return self._say(words, why)
        if self._loading.depth > 0:
            self._loading.depth -= 1
            self._gradients.depth = min(self._gradients.depth, self._loading.depth)
            return self._say(f"{self._loading.depth} chunks are fetched ahead", why)
        return False

    def loosen(self, wanted: int) -> bool:
        """A little more room for an allocator that searches: blocks are recomputed or chunks go to
        the host, between two steps. Fetching fewer chunks ahead would cost more than it gives."""
        why = "the allocator searched for memory"
        if self._repeated() - self._passes.recompute:
            return self.make(wanted, why)
        freed, count = self._evict(wanted)
        words = f"{freed / 1e9:.2f} GB of weights and states of {count} chunks go to the host"
        return bool(count) and self._say(words, why)

    def _say(self, words: str, why: str) -> bool:
        self.said.append(words)
        logger.warning("made room: %s (%s)", words, why)
        return True

    def _evict(self, wanted: int) -> tuple[int, int]:
        """Chunks, until `wanted` bytes are free or the host is full: the smallest that gives all
        that is still wanted; where none does, the last of the model."""
        if self._ranks > 1:
            return 0, 0
        always = {c.index for c in self._store.units[0][1] if not c.group.kept}
        able = [c for c in self._chunks if c.resident and c.index not in always]
        if not able:
            return 0, 0
        self._settle()
        self._device.synchronize()
        freed = count = 0
        able.reverse()
        while able and freed < wanted:
            enough = [chunk for chunk in able if self._gives(chunk) >= wanted - freed]
            chunk = min(enough, key=self._gives) if enough else able[0]
            able.remove(chunk)
            took = self._move(chunk)
            if took == 0:
                break
            freed += took
            count += 1
        self._device.trim()
        return freed, count

    @staticmethod
    def _gives(chunk: Chunk) -> int:
        """Bytes that are free when a chunk has left."""
        tensors = [*chunk.states.tensors().values()]
        tensors += [] if chunk.gradient is None else [chunk.gradient]
        stays = chunk.bytes if chunk.group.kept or chunk.stays else 0
        return sum(t.nbytes for t in tensors) - stays

    def _move(self, chunk: Chunk) -> int:
        """One chunk's states to the host; the bytes that this freed, 0 where there was no room."""
        chunk.saved.wait()
        store = self._store
        tensors = [*chunk.states.tensors().values()]
        tensors += [] if chunk.gradient is None else [chunk.gradient]
        need = sum(pages(t.numel(), t.element_size()) for t in tensors if t.nbytes >= SMALL)
        share, buffers, dtype = chunk.states.weights.numel(), self._buffers, store.formats.gradient
        larger = buffers is not None and share > buffers.largest
        if larger and share * dtype.itemsize >= SMALL:
            need += pages(share, dtype.itemsize)
        plan = self._plan
        if plan is not None and plan.host_bytes + self._taken + need > plan.budget.host:
            return 0
        pin = self._device.device.type == "cuda"
        with self._device.elsewhere(), torch.no_grad():
            try:
                memory = HostMemory(need, pin=pin)
            except EvenerError:
                return 0

            def make(name: str, dtype: torch.dtype) -> torch.Tensor:
                count = share // stride(name)
                if count * dtype.itemsize >= SMALL:
                    return memory.tensor(count, dtype)
                made = torch.zeros(count, dtype=dtype)
                return made.pin_memory() if pin else made

            formats = store.formats.of(chunk.group.align)
            states, gradient = states_of(chunk.group, formats, make)
            for name, tensor in chunk.states.tensors().items():
                states.tensors()[name].copy_(tensor)
            if gradient is not None and chunk.gradient is not None:
                gradient.copy_(chunk.gradient)
            if buffers is not None and larger:
                buffers.add(make("gradient", dtype))
        before = self._gives(chunk)
        chunk.states, chunk.gradient, chunk.resident = states, gradient, False
        if not (chunk.group.kept or chunk.stays):
            chunk.keeps, chunk.loaded, chunk.stale = False, False, True
            chunk.unbind()
            chunk.empty()
        self._device.release(before)
        self._taken += need
        return before
