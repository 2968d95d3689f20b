"""The entries of a checkpoint, as `torch.distributed.checkpoint` asks for them: the parts of flat
tensors that this rank holds. They are read from where they lie when they are asked for, kept where
they belong, and converted where a checkpoint has them in another form."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_all

from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.states import BLOCK, SCALE, decode, stride


class Entry(torch.Tensor):
    """This rank's part [start, start + n) of a flat tensor of `whole` elements, as
    torch.distributed.checkpoint asks such objects to describe themselves. `fetch`: gives the part
    where it is not in memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    part: torch.Tensor
    reading: Callable[[], None]
    fetch: Callable[[], torch.Tensor] | None
    keep: Callable[[torch.Tensor, int], None] | None
    place: ChunkStorageMetadata
    whole: torch.Size

    @staticmethod
    def of(
        part: torch.Tensor, start: int, whole: int, reading: Callable[[], None] = lambda: None
    ) -> Entry:
        """A view that knows its place, and says when it is going to be read."""
        entry = part.as_subclass(Entry)
        entry.part = part
        entry.reading = reading
        entry.fetch = entry.keep = None
        entry.place = ChunkStorageMetadata(torch.Size([start]), torch.Size([part.numel()]))
        entry.whole = torch.Size([whole])
        return entry

    def size(self, *_: Any) -> Any:
        """Size of the whole tensor."""
        return self.whole

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self.place,
            properties=TensorProperties(dtype=self.part.dtype),
            size=self.whole,
        )
        index = MetadataIndex(fqn, self.place.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.place]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        self.reading()
        return self.part if self.fetch is None else self.fetch()


class Reader(DefaultLoadPlanner):
    """What was read for a part that is not in memory goes where it belongs."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where a part is read to."""
        entry = self.state_dict[read_item.dest_index.fqn]
        if isinstance(entry, Entry) and entry.keep is not None:
            return torch.empty(read_item.lengths, dtype=entry.part.dtype)
        found: torch.Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """After `tensor` was filled: a part of a flat tensor, or all of it."""
        entry = self.state_dict[read_item.dest_index.fqn]
        if isinstance(entry, Entry) and entry.keep is not None:
            entry.keep(tensor, int(read_item.dest_offsets[0]))


class Progress:
    """What a writer has read. It reads one entry at a time, in order, and keeps a copy: when it
    asks for the next one, it is done with the last."""

    def __init__(self, engine: Engine) -> None:
        self.chunks = list(engine.chunks())
        self.left: Counter[int] = Counter()
        self.last: Chunk | None = None
        for chunk in self.chunks:
            chunk.saved.clear()

    def reading(self, chunk: Chunk) -> None:
        """An entry of `chunk` is asked for."""
        if self.last is not None:
            self.left[self.last.index] -= 1
            if self.left[self.last.index] == 0:
                self.last.saved.set()
        self.last = chunk

    def finish(self) -> None:
        """Everything was read, or nothing more will be."""
        for chunk in self.chunks:
            chunk.saved.set()


@dataclass(frozen=True)
class Held:
    """Elements [low, high) of a parameter of `numel` are this rank's, from `begin` of its share
    on."""

    chunk: Chunk
    name: str
    numel: int
    low: int
    high: int
    begin: int


def held_by(engine: Engine) -> Iterator[Held]:
    """What this rank holds. What it has nothing of is not in it."""
    for chunk in engine.chunks():
        share = chunk.states.weights.numel()
        begin = engine.rank * share
        for piece in chunk.group.pieces:
            low = max(piece.offset, begin)
            high = min(piece.offset + piece.numel, begin + share)
            if low < high:
                low, high, at = low - piece.offset, high - piece.offset, low - begin
                yield Held(chunk, piece.name, piece.numel, low, high, at)


def entries(engine: Engine, progress: Progress | None = None) -> dict[str, Any]:
    """Views of everything that this rank holds."""
    found: dict[str, Any] = {}
    for part in held_by(engine):
        chunk, held = part.chunk, part.chunk.states.tensors()
        for kind, dtype in chunk.formats().items():
            each = stride(kind)
            count = -(-(part.high - part.low) // each)
            if kind in held:
                view = held[kind][part.begin // each :][:count]
            else:  # a shape without memory: it is on the SSD
                view = torch.empty(1, dtype=dtype).expand(count)
            made = Entry.of(view, part.low // each, -(-part.numel // each))
            if kind not in held:
                place = kind, part.begin
                end = part.begin + part.high - part.low
                made.fetch = functools.partial(chunk.read, *place, end)
                made.keep = functools.partial(_keep, chunk, *place)
            if progress is not None:
                progress.left[chunk.index] += 1
                made.reading = functools.partial(progress.reading, chunk)
            found[f"{part.name}.{kind}"] = made
    return found


def converted(engine: Engine, saved: Container[str]) -> list[tuple[Held, str]]:
    """The moments that a checkpoint with these entries has in codes of one byte and this engine has
    not, or the other way: parts and places."""
    found: list[tuple[Held, str]] = []
    for part in held_by(engine):
        for place in part.chunk.group.rule.moments.values():
            name = f"{part.name}.{place}"
            if place not in part.chunk.formats() or name not in saved:
                continue
            if (name + SCALE in saved) != part.chunk.coded(place):
                found.append((part, place))
    return found


def is_zero(name: str, saved: Container[str]) -> bool:
    """Whether an entry is the rest of weights that a checkpoint has no exact copy of: zero."""
    weights, _, kind = name.rpartition(".")
    return kind == "lower" and name not in saved and f"{weights}.weights" in saved


def convert(path: Path, part: Held, place: str, coded: bool) -> None:
    """Read a moment that a checkpoint has in another form: `coded`, or not."""
    name = f"{part.name}.{place}"
    low, high, whole = part.low, part.high, part.numel
    first = low // BLOCK * BLOCK if coded else low
    if coded:
        blocks = -(-(high - first) // BLOCK)
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int8)
        scales = torch.empty(blocks, dtype=torch.uint8)
        wanted = {
            name: Entry.of(codes[: whole - first], first, whole),
            name + SCALE: Entry.of(scales, first // BLOCK, -(-whole // BLOCK)),
        }
    else:
        values = torch.empty(high - low)
        wanted = {name: Entry.of(values, low, whole)}
    # Of this rank alone: others may have nothing to convert.
    read_all(wanted, storage_reader=FileSystemReader(path), planner=Reader(), no_dist=True)
    if coded:
        values = decode(place, codes, scales)[low - first : high - first]
    part.chunk.write_moment(place, part.begin, values)


def _keep(chunk: Chunk, kind: str, begin: int, values: torch.Tensor, offset: int) -> None:
    chunk.write(kind, begin + offset, values)
