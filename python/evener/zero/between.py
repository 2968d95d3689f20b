"""Gradients on their way between nodes' copies of the states, in a form (`form`), under its guard.

A rank's share of a chunk becomes the mean of all copies' shares, the same bits on each. Exact and
cast sums are a reduce-scatter and an all-gather (`Ranks.cross`). Forms that quantise in blocks are
comm's own classes, given the share piece by piece. What rounding takes away, the residual
(`Chunk.owed`), lies on the host where the chunk's gradient does: a piece of it comes by the stream
"back" while the piece before crosses, and goes home by the stream "d2h". So the network has nothing
to wait for.

# The guard
As in comm (`evener.comm.guard`): the sixth step and every EVENER_GUARD_STEPS-th one sum up each
chunk a second time, exactly. Where the result does not point where the exact one does, or the
residual is too large, the chunk falls back to the form's milder one on all ranks. Its residual then
goes with its next gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from evener.comm import guard
from evener.comm.buckets import padded
from evener.comm.groups import Group, Route, Scaling
from evener.comm.options import Options
from evener.comm.state import ShardState
from evener.comm.transport import Carrier
from evener.comm.wires.base import around, get
from evener.comm.wires.blocks import BlockWire
from evener.comm.world.topology import Levels
from evener.zero import form as forms
from evener.zero.chunk import Chunk
from evener.zero.device import Device, Event
from evener.zero.form import Form
from evener.zero.ranks import Ranks

logger = logging.getLogger("evener.zero")


class Between:
    """See the head of this file; of the training thread, in the stream "reduce". `linear`: whether
    the optimizer's updates are linear in the gradients. `scale`: gives the loss scale."""

    def __init__(
        self,
        ranks: Ranks,
        device: Device,
        *,
        linear: bool = False,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._linear = linear
        self._scale = scale
        self._options = Options.resolve()
        self._step = 1
        self._strict = False
        self._form: dict[int, Form] = {}
        """Forms of chunks that have fallen back."""
        self._wires: dict[str, BlockWire] = {}
        self._owing: set[int] = set()
        self._measured: dict[int, torch.Tensor] = {}
        """By chunk: the squares of the residual and of the gradient, then for each parameter sent .
        exact, and the squares of both. float64, this rank's part."""
        self._rooms: list[tuple[torch.Tensor, Event | None]] = []
        self._wide: torch.Tensor | None = None
        self._turn = 0
        self.bytes = 0
        """That this rank has handed to the network, as they were sent."""

    def form(self, chunk: Chunk) -> Form:
        """In which this chunk's gradients cross now."""
        if chunk.owed is None and self._ranks.form.blocks is not None:
            return Form()
        return self._form.get(chunk.index, self._ranks.form)

    @property
    def checked(self) -> bool:
        """Whether this step's sums are made twice."""
        return self._ranks.form.name != "exact" and guard.due(
            self._step, self._options.guard_steps, self._strict
        )

    @torch.no_grad()
    def send(self, share: torch.Tensor, chunk: Chunk) -> None:
        """`share` [n] becomes the mean of all copies'. Collective over the copies."""
        form, copies = self.form(chunk), self._ranks.replicas
        vectors = sum(high - low for low, high in _vectors(chunk, self._ranks))
        self.bytes += form.sent(share.numel(), vectors, share.itemsize, copies)
        if form.blocks is not None and not forms.mostly(vectors, share.numel()):
            self._by_blocks(share, chunk, form.blocks)
            return
        if chunk.index in self._owing:
            self._inherit(share, chunk)
        if form.cast is None or not self.checked:
            self._ranks.cross(share, form.cast)
            return
        for begin, end in _pieces(share.numel()):
            before = share[begin:end].clone()
            self._ranks.cross(share[begin:end], form.cast)
            self._measure(chunk, begin, before, share[begin:end], None)

    def _by_blocks(self, share: torch.Tensor, chunk: Chunk, kind: type[BlockWire]) -> None:
        wire = self._wire(kind)
        vectors = list(_vectors(chunk, self._ranks))
        whole = None
        if vectors:
            count = sum(high - low for low, high in vectors)
            whole = share.new_zeros(padded(count, self._ranks.replicas), dtype=torch.float32)
            torch.cat([share[low:high].float() for low, high in vectors], out=whole[:count])
            self._ranks.cross(whole)
        for number, (begin, end) in enumerate(_pieces(share.numel())):
            values = share[begin:end]
            before = values.clone() if self.checked else None
            room, residual = self._owed(chunk, begin, end)
            state = ShardState(chunk.index << 12 | number, self._step, residual)
            wire.exchange(values, state)
            for low, high in vectors:
                if low < end and high > begin:
                    residual[max(low - begin, 0) : high - begin].zero_()
            if before is not None:
                self._measure(chunk, begin, before, values, residual)
            self._keep(chunk, begin, end, room, residual)
        if whole is not None:
            at = 0
            for low, high in vectors:
                share[low:high].copy_(whole[at : at + high - low])
                at += high - low
        self._owing.add(chunk.index)

    def _wire(self, kind: type[BlockWire]) -> BlockWire:
        if kind.name not in self._wires:
            ranks, size = self._ranks, self._ranks.replicas
            assert ranks.between is not None
            outer = Group(ranks.between, ranks.replica, size)
            scaling = Scaling(1.0, dist.ReduceOp.SUM, 1 / size, 1.0)
            why = "a copy of the states on each node"
            levels = Levels((0,), tuple(range(size)), size, why, (1,) * size)
            route = Route(levels, None, outer, None, scaling, Carrier("torch", "as the states'"))
            self._wires[kind.name] = kind(route, self._options)
        return self._wires[kind.name]

    # --- residuals ---

    def _owed(self, chunk: Chunk, begin: int, end: int) -> tuple[int, torch.Tensor]:
        """A piece of the chunk's residual, float32 in units of these gradients: valid until the
        next call; and the room that it came through (-1: it is on the accelerator)."""
        assert chunk.owed is not None
        owed, size, device = chunk.owed[begin:end], end - begin, self._device
        if self._wide is None or self._wide.numel() < size:
            self._wide = torch.empty(size, device=device.device)
        residual, room = self._wide[:size], -1
        if not self._away(chunk):
            residual.copy_(owed)
        else:
            room = self._turn % forms.ROOMS
            self._turn += 1
            there = self._room(room, size, owed.dtype)
            stored = self._rooms[room][1]
            for event in (stored, chunk.owed_event):
                if event is not None:
                    device.wait("back", event)
            with device.on("back"):
                there.copy_(owed, non_blocking=True)
                came = device.record("back")
            device.wait("reduce", came)
            residual.copy_(there)
        if (scale := self._scale()) != 1.0:
            residual.mul_(scale)
        return room, residual

    def _room(self, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        while len(self._rooms) <= number:
            self._rooms.append((torch.empty(0, dtype=dtype, device=self._device.device), None))
        tensor, event = self._rooms[number]
        if tensor.numel() < size:
            if event is not None:
                event.synchronize()
            tensor = torch.empty(size, dtype=dtype, device=self._device.device)
            # It was made in this stream, and is first written in another.
            self._device.wait("back", self._device.record("reduce"))
            self._rooms[number] = tensor, None
        return tensor[:size]

    def _keep(self, chunk: Chunk, begin: int, end: int, room: int, residual: torch.Tensor) -> None:
        assert chunk.owed is not None
        owed, device = chunk.owed[begin:end], self._device
        if (scale := self._scale()) != 1.0:
            residual.div_(scale)
        if room < 0:
            owed.copy_(residual)
            return
        there = self._rooms[room][0][: end - begin]
        there.copy_(residual)
        done = device.record("reduce")
        with device.on("d2h"):
            device.wait("d2h", done)
            owed.copy_(there, non_blocking=True)
            chunk.owed_event = device.record("d2h")
        self._rooms[room] = self._rooms[room][0], chunk.owed_event

    def _away(self, chunk: Chunk) -> bool:
        """Whether the residual is on the host. (The simulated accelerator is host memory too.)"""
        return not chunk.resident or (
            chunk.owed is not None and chunk.owed.device != self._device.device
        )

    def _inherit(self, share: torch.Tensor, chunk: Chunk) -> None:
        """What a harsher form has kept goes with this gradient."""
        self._owing.discard(chunk.index)
        for begin, end in _pieces(share.numel()):
            room, residual = self._owed(chunk, begin, end)
            share[begin:end].add_(residual)
            self._keep(chunk, begin, end, room, residual.zero_())

    # --- the guard ---

    def _measure(
        self,
        chunk: Chunk,
        begin: int,
        before: torch.Tensor,
        sent: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        """Measure one piece, `before` as it was; that becomes the exact mean."""
        owed = before.new_zeros((), dtype=torch.float64)
        owed = owed if residual is None else _dot(residual, residual)
        squares = [owed, _dot(before, before)]
        self._ranks.cross(before)
        self.bytes += around(self._ranks.replicas, before.nbytes)
        sums = torch.zeros(2 + 3 * len(chunk.group.pieces), dtype=torch.float64, device=sent.device)
        sums[:2] = torch.stack(squares)
        for place, (low, high) in enumerate(_spans(chunk, self._ranks)):
            low, high = max(low - begin, 0), min(high - begin, sent.numel())
            if low < high:
                one, other = sent[low:high], before[low:high]
                triple = [_dot(one, other), _dot(one, one), _dot(other, other)]
                sums[2 + 3 * place : 5 + 3 * place] = torch.stack(triple)
        have = self._measured.get(chunk.index)
        self._measured[chunk.index] = sums if have is None else have + sums

    def settle(self, chunks: list[Chunk]) -> None:
        """The end of a step's sums: what was checked is judged, the same on all ranks."""
        self._step += 1
        found = [chunk for chunk in chunks if chunk.index in self._measured]
        if not found:
            return
        rows = [self._measured[chunk.index] for chunk in found]
        self._measured.clear()
        sums = self._ranks.everywhere(torch.cat(rows)).cpu().split([len(row) for row in rows])
        self._strict = False
        for chunk, row in zip(found, sums, strict=True):
            wire = self.form(chunk).wire
            figures = guard.Figures.of(row.tolist())
            bound = guard.limits(self._options, wire, self._linear)
            falls = figures.past(bound)
            self._strict |= wire.strict is not None and not self._linear and not falls
            if not falls:
                continue
            self._form[chunk.index] = Form(get(wire.name).milder)
            if self._ranks.number == 0:
                logger.warning(
                    "step %d: %s falls back from %s to %s between nodes: %s",
                    self._step - 1,
                    chunk.group.name,
                    wire.name,
                    wire.milder,
                    figures.beside(bound),
                )


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, numel, forms.PIECE):
        yield begin, min(begin + forms.PIECE, numel)


def _spans(chunk: Chunk, ranks: Ranks) -> Iterator[tuple[int, int]]:
    """Each parameter's elements in this rank's share of the chunk, low >= high for none."""
    share = chunk.states.weights.numel()
    start = ranks.rank * share
    for piece in chunk.group.pieces:
        low, high = piece.offset - start, piece.offset + piece.numel - start
        yield max(low, 0), min(high, share)


def _vectors(chunk: Chunk, ranks: Ranks) -> Iterator[tuple[int, int]]:
    for piece, (low, high) in zip(chunk.group.pieces, _spans(chunk, ranks), strict=True):
        if len(piece.shape) <= 1 and low < high:
            yield low, high


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # In float64, because squares of 1e-23 are nothing in float32; in blocks, to save memory.
    pairs = zip(a.split(1 << 22), b.split(1 << 22), strict=True)
    return torch.stack([x.double().dot(y.double()) for x, y in pairs]).sum()
