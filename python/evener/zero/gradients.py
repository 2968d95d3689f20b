"""Gradients on their way from autograd to where the optimizer's states are.

Those of a chunk's parameters are put together when all have come; reduced over the ranks (stage 1
with accumulation: once a step), added to the sum of earlier micro-batches, their norms taken on the
accelerator, and copied home by a stream of their own. At most `depth` copies are on their way. With
several ranks all of this is done in a stream of its own, beside the model's backward pass.

Where nodes have copies of the states, the sum crosses between them once per step: chunk by chunk in
the last micro-batch's backward pass, or, where nobody says which is the last, before the step.

Several ranks reduce all chunks in one order in every backward pass, with zeros for what has no
gradient here: which parameters have one, and when, may differ between ranks (an expert without a
token, a layer that one rank leaves out). The order is that in which the first rank's gradients came
in its first step. What is complete waits for those before it.

A backward pass that failed for want of memory is run again (see `boundary`). A chunk whose gradient
it had delivered is passed over then: it comes once per pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from evener.errors import UsageError
from evener.zero.between import Between
from evener.zero.chunk import Chunk
from evener.zero.device import Device, Event
from evener.zero.in_backward import InBackward
from evener.zero.ranks import Ranks
from evener.zero.spans import Spans


class Gradients:
    """See the head of this file; of the training thread. `order`: (chunk, place in it) of every
    trainable parameter, as the model lists them. `once`: ranks reduce in `finish`, not before.
    `apart`: chunks of one size, whose flat gradients are allocated in the stream that takes them
    away. Its pool then holds nothing else, and no hole is too small. `gathered`: gives a number for
    the order in which weights were gathered; it must be the same on all ranks. `dtype`: of the
    gradients. `early`: updates each chunk when its gradient is whole, where that is wanted; those
    of `shared`, which are of no unit, at the end of the pass: a weight that is used at both ends of
    the model gets a gradient from the loss first, and one from the pass."""

    def __init__(
        self,
        order: list[tuple[int, int]],
        device: Device,
        ranks: Ranks,
        spans: Spans,
        *,
        once: bool,
        depth: int,
        stale_updates: bool,
        dtype: torch.dtype,
        early: InBackward | None = None,
        shared: frozenset[int] = frozenset(),
        apart: frozenset[int] = frozenset(),
        between: Between | None = None,
        gathered: Callable[[], int] = lambda: 0,
    ) -> None:
        self._gathered = gathered
        self._dtype = dtype
        self._early = early
        self._ends = shared
        self._call = -1
        """autograd's number of the backward pass that has brought the last gradient."""
        self._outer: dict[int, dict[int, torch.Tensor]] = {}
        """What the loss had brought in part before the pass through the model began, by chunk."""
        self._apart = apart if ranks.world == 1 else frozenset()
        self._order = order
        self._device = device
        self._ranks = ranks
        self._spans = spans
        self._once = once
        self.depth = depth
        self.last = False
        """Whether this backward pass is the last one before the step: then sums cross."""
        self.between = between or Between(ranks, device)
        """What crosses between copies of the states, and how."""
        self._added: Event | None = None
        """When the last sum that came back was read."""
        self._stale_updates = stale_updates
        self._delivered: set[int] = set()
        """Chunks whose gradient this backward pass has delivered."""
        self._again: dict[int, set[int]] = {}
        """Those that it had delivered before it failed: places that have come since."""
        self._sums: dict[int, tuple[Chunk, torch.Tensor]] = {}
        """What is reduced before the step."""
        self._chunks: list[Chunk] = []
        """Chunks of several ranks, in the order in which they are reduced."""
        self._came: list[int] | None = []
        """The order in which chunks were complete first, until it is agreed."""
        self._ready: dict[int, torch.Tensor] = {}
        self._next = 0
        self._after = False
        self.open = False
        """Whether a backward pass may have brought something."""
        self._passes = 0
        self.came = 0
        """Chunks whose gradients were complete, counted up."""
        self._leaving: list[tuple[Event, Any]] = []

    def add(self, chunk: Chunk, place: int, gradient: torch.Tensor) -> None:
        """One parameter's gradient; the chunk's leave when it is the last one."""
        self.open = True
        if self._early is not None:
            self._early.refuse_late(chunk)
            self._call = torch._C._current_graph_task_id()
            if self._early.open:  # this pass cannot run again
                self._outer.clear()
        if chunk.index in self._again:
            come = self._again[chunk.index]
            come.add(place)
            chunk.touched = len(come) == len(chunk.group.pieces)
            return
        earlier = chunk.arrived.get(place)
        chunk.arrived[place] = gradient if earlier is None else earlier + gradient
        ends = self._early is not None and chunk.index in self._ends
        if len(chunk.arrived) == len(chunk.group.pieces) and not ends:
            self._collect(chunk)

    def through(self, chunks: list[Chunk]) -> None:
        """The backward pass is through the unit of these chunks."""
        if self._early is not None:
            self._early.through(chunks)

    def end(self, chunks: list[Chunk]) -> None:
        """After a backward pass: what has come in part goes with zeros in the other places. The
        optimizer leaves those parameters alone that had no gradient (`Chunk.given`)."""
        for chunk in chunks:
            if chunk.arrived:
                self._collect(chunk)
            chunk.touched = False
        self._outer.clear()
        if self._early is not None:
            self._early.end()
        if self.open and self._shared:
            self._passes += 1
            if not self._once:
                self._release(all_of_them=True)
        self.open = False
        self._again.clear()
        self._delivered.clear()
        self._leaving = [entry for entry in self._leaving if not entry[0].query()]

    def share(self, chunks: list[Chunk], gathered: bool) -> None:
        """All trainable chunks, before the first pass. Unit 0's gradients are the last. `gathered`:
        other collectives bring weights in the backward pass. Without streams one thread would wait
        in a gather and another rank's in a reduction, so these come after the pass."""
        if self._shared:
            self._chunks = list(reversed(chunks))
        self._after = gathered and self._device.device.type != "cuda"

    @torch.no_grad()
    def _release(self, all_of_them: bool = False) -> None:
        """Reduce what is complete, in order; or all, with zeros for what is missing."""
        if self._after and not all_of_them:
            return
        while self._next < len(self._chunks):
            chunk = self._chunks[self._next]
            whole = self._ready.pop(chunk.index, None)
            if whole is None:
                if not all_of_them:
                    return
                whole = self._zeros(chunk)
            self._next += 1
            self._deliver(chunk, whole)
        if all_of_them:
            self._next = 0

    def _zeros(self, chunk: Chunk) -> torch.Tensor:
        where = self._device.device
        return torch.zeros(chunk.flat.numel(), dtype=self._dtype, device=where)

    def begin(self, chunks: list[Chunk]) -> None:
        """Before a backward pass through the model: `loss.backward()` may have brought gradients of
        the head."""
        early = self._early
        if early is not None and self._call == torch._C._current_graph_task_id():
            early.through([c for c in chunks if c.index not in self._ends])
        else:
            if self.open:
                self.end(chunks)
            if early is not None:
                early.refuse_open("a second backward pass")
        self._outer = {chunk.index: dict(chunk.arrived) for chunk in chunks if chunk.arrived}
        self.open = True
        for chunk in chunks:
            chunk.touched = False
        self._again.clear()
        self._delivered.clear()

    def abort(self, chunks: list[Chunk]) -> None:
        """After a pass that failed: only what was delivered stays."""
        if self._early is not None:
            self._early.refuse_again()
        for chunk in chunks:
            chunk.arrived = dict(self._outer.get(chunk.index, {}))
            chunk.touched = False
        self._again |= {index: set() for index in (*self._again, *self._delivered)}
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()

    def finish(self) -> None:
        """Before an optimizer step: reduce what was kept until now. Collective. Raises UsageError
        where ranks ran other numbers of backward passes, or gathered other weights."""
        self.last = True
        if not self._shared:
            return
        device, places = self._device.device, {c.index: n for n, c in enumerate(self._chunks)}
        order = self._gathered()
        mine = [self._passes, *(0 for _ in self._chunks), *(0 for _ in self._chunks)]
        for index in self._sums:
            mine[1 + places[index]] = 1
        if self._came is not None and self._ranks.number == 0:
            known = dict.fromkeys([*self._came, *places])
            mine[1 + len(places) :] = [places[index] for index in known]
        mine += [order, order * order]
        *found, orders, squares = self._ranks.everywhere(torch.tensor(mine, device=device)).tolist()
        passes, self._passes = self._passes, 0
        if found[0] != passes * self._ranks.size:
            raise UsageError(
                f"this rank ran {passes} backward passes since the last step, all ranks together "
                f"{found[0]}",
                "run as many on every rank; a rank without data may use a loss of 0 * output.sum()",
            )
        if self._ranks.size * squares != orders * orders:
            raise UsageError(
                "ranks have gathered the weights of different blocks, or in another order: a rank "
                "may have computed with those of another block",
                "at stage 3 all ranks run the same blocks in the same order; where one may leave a "
                "block out (layerdrop, routing), use stage 2",
            )
        for chunk, wanted in zip(self._chunks, found[1 : 1 + len(places)], strict=True):
            if wanted:
                _, whole = self._sums.pop(chunk.index, (chunk, None))
                self._deliver(chunk, self._zeros(chunk) if whole is None else whole)
        if self._came is not None:
            self._came = None
            self._chunks = [self._chunks[place] for place in found[1 + len(places) :]]

    def cross(self, chunks: list[Chunk], done: bool = True) -> None:
        """What has not crossed between copies does now: before an optimizer step (`done`), or to
        know the norm. Collective."""
        if self._ranks.replicas == 1:
            return
        for chunk in chunks:
            if chunk.filled and not chunk.crossed:
                self._cross_sum(chunk)
            chunk.crossed = not done
        if done:
            with self._aside():
                self.between.settle(chunks)

    @torch.no_grad()
    def _cross_sum(self, chunk: Chunk) -> None:
        with self._aside():
            share = self._earlier(chunk).clone()
            self._read()
            self._send(share, chunk)
            chunk.norms = self._norms(chunk, share)
            self._home(chunk, share, share)

    def clear(self, groups: Container[int] | None = None) -> None:
        """Forget what was kept (of `groups`, else all)."""
        if groups is not None:
            left = self._sums.items()
            self._sums = {i: each for i, each in left if each[0].group.group not in groups}
            return
        self._sums.clear()
        self._passes = 0

    @torch.no_grad()
    def _collect(self, chunk: Chunk) -> None:
        pieces, dtype = chunk.group.pieces, self._dtype
        numel, where = chunk.flat.numel(), self._device.device
        if chunk.index in self._apart and not chunk.resident:
            # It is given back when the copy home has passed, so nobody reads what it was before.
            with self._device.on("d2h"):
                whole = torch.empty(numel, dtype=dtype, device=where)
            whole.zero_()
        else:
            whole = torch.zeros(numel, dtype=dtype, device=where)
        # From here on until it is delivered, nothing but a norm is allocated.
        arrived, chunk.arrived = chunk.arrived, {}
        # One operation instead of one for each parameter: blocks of many small ones are as slow
        # as what is launched for them. What is not contiguous would be copied once more, all at
        # the same time: these go one by one.
        views: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for place, gradient in arrived.items():
            piece = pieces[place]
            view = whole[piece.offset : piece.offset + piece.numel]
            if gradient.is_contiguous() and gradient.dtype == dtype:
                views.append(view)
                found.append(gradient.view(-1))
            else:
                view.view(gradient.shape).copy_(gradient)
        if views:
            torch._foreach_copy_(views, found)
        del views, found, gradient
        given = set(arrived)
        arrived.clear()
        if self._came is not None and chunk.index not in self._came:
            self._came.append(chunk.index)
        if self._early is not None:
            chunk.given |= given
            chunk.filled, chunk.norms = True, self._norms(chunk, whole)
            if self._early.sound(chunk):
                self._home(chunk, whole, whole)
        elif not self._shared:
            self._deliver(chunk, whole)
        elif not self._once and chunk.index not in self._delivered:
            self._ready[chunk.index] = whole
            self._release()
        elif chunk.index in self._sums:  # also what came a second time in one pass
            self._sums[chunk.index][1].add_(whole)
        else:
            self._sums[chunk.index] = chunk, whole
        chunk.given |= given
        chunk.touched = True
        self._delivered.add(chunk.index)
        self.came += 1

    @property
    def _shared(self) -> bool:
        return self._ranks.size > 1

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """In a stream of its own, after what was computed; one rank has nothing to wait for."""
        device = self._device
        if not self._shared:
            yield
            return
        done = device.record("compute")
        with device.on("reduce"):
            device.wait("reduce", done)
            yield

    @torch.no_grad()
    def _deliver(self, chunk: Chunk, whole: torch.Tensor) -> None:
        """Reduce over ranks, add what is there, take the norms, bring it home."""
        assert chunk.gradient is not None
        with self._aside():
            share = whole
            if self._ranks.world > 1:
                share = torch.empty(chunk.gradient.numel(), dtype=whole.dtype, device=whole.device)
                with self._spans.device("communication", "reduce", f"reduce {chunk.group.name}"):
                    self._ranks.reduce(share, whole)
            crosses = self._ranks.replicas > 1 and (self.last or chunk.crossed)
            if crosses and chunk.crossed:  # what was there has crossed: only what is new does now
                self._send(share, chunk)
            if chunk.filled:
                share += self._earlier(chunk)
                self._read()
            if crosses and not chunk.crossed:
                self._send(share, chunk)
            chunk.crossed = crosses
            chunk.filled, chunk.norms = True, self._norms(chunk, share)
            self._home(chunk, share, whole)

    def _send(self, share: torch.Tensor, chunk: Chunk) -> None:
        with self._spans.device("communication", "reduce", f"between nodes {chunk.group.name}"):
            self.between.send(share, chunk)

    def _home(self, chunk: Chunk, share: torch.Tensor, whole: torch.Tensor) -> None:
        """To where the states are. `whole` and `share` live until they were read."""
        device, early = self._device, self._early
        here = "reduce" if self._shared else "compute"
        if early is not None and chunk.resident:
            chunk.gradient = share
            early.wait(chunk)
            return
        if early is not None:
            chunk.gradient = early.room(chunk)
        assert chunk.gradient is not None
        if chunk.resident:
            chunk.gradient.copy_(share)
            if self._shared:
                self._leave(chunk, device.record(here), share, whole)
            return
        if self._stale_updates:
            chunk.updated.wait()  # its last gradient is still being read
        done = device.record(here)
        with device.on("d2h"):
            device.wait("d2h", done)
            with self._spans.device("copy", "d2h", chunk.group.name):
                chunk.gradient.copy_(share, non_blocking=True)
            chunk.gradient_event = device.record("d2h")
        if early is not None:
            early.begin(chunk)
        self._leave(chunk, chunk.gradient_event, share, whole)

    def _leave(self, chunk: Chunk, event: Event, *held: torch.Tensor) -> None:
        self._leaving.append((event, held))
        if len(self._leaving) > self.depth:
            with self._spans.host("wait", "training for gradients out", chunk.group.name):
                self._leaving.pop(0)[0].synchronize()

    def _earlier(self, chunk: Chunk) -> torch.Tensor:
        """The sum of the micro-batches before."""
        assert chunk.gradient is not None
        if chunk.resident:
            return chunk.gradient
        device = self._device
        if not self._shared:
            # It comes back over the stream that took it away, so in order.
            with device.on("d2h"):
                earlier = chunk.gradient.to(device.device, non_blocking=True)
                event = device.record("d2h")
            device.wait("compute", event)
            event.synchronize()
            return earlier
        # Not over that stream: it waits for sums that cross, and the network would wait for this.
        # The memory is that of the sum before, which has to be read by then.
        for event_before in (chunk.gradient_event, self._added):
            if event_before is not None:
                device.wait("back", event_before)
        with device.on("back"):
            earlier = chunk.gradient.to(device.device, non_blocking=True)
            event = device.record("back")
        device.wait("reduce", event)
        return earlier

    def _read(self) -> None:
        """The sum of the micro-batches before is read, and free, in the order of "reduce"."""
        if self._shared:
            self._added = self._device.record("reduce")
            self._device.reading("reduce", "back")

    def _norms(self, chunk: Chunk, share: torch.Tensor) -> torch.Tensor:
        """On one rank, of each parameter, so that the global norm is that of
        `torch.nn.utils.clip_grad_norm_` bit for bit."""
        views = [share]
        if self._ranks.world == 1:
            views = [share[p.offset : p.offset + p.numel] for p in chunk.group.pieces]
        return torch.stack(list(torch._foreach_norm(views, 2, dtype=torch.float32)))

    @torch.no_grad()
    def norm(self, chunks: list[Chunk]) -> torch.Tensor:
        """The norm of all gradients of all ranks, a float32 scalar on the accelerator."""
        if self._shared:
            self._device.wait("compute", self._device.record("reduce"))
        if self._ranks.world == 1:
            norms = {c.index: c.norms for c in chunks if c.norms is not None}
            each = [norms[index][place] for index, place in self._order if index in norms]
            if not each:
                return torch.zeros((), device=self._device.device)
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(each))
            return total
        square = torch.zeros((), dtype=torch.float64, device=self._device.device)
        for chunk in chunks:
            if chunk.norms is not None:
                square += chunk.norms.double().square().sum()
        return self._ranks.total(square).sqrt().to(torch.float32)
