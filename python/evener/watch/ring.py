"""The ring: one file of 64 KiB per rank, mapped by the rank and read by anybody.

    head      who: rank, world, pid, host, when it started. Written once, before the magic number
    progress  steps, marks, and what the watching thread saw of the data loader
    states    two places for a JSON document (groups and how far each is issued, what is unfinished)
    marks     the last 256 things that the rank entered or left

The rank may be killed between any two bytes, so no reader trusts what it reads: a state and a mark
carry a checksum. Progress is single words of eight bytes, each written and read whole, and each
says something by itself. States are written in turns, so the older one is whole while the newer is
written. The writer never waits, and takes no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZE = 1 << 16
_MAGIC = b"EVENERW1"
_HEAD = struct.Struct("<8sIIII64sdd")  # magic, rank, world, pid, slots, host, wall, monotonic
_STEP, _MARKS, _BATCHES, _SINCE, _LOADER, _WORDS = 0, 1, 2, 3, 4, 5
_STATE = struct.Struct("<IIddd")  # length, checksum, written at: wall, monotonic, CPU seconds
_MARK = struct.Struct("<QdQ24s24sqq8s?7xI")
# number, monotonic, step, what, group, sequence, elements, dtype, entered, checksum
_PROGRESS_AT = 256
_STATES_AT, _STATE_SIZE = 512, 12 << 10
_MARKS_AT, _SLOTS = 512 + 2 * _STATE_SIZE, 256


@dataclass
class Mark:
    """One thing entered or left. -1 where nothing says it."""

    number: int
    time: float
    step: int
    what: str
    group: str
    seq: int
    elements: int
    dtype: str
    entered: bool


@dataclass
class Seen:
    """What one look at a ring gave. Times are of the rank's own monotonic clock."""

    rank: int
    world: int
    pid: int
    host: str
    started: float
    step: int = 0
    marks: int = 0
    batches: int = 0
    """Looks of the watching thread that saw new batches."""
    since: float = 0.0
    """Since when the rank waits for the same batch; 0: it does not."""
    loader: float = 0.0
    """Seconds in the data loader."""
    state: dict[str, Any] = field(default_factory=dict)
    state_wall: float = 0.0
    state_time: float = 0.0
    cpu: float = 0.0
    last: list[Mark] = field(default_factory=list)


class Writer:
    """A rank's own ring. Not for several processes; marks of several threads may tear, and then
    fail their checksum.

    A watched step pays for `step`, right after computation that took all caches: what it touches
    counts, so there are slots, and it writes one word.
    """

    __slots__ = ("_map", "_marks", "_real", "_step", "_turn", "_whole")

    def __init__(self, path: Path, rank: int, world: int, host: str) -> None:
        """Raises FileExistsError where a living process has this ring, OSError as files do."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            if _alive(path):
                raise
            path.unlink(missing_ok=True)
            fd = os.open(path, flags, 0o600)
        try:
            # Reserved now: a full /dev/shm must refuse here, and not end the rank by SIGBUS later.
            os.posix_fallocate(fd, 0, SIZE)
            self._map = mmap.mmap(fd, SIZE)
            # The map keeps the file open, and so this lock: an unlocked ring may be removed.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._step = self._marks = self._turn = 0
        self._whole, self._real = _words(self._map)
        _HEAD.pack_into(
            self._map, 0, b"", rank, world, os.getpid(), _SLOTS, host.encode()[:64], time.time(),
            time.monotonic(),
        )  # fmt: skip
        self._map[0:8] = _MAGIC

    def step(self) -> None:
        """An optimizer's step ended."""
        self._whole[_STEP] = self._step = self._step + 1

    def loader(self, batches: int, since: float, seconds: float) -> None:
        """What was seen of the data loader, as `Seen` has it."""
        self._whole[_BATCHES] = batches
        self._real[_SINCE], self._real[_LOADER] = since, seconds

    def mark(
        self,
        what: str,
        group: str = "",
        seq: int = -1,
        elements: int = -1,
        dtype: str = "",
        entered: bool = True,
    ) -> None:
        """Something entered or left: a collective, an exchange."""
        number = self._marks + 1
        slot = _MARKS_AT + number % _SLOTS * _MARK.size
        raw = _MARK.pack(
            number, time.monotonic(), self._step, what.encode()[:24], group.encode()[:24], seq,
            elements, dtype.encode()[:8], entered, 0,
        )  # fmt: skip
        self._map[slot : slot + _MARK.size] = raw[:-4] + struct.pack("<I", zlib.crc32(raw[:-4]))
        self._marks = self._whole[_MARKS] = number

    def state(self, document: dict[str, Any]) -> bool:
        """Keep a document; whether it fitted. What does not leaves the last one in place."""
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) > _STATE_SIZE - _STATE.size:
            return False
        self._turn ^= 1
        at = _STATES_AT + self._turn * _STATE_SIZE
        times = struct.pack("<ddd", time.time(), time.monotonic(), time.process_time())
        check = zlib.crc32(data, zlib.crc32(times))
        # Data first: the checksum that makes it valid comes last.
        self._map[at + _STATE.size : at + _STATE.size + len(data)] = data
        _STATE.pack_into(self._map, at, len(data), check, *struct.unpack("<ddd", times))
        return True


