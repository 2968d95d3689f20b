"""Checkpoints under the parameters' own names, whole or not there at all.

`torch.distributed.checkpoint` writes them: each parameter's float32 weights (or their halves) and
moments are entries of their own, flat, in the pieces that the ranks hold, so another number of
ranks and another budget read them. A checkpoint is written into a folder with a name of its own,
synced, and renamed when it is whole; then `latest` is replaced. Whatever kills the job in between,
the last whole checkpoint stays the last: a step that is saved again gets a new folder, and the old
one goes when `latest` names the new one. `latest` says what is loaded: after going back to an
earlier step that need not be the highest number. The sizes of all files are in `meta.json`: a file
that was cut short is found before anything is loaded.

A checkpoint may be written while training goes on (`wait=False`), from the states where they are: a
thread reads chunk after chunk in the order in which the next step updates them, and the step's
update of a chunk waits until it was read. Nothing is held twice but one parameter at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
from torch.distributed.checkpoint.state_dict_saver import save as write_all

from evener.base.given import given
from evener.errors import EvenerError, UsageError
from evener.zero import exits
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.states import BLOCK, SCALE, decode, stride
from evener.zero.tensors import buffers

VERSION = 1

logger = logging.getLogger("evener.zero")


class CheckpointError(EvenerError):
    """A checkpoint cannot be written or read."""


class Piece(torch.Tensor):
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
    ) -> Piece:
        """A view that knows its place, and says when it is going to be read."""
        piece = part.as_subclass(Piece)
        piece.part = part
        piece.reading = reading
        piece.fetch = piece.keep = None
        piece.place = ChunkStorageMetadata(torch.Size([start]), torch.Size([part.numel()]))
        piece.whole = torch.Size([whole])
        return piece

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


class _Reader(DefaultLoadPlanner):
    """What was read for a part that is not in memory goes where it belongs."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where a part is read to."""
        piece = self.state_dict[read_item.dest_index.fqn]
        if isinstance(piece, Piece) and piece.keep is not None:
            return torch.empty(read_item.lengths, dtype=piece.part.dtype)
        found: torch.Tensor = super().resolve_tensor(read_item)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """After `tensor` was filled: a part of a flat tensor, or all of it."""
        piece = self.state_dict[read_item.dest_index.fqn]
        if isinstance(piece, Piece) and piece.keep is not None:
            piece.keep(tensor, int(read_item.dest_offsets[0]))


class _Progress:
    """What a writer has read. It reads one piece at a time, in order, and keeps a copy: when it
    asks for the next one, it is done with the last."""

    def __init__(self, engine: Engine) -> None:
        self.chunks = list(engine.chunks())
        self.left: Counter[int] = Counter()
        self.last: Chunk | None = None
        for chunk in self.chunks:
            chunk.saved.clear()

    def reading(self, chunk: Chunk) -> None:
        """A piece of `chunk` is asked for."""
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
class _Held:
    """Elements [low, high) of a parameter of `numel` are this rank's, from `begin` of its share
    on."""

    chunk: Chunk
    name: str
    numel: int
    low: int
    high: int
    begin: int


def _held(engine: Engine) -> Iterator[_Held]:
    """What this rank holds. What it has nothing of is not in it."""
    for chunk in engine.chunks():
        share = chunk.states.weights.numel()
        begin = engine.rank * share
        for piece in chunk.group.pieces:
            low = max(piece.offset, begin)
            high = min(piece.offset + piece.numel, begin + share)
            if low < high:
                low, high, at = low - piece.offset, high - piece.offset, low - begin
                yield _Held(chunk, piece.name, piece.numel, low, high, at)


