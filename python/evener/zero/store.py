"""All chunks of a model on one rank: made from its units, each tensor where the plan put it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero import weight
from evener.zero.chunk import Chunk
from evener.zero.device import Device
from evener.zero.host import HostMemory, pages
from evener.zero.ranks import Ranks
from evener.zero.ssd import Ssd, size_of
from evener.zero.states import BLOCK, SCALE, States, stride
from evener.zero.states import of as states_named
from evener.zero.units import ALIGN, Group, Unit

SMALL = 1 << 20
"""Tensors below a quarter of a page share torch's own allocator: a page each would be waste."""


PLACES = ("first", "second")
"""Places of moments, in the order in which rules have them."""


@dataclass(frozen=True)
class Formats:
    """dtypes: what the model computes with, the optimizer's moments (int8: codes, with scales), and
    gradient sums."""

    compute: torch.dtype = torch.bfloat16
    moments: torch.dtype = torch.float32
    gradient: torch.dtype = torch.bfloat16
    master: bool = True
    """Whether bfloat16 weights have an exact copy."""
    pool: int = 0
    """Buffers that gradients have in common on the host (see `in_backward`); 0: a chunk keeps its
    own."""

    def of(self, align: int) -> Formats:
        """Those of a group of chunks: codes only where it has blocks."""
        whole = self.moments == torch.int8 and align != BLOCK
        return replace(self, moments=torch.float32) if whole else self

    def tensors(self, trainable: bool, places: Iterable[str]) -> dict[str, torch.dtype]:
        """The tensors of a chunk whose moments have these places: their dtypes by name."""
        found = {"weights": self.compute}
        if not trainable:
            return found
        if self.compute == torch.bfloat16 and self.master:
            found["lower"] = torch.int16
        elif self.compute == torch.float16:
            found["master"] = torch.float32
        for place in places:
            found[place] = self.moments
            if self.moments == torch.int8:
                found[place + SCALE] = torch.uint8
        return found if self.pool else {**found, "gradient": self.gradient}

    def host_bytes(self, moments: int = 2) -> float:
        """Bytes of host memory a trainable parameter, its gradient included."""
        found = replace(self, pool=0).tensors(True, PLACES[:moments])
        return sum(dtype.itemsize / stride(name) for name, dtype in found.items())

    def away(self, places: Iterable[str]) -> list[tuple[str, torch.dtype]]:
        """What goes to the SSD of a chunk whose moments have these places: all that only the
        optimizer reads, but scales, which are too few."""
        found = self.tensors(True, places).items()
        here = ("weights", "gradient")
        return [(n, dtype) for n, dtype in found if n not in here and stride(n) == 1]

    def pages(
        self, share: int, trainable: bool, places: Iterable[str], away: bool = False
    ) -> list[int]:
        """Bytes that each tensor of a rank's share takes on the host. `away`: of a chunk with
        states on the SSD."""
        places = list(places)
        gone = {name for name, _ in self.away(places)} if away and trainable else set()
        return [
            size_on_host(share // stride(name), dtype.itemsize)
            for name, dtype in self.tensors(trainable, places).items()
            if name not in gone
        ]

    def device_bytes(self, moments: int = 2) -> float:
        """Bytes of accelerator memory a resident trainable parameter."""
        return self.host_bytes(moments) - (self.gradient.itemsize if self.pool else 0)

    def buffers(self, shares: Iterable[int]) -> list[int]:
        """Elements of each of the pool's buffers: one of the size of each of the largest chunks,
        whose elements on a rank are `shares`. The largest chunk waits for the first."""
        return sorted(shares, reverse=True)[: self.pool]


@dataclass
class Store:
    """Units with their chunks. `parameter_order`: (chunk, place in it) of every trainable
    parameter, in the order of `model.parameters()`."""

    units: list[tuple[Unit, list[Chunk]]]
    formats: Formats
    host: HostMemory
    parameter_order: list[tuple[int, int]]
    ssd: Ssd | None = None
    buffers: list[torch.Tensor] = field(default_factory=list)
    """What gradients have in common on the host."""

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes with."""
        return self.formats.compute


def share_of(numel: int, world: int, align: int = ALIGN) -> int:
    """Elements of one rank's share of a chunk."""
    step = world * align
    return -(-numel // step) * align


def size_on_host(numel: int, itemsize: int) -> int:
    """Bytes that a tensor takes."""
    return pages(numel, itemsize) if numel * itemsize >= SMALL else numel * itemsize


def host_need(
    groups: Iterable[Group],
    formats: Formats,
    world: int,
    resident: set[str],
    away: set[str],
    owed: torch.dtype | None = None,
) -> int:
    """Bytes of the host arena. `owed`: the dtype of residuals between nodes."""
    total = 0
    shares = []
    for group in groups:
        if group.name in resident:
            continue
        share = share_of(group.numel, world, group.align)
        shares += [share] if group.trainable else []
        places, there = group.rule.moments.values(), group.name in away
        sizes = formats.of(group.align).pages(share, group.trainable, places, there)
        if owed is not None and group.trainable:
            sizes.append(size_on_host(share, owed.itemsize))
        total += sum(size for size in sizes if size >= SMALL)
    pooled = [size_on_host(n, formats.gradient.itemsize) for n in formats.buffers(shares)]
    return total + sum(size for size in pooled if size >= SMALL)


FILL = 2 << 20
"""Elements that are filled at a time."""

Source = Callable[[str, nn.Parameter], torch.Tensor]
"""Gives the initial value of a parameter by its name."""


def build(
    model: nn.Module,
    units: list[Unit],
    formats: Formats,
    device: Device,
    *,
    resident: set[str],
    stage: int = 3,
    ranks: Ranks | None = None,
    pin: bool = True,
    source: Source | None = None,
    away: set[str] | None = None,
    folder: str = "",
) -> Store:
    """Move `model` into chunks, one at a time: its parameters' own memory is given back on the way.

    `resident`: names of the groups whose states are on the accelerator. Unit 0's always are, but
    for the kept ones, whose weights alone stay. With several ranks, rank 0's values are taken by
    all. `away`: names of the groups whose states are on the SSD, in `folder`.
    """
    ranks = ranks or Ranks()
    world = ranks.world
    away = (away or set()) - resident
    resident = resident | {g.name for g in units[0].groups if not g.kept}
    everything = [g for unit in units for g in unit.groups]
    owed = ranks.form.owed(formats.gradient) if ranks.replicas > 1 else None
    need = host_need(everything, formats, world, resident, away, owed)
    host = HostMemory(need, pin=pin)
    ssd = _ssd([g for g in everything if g.name in away], formats, world, folder)
    built: list[tuple[Unit, list[Chunk]]] = []
    index = 0
    places: dict[nn.Parameter, tuple[int, int]] = {}
    placeholder = torch.full((1,), torch.nan, dtype=formats.compute, device=device.device)
    for number, unit in enumerate(units):
        chunks = []
        for cluster in unit.groups:
            stays = cluster.name in resident
            spilled = ssd if cluster.name in away and not stays else None
            chunk = _chunk(cluster, index, formats, device, host, stays, world, spilled, owed)
            # With several ranks gathered once per step: what is here need not come again.
            chunk.keeps = number == 0 or stage <= 2 or (stays and (world == 1 or cluster.trainable))
            chunk.placeholder = placeholder
            _fill(chunk, device, ranks, source)
            if chunk.keeps:
                if stays and world == 1:
                    chunk.states.weights, old = chunk.flat, chunk.states.weights
                    chunk.flat.copy_(old)
                    chunk.stale = False
                chunk.bind()
                if chunk.stale:
                    chunk.guard()  # it comes with the first pass
            else:
                chunk.empty()
                chunk.unbind()
            for place, piece in enumerate(cluster.pieces):
                places[piece.parameter] = (index, place)
            chunks.append(chunk)
            index += 1
        built.append((unit, chunks))
    _move_buffers(model, device.device)
    chunks = [c for _, each in built for c in each if c.group.trainable and not c.resident]
    sizes = formats.buffers(chunk.states.weights.numel() for chunk in chunks)
    buffers = [_on_host(size, formats.gradient, host, device) for size in sizes]
    order = [places[p] for p in model.parameters() if p.requires_grad]
    return Store(built, formats, host, order, ssd, buffers)


def _ssd(groups: list[Group], formats: Formats, world: int, folder: str) -> Ssd | None:
    size = widest = 0
    for group in groups:
        if group.trainable:
            fields = formats.of(group.align).away(group.rule.moments.values())
            dtypes = [dtype for _, dtype in fields]
            size += size_of(share_of(group.numel, world, group.align), dtypes)
            widest = max(widest, sum(dtype.itemsize for dtype in dtypes))
    return Ssd(folder, size, widest) if size else None


def _on_host(count: int, dtype: torch.dtype, host: HostMemory, device: Device) -> torch.Tensor:
    """`count` zeros."""
    if count * dtype.itemsize < SMALL:
        tensor = torch.zeros(count, dtype=dtype)
        return tensor.pin_memory() if device.device.type == "cuda" else tensor
    return host.tensor(count, dtype)


def _chunk(
    group: Group,
    index: int,
    formats: Formats,
    device: Device,
    host: HostMemory,
    resident: bool,
    world: int,
    ssd: Ssd | None = None,
    owed: torch.dtype | None = None,
) -> Chunk:
    share, formats = share_of(group.numel, world, group.align), formats.of(group.align)

    def make(name: str, dtype: torch.dtype) -> torch.Tensor:
        count = share // stride(name)
        if resident:
            return torch.zeros(count, dtype=dtype, device=device.device)
        return _on_host(count, dtype, host, device)

    away = None
    if ssd is not None and group.trainable:
        away = ssd.layout(formats.away(group.rule.moments.values()), share)
    states, gradient = states_of(group, formats, make, away.names if away else ())
    flat = torch.zeros(share * world, dtype=formats.compute, device=device.device)
    chunk = Chunk(index, group, states, gradient, flat, resident, False, flat[:1], away=away)
    if owed is not None and group.trainable:
        chunk.owed = make("owed", owed)
    return chunk


def states_of(
    group: Group,
    formats: Formats,
    make: Callable[[str, torch.dtype], torch.Tensor],
    without: Collection[str] = (),
) -> tuple[States, torch.Tensor | None]:
    """The states and gradient of the chunk of `group`, each made by `make` of its name and dtype,
    but for those in `without`."""
    wanted = formats.tensors(group.trainable, group.rule.moments.values()).items()
    named = {name: make(name, dtype) for name, dtype in wanted if name not in without}
    gradient = named.pop("gradient", None)
    return states_named(named), gradient


@torch.no_grad()
def _fill(
    chunk: Chunk,
    device: Device,
    ranks: Ranks,
    source: Source | None,
) -> None:
    """Slice by slice on the accelerator, where a split takes no time: beside the states there is
    never more of the chunk than one parameter as it was given."""
    dtype = torch.float32 if chunk.group.trainable else chunk.flat.dtype
    share = chunk.states.weights.numel()
    begin, end = ranks.rank * share, (ranks.rank + 1) * share
    for piece in chunk.group.pieces:
        weight.lend(piece.parameter)
        given = piece.parameter if source is None else source(piece.name, piece.parameter)
        if given.is_meta:
            raise UsageError(
                f"parameter {piece.name} is on the meta device and has no value",
                "give `weights=` (a safetensors directory), or make the model on the CPU",
            )
        if given.shape != piece.shape:
            raise UsageError(
                f"{piece.name} has shape {tuple(given.shape)}, expected {tuple(piece.shape)}",
                "give the weights of this model",
            )
        if given.dtype.itemsize == 1 or not given.is_floating_point():
            raise UsageError(
                f"{piece.name} is {given.dtype} in the weights: it is quantized, and its scale is "
                "not read",
                "give weights that are not quantized",
            )
        flat = given.detach().reshape(-1)
        # Its own memory goes now, so that the model is never there twice.
        piece.parameter.data = torch.empty(0, dtype=chunk.flat.dtype, device=device.device)
        for start in range(0, piece.numel, FILL):
            stop = min(start + FILL, piece.numel)
            values = flat[start:stop].to(device.device, dtype)
            if ranks.size > 1:
                values = values.contiguous()
                ranks.broadcast(values)
            low, high = max(piece.offset + start, begin), min(piece.offset + stop, end)
            if low < high:
                mine = values[low - piece.offset - start : high - piece.offset - start]
                chunk.store(low - begin, mine)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                raise UsageError(
                    f"buffer {name} of {type(module).__name__} is on the meta device",
                    "make the model in `with zero.empty_weights()`: its buffers are real then",
                )
            module._buffers[name] = buffer.to(device)