class Reader:
    """Another process's ring. It stays readable when the file is gone."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be read, ValueError where it is no ring (yet)."""
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        if data[:8] != _MAGIC:
            data.close()
            raise ValueError(f"{path}: no ring, or one that is not complete yet")
        self._map = data
        self._whole, self._real = _words(data)
        _, self.rank, self.world, self.pid, _, host, self.wall, self.started = _HEAD.unpack_from(
            data
        )
        self.host = host.rstrip(b"\0").decode("utf-8", "replace")

    def read(self, marks: bool = False) -> Seen:
        """What is there now; `marks`: also the last marks, oldest first."""
        seen = Seen(self.rank, self.world, self.pid, self.host, self.started)
        seen.step, seen.marks = self._whole[_STEP], self._whole[_MARKS]
        seen.batches = self._whole[_BATCHES]
        seen.since, seen.loader = self._real[_SINCE], self._real[_LOADER]
        states = [s for s in (self._state(0), self._state(1)) if s is not None]
        if states:
            _, seen.state_wall, seen.state_time, seen.cpu, seen.state = max(
                states, key=lambda s: s[0]
            )
        if marks:
            seen.last = self._marks()
        return seen

    def _state(self, turn: int) -> tuple[float, float, float, float, dict[str, Any]] | None:
        at = _STATES_AT + turn * _STATE_SIZE
        length, check, wall, monotonic, cpu = _STATE.unpack_from(self._map, at)
        if not 0 < length <= _STATE_SIZE - _STATE.size:
            return None
        data = self._map[at + _STATE.size : at + _STATE.size + length]
        if zlib.crc32(data, zlib.crc32(struct.pack("<ddd", wall, monotonic, cpu))) != check:
            return None
        document = json.loads(data)
        return (monotonic, wall, monotonic, cpu, document) if isinstance(document, dict) else None

    def _marks(self) -> list[Mark]:
        found = []
        for slot in range(_SLOTS):
            at = _MARKS_AT + slot * _MARK.size
            raw = self._map[at : at + _MARK.size]
            if zlib.crc32(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
                continue
            number, when, step, what, group, seq, elements, dtype, entered, _ = _MARK.unpack(raw)
            if number:
                texts = [t.rstrip(b"\0").decode("utf-8", "replace") for t in (what, group, dtype)]
                found.append(
                    Mark(number, when, step, texts[0], texts[1], seq, elements, texts[2], entered)
                )
        return sorted(found, key=lambda mark: mark.number)


def _words(ring: mmap.mmap) -> tuple[memoryview[int], memoryview[float]]:
    """The progress, as whole numbers and as fractions. A word is copied as one, which `struct` does
    not promise where it is told the order of bytes."""
    words = memoryview(ring)[_PROGRESS_AT : _PROGRESS_AT + 8 * _WORDS]
    return words.cast("Q"), words.cast("d")


def _alive(path: Path) -> bool:
    """Whether the process that made a ring lives. One that is not complete counts as alive for a
    second."""
    try:
        pid = Reader(path).pid
    except (OSError, ValueError):
        try:
            return time.time() - path.stat().st_mtime < 1.0
        except OSError:
            return False
    try:
        return (
            pid != os.getpid()
            and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
        )
    except OSError:
        return False