def _pieces(engine: Engine, progress: _Progress | None = None) -> dict[str, Any]:
    """Views of everything that this rank holds."""
    found: dict[str, Any] = {}
    for part in _held(engine):
        chunk, held = part.chunk, part.chunk.states.tensors()
        for kind, dtype in chunk.formats().items():
            each = stride(kind)
            count = -(-(part.high - part.low) // each)
            if kind in held:
                view = held[kind][part.begin // each :][:count]
            else:  # a shape without memory: it is on the SSD
                view = torch.empty(1, dtype=dtype).expand(count)
            entry = Piece.of(view, part.low // each, -(-part.numel // each))
            if kind not in held:
                place = kind, part.begin
                end = part.begin + part.high - part.low
                entry.fetch = functools.partial(chunk.read, *place, end)
                entry.keep = functools.partial(_keep, chunk, *place)
            if progress is not None:
                progress.left[chunk.index] += 1
                entry.reading = functools.partial(progress.reading, chunk)
            found[f"{part.name}.{kind}"] = entry
    return found


def _converted(engine: Engine, saved: Container[str]) -> list[tuple[_Held, str]]:
    """The moments that a checkpoint with these entries has in codes of one byte and this engine has
    not, or the other way: parts and places."""
    found: list[tuple[_Held, str]] = []
    for part in _held(engine):
        for place in engine.rule.moments.values():
            name = f"{part.name}.{place}"
            if place not in part.chunk.formats() or name not in saved:
                continue
            if (name + SCALE in saved) != part.chunk.coded(place):
                found.append((part, place))
    return found


def _exact(name: str, saved: Container[str]) -> bool:
    """Whether an entry is the rest of weights that a checkpoint has no exact copy of: zero."""
    weights, _, kind = name.rpartition(".")
    return kind == "lower" and name not in saved and f"{weights}.weights" in saved


def _convert(path: Path, part: _Held, place: str, coded: bool) -> None:
    """Read a moment that a checkpoint has in another form: `coded`, or not."""
    name = f"{part.name}.{place}"
    low, high, whole = part.low, part.high, part.numel
    first = low // BLOCK * BLOCK if coded else low
    if coded:
        blocks = -(-(high - first) // BLOCK)
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int8)
        scales = torch.empty(blocks, dtype=torch.uint8)
        wanted = {
            name: Piece.of(codes[: whole - first], first, whole),
            name + SCALE: Piece.of(scales, first // BLOCK, -(-whole // BLOCK)),
        }
    else:
        values = torch.empty(high - low)
        wanted = {name: Piece.of(values, low, whole)}
    # Of this rank alone: others may have nothing to convert.
    read_all(wanted, storage_reader=FileSystemReader(path), planner=_Reader(), no_dist=True)
    if coded:
        values = decode(place, codes, scales)[low - first : high - first]
    part.chunk.write_moment(place, part.begin, values)


def _keep(chunk: Chunk, kind: str, begin: int, values: torch.Tensor, offset: int) -> None:
    chunk.write(kind, begin + offset, values)


@torch.no_grad()
def _restore_buffers(engine: Engine, path: Path, same_ranks: bool) -> None:
    """Each rank's own, or the first one's where the number of ranks was another."""
    number = engine.ranks.number if same_ranks else 0
    file = path / f"buffers-{number}.pt"
    if not file.exists():
        if any(True for _ in buffers(engine.module)):
            logger.warning(
                "%s is of an Evener that saved no buffers: they stay as they are (the means of "
                "batch norm, ...)",
                path,
            )
        return
    saved = torch.load(file, weights_only=True)
    for name, _ in list(buffers(engine.module)):
        if name not in saved:
            logger.warning("%s has no buffer %s: it stays as it is", path, name)
            continue
        module, _, leaf = name.rpartition(".")
        owner = engine.module.get_submodule(module)
        buffer = owner._buffers[leaf]
        assert buffer is not None
        if buffer.shape == saved[name].shape:
            buffer.copy_(saved[name])
        else:
            owner._buffers[leaf] = saved[name].to(buffer.device, buffer.dtype)


def _packed(value: Any) -> Any:
    """What JSON cannot hold of a scheduler's state: keys that are numbers, and counters."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not isinstance(value, Counter):
            return {key: _packed(each) for key, each in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {"evener": kind, "pairs": [[key, _packed(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_packed(each) for each in value]
    return value


def _unpacked(value: Any) -> Any:
    """The inverse. Checkpoints of before have strings: milestones are numbers again."""
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("evener") in ("counter", "dict"):
        made = {key: _unpacked(each) for key, each in value["pairs"]}
        return Counter(made) if value["evener"] == "counter" else made
    found = {key: _unpacked(each) for key, each in value.items()}
    old = found.get("milestones")
    if isinstance(old, dict) and not isinstance(old, Counter):
        found["milestones"] = Counter({int(key): each for key, each in old.items()})
    return found


def _random_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Save:
    """A checkpoint on its way: `wait` for it, `result` for its path or what went wrong."""

    def __init__(self, engine: Engine, folder: Path, extra: Any, keep: int | None = None) -> None:
        self._keep = keep
        self._before = [p for p in folder.glob("step-*") if _order(p)[0] == engine.global_steps]
        self._group, self._writers = _group(engine)
        name = self._name(engine.global_steps)
        self.final, self._work = folder / name, folder / f".{name}.writing"
        self._rank, self._world = engine.ranks.number, engine.ranks.size
        self._shares, self._writes = engine.world, engine.ranks.replica == 0
        self._error: BaseException | None = None
        self.told = False
        """Whether somebody has asked for the result."""
        self._meta = _meta(engine, extra)
        self._random = _random_states()
        self._buffers = {
            name: b.detach().to("cpu", copy=True) for name, b in buffers(engine.module)
        }
        self._progress = _Progress(engine)
        self._entries = _pieces(engine, self._progress)
        self._device = engine.device
        self._thread = threading.Thread(target=self._run, name="evener-save", daemon=True)
        self._thread.start()
        exits.opened(self)

    def _name(self, step: int) -> str:
        """One that is free: rank 0 has looked, for a shared folder may look older to others."""
        again = max((_order(path)[1] for path in self._before), default=0) + 1
        box = [f"step-{step:08d}" + (f"-{again}" if self._before else "")]
        if self._group is not None:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def wait(self) -> None:
        """Until it is written, or has failed."""
        self._thread.join()
        exits.closed(self)

    def close(self) -> None:
        """As `wait`: at the end of the program."""
        self.wait()

    def done(self) -> bool:
        """Whether it is."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Its path, when it is written. Raises CheckpointError, the last one being untouched."""
        self.wait()
        self.told = True
        if self._error is not None:
            raise CheckpointError(
                f"checkpoint {self.final} was not written: {self._reason(self._error)}",
                "make room or choose another folder; the last checkpoint is as it was",
            ) from self._error
        return self.final

    def _reason(self, error: BaseException) -> str:
        """One line: what the system said, where it said something, and the room that is left."""
        said = [_root(error)]
        if isinstance(error, CheckpointException):
            said = [f"rank {rank}: {_root(failure[0])}" for rank, failure in error.failures.items()]
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.final.parent).free
            said.append(f"{free / 1e9:.2f} GB are free there")
        return "; ".join(said)

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier(group=self._group)

    def _run(self) -> None:
        self._device.attach()
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001  # raised by result()
            self._error = error
            logger.warning("checkpoint %s was not written: %s", self.final, self._reason(error))
        finally:
            self._progress.finish()

    def _write(self) -> None:
        work, folder = self._work, self.final.parent
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".step-*.writing"):
                shutil.rmtree(stale)
            work.mkdir()
        self._barrier()
        # No copies ahead, and no sorting by size with them: read in the order of the entries.
        if self._writes:  # the other nodes' copies are the same
            writer = FileSystemWriter(work, sync_files=True, per_thread_copy_ahead=0)
            write_all(
                self._entries,
                storage_writer=writer,
                no_dist=self._shares == 1,
                process_group=self._writers,
            )
        self._progress.finish()
        self._entries = {}
        torch.save(self._random, work / f"random-{self._rank}.pt")
        torch.save(self._buffers, work / f"buffers-{self._rank}.pt")
        _sync(work / f"random-{self._rank}.pt")
        _sync(work / f"buffers-{self._rank}.pt")
        self._barrier()
        if self._rank == 0:
            _finish(self._meta, work, self.final)
            for old in self._before:
                _remove(old)
            if self._keep is not None:
                whole = [p for p in folder.glob("step-*") if (p / "meta.json").exists()]
                # By when they were written: after going back, a lower step may be newer.
                whole.sort(key=lambda p: (p == self.final, (p / "meta.json").stat().st_mtime_ns))
                for old in whole[: -self._keep]:
                    _remove(old)
        self._barrier()


def _remove(path: Path) -> None:
    """A checkpoint that is not wanted any more; what is left of it is none at once."""
    (path / "meta.json").unlink(missing_ok=True)
    shutil.rmtree(path)


def _root(error: BaseException) -> str:
    """The system's own error in a chain, or the last line of what was raised: torch reports a write
    that was refused as a place in its file that it did not expect."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"


def _group(engine: Engine) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Groups of all ranks, and of those that write, so that theirs do not mix with training's
    collectives."""
    if engine.ranks.size == 1:
        return None, None
    previous = engine.saving
    if isinstance(previous, Save):
        return previous._group, previous._writers
    made: dist.ProcessGroup = dist.new_group(backend="gloo")
    if engine.ranks.replicas == 1:
        return made, made
    places: list[Any] = [None] * engine.ranks.size
    dist.all_gather_object(places, (engine.ranks.replica, dist.get_rank()), group=made)
    first = sorted(rank for replica, rank in places if replica == 0)
    writers: dist.ProcessGroup = dist.new_group(first, backend="gloo")
    return made, writers


@given
def save(engine: Engine, folder: str | Path, extra: Any = None, *, keep: int | None = None) -> Path:
    """Write a checkpoint below `folder`; returns its path. `extra`: what JSON can hold (the place
    of the sampler, ...). `keep`: how many checkpoints stay in the folder, this one among them; the
    ones that were written first go when it is whole. None: all stay. All ranks call it. Raises
    CheckpointError, with the last one untouched."""
    return begin(engine, folder, extra, keep=keep).result()


@given
def begin(
    engine: Engine, folder: str | Path, extra: Any = None, *, keep: int | None = None
) -> Save:
    """As `save`, while training goes on: it may be resumed from this moment. A checkpoint that is
    still being written is waited for first; if it failed and nobody has asked for its result, that
    is raised here. All ranks call it."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep={keep!r} checkpoints", "give 1 or more, or None to keep all")
    if isinstance(engine.saving, Save):
        engine.saving.wait()
        if not engine.saving.told:
            engine.saving.result()
    engine.flush()
    if engine.micro_steps % engine.accumulation or any(c.filled for c in engine.chunks()):
        raise CheckpointError(
            "gradients of micro-batches are waiting for a step, and a checkpoint holds none",
            "save right after a step, or call zero_grad() to drop them",
        )
    engine.drain()
    engine.saving = started = Save(engine, Path(folder), extra, keep)
    return started


def _meta(engine: Engine, extra: Any) -> dict[str, Any]:
    return {
        "version": VERSION,
        "step": engine.global_steps,
        "skipped": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "ranks": engine.ranks.size,
        "kind": engine.rule.name,
        "steps": {
            piece.name: steps
            for chunk in engine.chunks()
            for piece, steps in zip(chunk.group.pieces, chunk.steps, strict=True)
        },
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in engine.param_groups
        ],
        "scaler": dict(vars(engine.scaler)) if engine.scaler else None,
        "scheduler": _packed(engine.scheduler.state_dict()) if engine.scheduler else None,
        "extra": copy.deepcopy(extra),
    }


def _finish(meta: dict[str, Any], work: Path, final: Path) -> None:
    meta = {**meta, "files": {f.name: f.stat().st_size for f in work.iterdir()}}
    (work / "meta.json").write_text(json.dumps(meta, indent=1, default=str), encoding="utf-8")
    _sync(work / "meta.json")
    _sync(work)
    work.rename(final)
    mark = final.parent / ".latest.writing"
    mark.write_text(final.name, encoding="utf-8")
    _sync(mark)
    mark.replace(final.parent / "latest")
    _sync(final.parent)


def find(folder: str | Path) -> Path | None:
    """The checkpoint below `folder` that was written last, None where there is none.

    `latest` names it. Where it names none that is whole, it is that of the highest step, and the
    log says so.
    """
    folder = Path(folder)
    whole = [p for p in folder.glob("step-*") if (p / "meta.json").exists()]
    mark = folder / "latest"
    named = mark.read_text(encoding="utf-8").strip() if mark.is_file() else ""
    for path in whole:
        if path.name == named:
            return path
    highest = max(whole, key=_order, default=None)
    if named and highest is not None:
        logger.warning(
            "%s names %s, which is not there or not whole: %s is taken", mark, named, highest.name
        )
    return highest


def _order(path: Path) -> tuple[int, int]:
    """(step, how often it was saved before) of a checkpoint's folder; (-1, 0) for another name."""
    found = re.fullmatch(r"step-(\d+)(?:-(\d+))?", path.name)
    return (int(found[1]), int(found[2] or 0)) if found else (-1, 0)


@given
def load(engine: Engine, path: str | Path) -> Any:
    """Load a checkpoint, or the last one of a folder; returns its `extra`. All ranks call it.

    Another number of ranks and another budget are fine. Raises CheckpointError before anything is
    changed where it is not whole or of another model.
    """
    if isinstance(engine.saving, Save):
        engine.saving.wait()
    engine.drain()
    engine.flush()
    path = Path(path)
    if not (path / "meta.json").exists():
        found = find(path)
        if found is None:
            raise CheckpointError(
                f"{path} holds no checkpoint", "give the folder that was saved to"
            )
        path = found
    meta = _check(path, engine)
    reader = FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    others = _converted(engine, saved)
    apart = {f"{part.name}.{place}" for part, place in others}
    wanted = {
        name: piece
        for name, piece in _pieces(engine).items()
        if name.removesuffix(SCALE) not in apart and not _exact(name, saved)
    }
    try:
        read_all(wanted, storage_reader=reader, planner=_Reader(), no_dist=engine.world == 1)
        for part, place in others:
            _convert(path, part, place, f"{part.name}.{place}{SCALE}" in saved)
        for part in _held(engine):
            if "lower" in part.chunk.formats() and _exact(f"{part.name}.lower", saved):
                rest = torch.zeros(part.high - part.low, dtype=torch.int16)
                part.chunk.write("lower", part.begin, rest)
    except (CheckpointException, RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded: {error}", "load an earlier one"
        ) from error
    for chunk in engine.chunks():
        chunk.steps = _steps(meta, chunk)
        chunk.refresh()
    engine.global_steps, engine.skipped_steps = meta["step"], meta["skipped"]
    engine.micro_steps = meta["micro_steps"]
    for group, saved in zip(engine.param_groups, meta["groups"], strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    for what, held in (("loss scale", "scaler"), ("learning rate schedule", "scheduler")):
        here, there = getattr(engine, held) is not None, bool(meta[held])
        if here and not there:
            logger.warning("%s holds no %s: it goes on as it is", path, what)
        elif there and not here:
            logger.warning("%s holds a %s, and this run has none", path, what)
    if engine.scaler and meta["scaler"]:
        vars(engine.scaler).update(meta["scaler"])
    if engine.scheduler and meta["scheduler"]:
        engine.scheduler.load_state_dict(_unpacked(meta["scheduler"]))
    _restore_buffers(engine, path, meta["ranks"] == engine.ranks.size)
    states = path / f"random-{engine.ranks.number}.pt"
    if states.exists() and meta["ranks"] == engine.ranks.size:
        _restore_random(torch.load(states, weights_only=True))
    else:
        logger.warning(
            "%s is of %d ranks and this run has %d: random numbers go on as they are",
            path,
            meta["ranks"],
            engine.ranks.size,
        )
    return meta["extra"]


def _steps(meta: dict[str, Any], chunk: Chunk) -> list[int]:
    """Return the steps of each parameter. Older checkpoints counted them per chunk."""
    if "steps" in meta:
        return [meta["steps"].get(piece.name, 0) for piece in chunk.group.pieces]
    steps = meta["chunk_steps"].get(chunk.group.name, meta["step"])
    steps = steps if isinstance(steps, list) else [steps] * len(chunk.steps)
    if len(steps) != len(chunk.steps):
        raise CheckpointError(
            f"the checkpoint is of an older Evener, and {chunk.group.name} had {len(steps)} "
            f"parameters, not {len(chunk.steps)}",
            "load it with the moments that it was saved with, and save it again",
        )
    return steps


def _check(path: Path, engine: Engine) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        version = meta["version"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}/meta.json: {error}", "load an earlier checkpoint") from None
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version}", f"this Evener reads {VERSION}")
    for name, size in meta["files"].items():
        file = path / name
        there = file.stat().st_size if file.exists() else 0
        if there != size:
            raise CheckpointError(
                f"{file} has {there} bytes, it was written with {size}",
                "the checkpoint is damaged: load an earlier one",
            )
    if meta["kind"] != engine.rule.name:
        raise CheckpointError(
            f"{path} was trained with {meta['kind']}, this run uses {engine.rule.name}",
            "use the same optimizer",
        )
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    scales = {f"{part.name}.{place}{SCALE}" for part, place in _converted(engine, saved)}
    for name, piece in _pieces(engine).items():
        if name in scales or _exact(name, saved):
            continue
        other = saved.get(name)
        kept = getattr(getattr(other, "properties", None), "dtype", piece.part.dtype)
        if name.endswith(".weights") and kept != piece.part.dtype:
            raise CheckpointError(
                f"{path} was trained in {kept}, this run is in {piece.part.dtype}: the float32 "
                "weights lie in another form",
                "train in the same dtype, or export the checkpoint and give it as `weights=`",
            )
        if other is None:
            raise CheckpointError(f"{path} has no {name}", "load a checkpoint of this model")
        size = getattr(other, "size", None)
        if size is not None and tuple(size) != tuple(piece.whole):
            raise CheckpointError(
                f"{name} has {size[0]} elements in {path}, {piece.whole[0]} in the model",
                "load a checkpoint of this model",
            )
    for chunk in engine.chunks():
        _steps(meta, chunk)
    return meta
