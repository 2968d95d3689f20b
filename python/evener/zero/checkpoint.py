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
import json
import logging
import os
import random
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_all
from torch.distributed.checkpoint.state_dict_saver import save as write_all

from evener.base.given import given
from evener.errors import EvenerError, UsageError
from evener.zero import exits, packed
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.entries import Progress, Reader, convert, converted, entries, held_by, is_zero
from evener.zero.states import SCALE
from evener.zero.tensors import buffers

VERSION = 1

logger = logging.getLogger("evener.zero")


class CheckpointError(EvenerError):
    """A checkpoint cannot be written or read."""


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
        self._progress = Progress(engine)
        self._entries = entries(engine, self._progress)
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
    engine.drain()
    if engine.micro_steps % engine.accumulation or any(c.filled for c in engine.chunks()):
        raise CheckpointError(
            "gradients of micro-batches are waiting for a step, and a checkpoint holds none",
            "save right after a step, or call zero_grad() to drop them",
        )
    engine.saving = started = Save(engine, Path(folder), extra, keep)
    return started


def _meta(engine: Engine, extra: Any) -> dict[str, Any]:
    kinds = _kinds(engine)
    return {
        "version": VERSION,
        "step": engine.global_steps,
        "skipped": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "ranks": engine.ranks.size,
        "kind": kinds if len(set(kinds.values())) > 1 else next(iter(kinds.values()), ""),
        "four_bits": packed.marks(engine.module),
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


def _kinds(engine: Engine) -> dict[str, str]:
    """The optimizer of each parameter, by its name."""
    trained = (chunk.group for chunk in engine.chunks() if chunk.group.trainable)
    return {piece.name: group.rule.name for group in trained for piece in group.pieces}


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
    engine.flush()
    engine.settle()
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
    others = converted(engine, saved)
    apart = {f"{part.name}.{place}" for part, place in others}
    wanted = {
        name: entry
        for name, entry in entries(engine).items()
        if name.removesuffix(SCALE) not in apart and not is_zero(name, saved)
    }
    try:
        read_all(wanted, storage_reader=reader, planner=Reader(), no_dist=engine.world == 1)
        for part, place in others:
            convert(path, part, place, f"{part.name}.{place}{SCALE}" in saved)
        for part in held_by(engine):
            if "lower" in part.chunk.formats() and is_zero(f"{part.name}.lower", saved):
                rest = torch.zeros(part.high - part.low, dtype=torch.int16)
                part.chunk.write("lower", part.begin, rest)
    except (CheckpointException, RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded: {error}", "load an earlier one"
        ) from error
    for chunk in engine.chunks():
        chunk.steps = _steps(meta, chunk)
        chunk.refresh()
    engine.reloaded()
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
    was = meta["kind"]  # of all parameters, or of each by its name
    for name, kind in _kinds(engine).items():
        if (other := was if isinstance(was, str) else was.get(name, kind)) != kind:
            raise CheckpointError(
                f"{path} was trained with {other}, this run uses {kind} for {name}",
                "use the same optimizer",
            )
    mine = packed.marks(engine.module)
    if (written := meta.get("four_bits", {})) != mine:
        name = min(n for n in {*written, *mine} if written.get(n) != mine.get(n))
        raise CheckpointError(
            f"{name} was quantized to 4 bits otherwise in {path}: its scales are not the model's",
            "load the base model that it was trained with, quantized in the same way",
        )
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    scales = {f"{part.name}.{place}{SCALE}" for part, place in converted(engine, saved)}
    for name, entry in entries(engine).items():
        if name in scales or is_zero(name, saved):
            continue
        other = saved.get(name)
        kept = getattr(getattr(other, "properties", None), "dtype", entry.part.dtype)
        if name.endswith(".weights") and kept != entry.part.dtype:
            raise CheckpointError(
                f"{path} was trained in {kept}, this run is in {entry.part.dtype}: the float32 "
                "weights lie in another form",
                "train in the same dtype, or export the checkpoint and give it as `weights=`",
            )
        if other is None:
            raise CheckpointError(f"{path} has no {name}", "load a checkpoint of this model")
        size = getattr(other, "size", None)
        if size is not None and tuple(size) != tuple(entry.whole):
            raise CheckpointError(
                f"{name} has {size[0]} elements in {path}, {entry.whole[0]} in the model",
                "load a checkpoint of this model",
            )
    for chunk in engine.chunks():
        _steps(meta, chunk)
    return meta
