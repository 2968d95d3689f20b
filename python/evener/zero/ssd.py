"""The third tier: optimizer states in a file on an SSD.

# What is there
For a chunk that the plan sends there, the states that only the optimizer reads: moments, and what a
float32 master copy has beside the weights. Weights and gradients stay in host memory, as every pass
needs them. All of a rank's chunks are in one file, in the order of the plan, its room taken at the
start. The file has no name: its room is given back when the process ends, however it ends.

# How it is read
A chunk is cut into blocks. In the file a block's states lie side by side, so that an update reads
and writes one range. `Ring` brings the blocks that the optimizer updates next and takes those home
that it has updated: as many are on their way as there are buffers. The requests are Rust's (crates/
memory, `ssd`): io_uring, or threads where the kernel refuses it. A block is written once per step,
and only if something in it moved.

# Who may touch what
The ring is the host lane's. Whoever else reads or writes states (a checkpoint, `state_dict`) goes
through `Away.read` and `Away.write`, which have buffers of their own and one user at a time; they
come after `Engine.drain`, when nothing is on its way. After an error the ring does no more: the
states of that step are half new and half old, and only a checkpoint is whole.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evener import _native
from evener.base import settings
from evener.errors import EvenerError

logger = logging.getLogger("evener.zero")

BLOCK = 1 << 20
"""Elements of a block: some MB of the file, which one operation moves at the disk's full rate."""
BUFFERS = 16
"""Blocks on their way at a time, in both directions."""
BESIDE = 1
"""Buffers for everybody else."""
GRAIN = 4096
"""Elements that a field of a block is rounded up to: then each begins where O_DIRECT can."""
SMALL = 4 << 20
"""Bytes of states below which a chunk is not worth a place in the file."""
PROBE = 512 << 20
"""Bytes that are written to know how fast the disk is."""


class SsdError(EvenerError):
    """The file of the SSD tier cannot be made, read or written."""


_FIXES = {
    errno.ENOSPC: "make room there, or give a smaller ssd budget or another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or give another folder",
    errno.EDQUOT: "ask for a larger quota, or give another folder",
    errno.ENOENT: "make the folder, or give one that is there",
    errno.ENOTDIR: "give a folder",
    errno.EACCES: "give a folder that you may write to",
    errno.EROFS: "give a folder that can be written to",
    errno.EIO: "the disk fails (see dmesg): take another one and resume from the last checkpoint",
    errno.ETIMEDOUT: "see whether the disk is still there (dmesg); EVENER_SSD_TIMEOUT is the limit."
    " Resume from the last checkpoint",
}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """OSErrors of the tier as SsdError, with what to do."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        fix = _FIXES.get(number, "look at the disk, and resume from the last checkpoint")
        raise SsdError(f"SSD tier: {error.strerror or error}", fix) from error


@dataclass(frozen=True)
class Layout:
    """Where a chunk's states are in the file. fields: name and dtype of each. numel: elements of
    this rank's share. begin: bytes before it. block: elements of a block."""

    fields: tuple[tuple[str, torch.dtype], ...]
    numel: int
    begin: int
    block: int

    @property
    def blocks(self) -> int:
        """How many."""
        return -(-self.numel // self.block)

    def stride(self, block: int) -> int:
        """Elements of each field of a block, rounded up."""
        rest = min(self.block, self.numel - block * self.block)
        return -(-rest // GRAIN) * GRAIN

    def place(self, block: int) -> tuple[int, int]:
        """Place and length of a block in the file, bytes."""
        each = sum(dtype.itemsize for _, dtype in self.fields)
        return self.begin + block * self.block * each, self.stride(block) * each

    def field(self, block: int, name: str) -> tuple[int, torch.dtype]:
        """Bytes of a block before a field, and its dtype."""
        before = 0
        for other, dtype in self.fields:
            if other == name:
                return before, dtype
            before += self.stride(block) * dtype.itemsize
        raise KeyError(name)

    @property
    def bytes(self) -> int:
        """In the file."""
        return size_of(self.numel, [dtype for _, dtype in self.fields], self.block)


def size_of(numel: int, dtypes: Iterable[torch.dtype], block: int | None = None) -> int:
    """Bytes of the file that the states of `numel` elements take."""
    block = block or BLOCK
    each = sum(dtype.itemsize for dtype in dtypes)
    whole, rest = divmod(numel, block)
    return (whole * block + -(-rest // GRAIN) * GRAIN) * each


def buffer_bytes(widest: int) -> int:
    """Bytes of host memory that the tier takes; `widest`: bytes of an element's states."""
    return (BUFFERS + BESIDE) * BLOCK * widest


def _tensor(store: Any, buffer: int, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(store.address(buffer) + begin)
    memory._store = store  # type: ignore[attr-defined]  # keeps the map alive
    return torch.frombuffer(memory, dtype=dtype, count=count)


@dataclass(frozen=True)
class Rates:
    """Bytes/s of a file: reads alone, writes alone, the sum of both at once; `way`: by whom."""

    read: float
    write: float
    both: float
    way: str


def measure(folder: str | Path, size: int = PROBE, seconds: float = 0.5) -> Rates:
    """What a folder's disk does, by a file of `size` bytes that is gone afterwards and the
    operations that the tier makes. Raises SsdError."""
    room = min(10 * BLOCK, max(GRAIN, size // BUFFERS // GRAIN * GRAIN))
    with explained():
        store = _store(folder, size, BUFFERS, room)
        read, write, both = store.measure(size, seconds)
    return Rates(read, write, both, store.describe())


def _store(folder: str | Path, size: int, count: int, room: int) -> Any:
    return _native.SsdStore(
        str(folder), size, count, room, count,
        settings.EVENER_SSD_TIMEOUT.get(), settings.EVENER_SSD_IO.get(),
    )  # fmt: skip


class Ssd:
    """One rank's file, with `size` bytes in `folder`. `widest`: bytes of an element's states.
    Raises SsdError where there is no such file or room."""

    def __init__(
        self, folder: str | Path, size: int, widest: int, *, block: int | None = None
    ) -> None:
        block = block or BLOCK
        if block % GRAIN:
            raise ValueError(f"a block of {block} elements is not a multiple of {GRAIN}")
        self.folder = Path(folder)
        self.size = size
        self.block = block
        self._used = 0
        with explained():
            self.store = _store(folder, size, BUFFERS, block * widest)
            self._beside = self.store.beside(BESIDE, block * widest, BESIDE)
        self.lock = threading.RLock()
        """Lock of the buffer for everybody else."""
        self.way: str = self.store.describe()
        logger.info("SSD tier: %.2f GB in %s by %s", size / 1e9, folder, self.way)

    def layout(self, fields: Iterable[tuple[str, torch.dtype]], numel: int) -> Away:
        """The next place in the file for a chunk's states; they are zeros."""
        layout = Layout(tuple(fields), numel, self._used, self.block)
        self._used += layout.bytes
        if self._used > self.size:
            raise ValueError(f"the file of {self.size} bytes is full")
        return Away(self, layout)

    def moved(self) -> tuple[int, int]:
        """Bytes read and written until now."""
        pairs = self.store.moved(), self._beside.moved()
        return pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1]

    def range(self, write: bool, offset: int, length: int, give: Any) -> None:
        """Move one range of at most a buffer; `give` fills the buffer before, or empties it
        after."""
        with self.lock, explained():
            if write:
                give(self._beside)
            self._beside.wait(self._beside.submit(write, 0, offset, length))
            if not write:
                give(self._beside)


@dataclass
class Away:
    """A chunk's states in the file."""

    ssd: Ssd
    layout: Layout

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states that are there."""
        return tuple(name for name, _ in self.layout.fields)

    def dtype(self, name: str) -> torch.dtype:
        """Data type of one of them."""
        return dict(self.layout.fields)[name]

    def _parts(self, name: str, begin: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Parts of elements [begin, end), block by block: the first and one past the last, the
        place and length of the aligned range of the file, and the elements before them there."""
        layout = self.layout
        for block in range(begin // layout.block, -(-end // layout.block)):
            first = block * layout.block
            low, high = max(begin, first), min(end, first + layout.block)
            before, dtype = layout.field(block, name)
            place = layout.place(block)[0] + before
            aligned = (low - first) // GRAIN * GRAIN
            last = -(-(high - first) // GRAIN) * GRAIN
            length = (last - aligned) * dtype.itemsize
            yield low, high, place + aligned * dtype.itemsize, length, low - first - aligned

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """A copy of elements [begin, end). Raises SsdError."""
        dtype = self.dtype(name)
        found = torch.empty(end - begin, dtype=dtype)
        for low, high, place, length, skip in self._parts(name, begin, end):

            def take(store: Any, low: int = low, high: int = high, skip: int = skip) -> None:
                source = _tensor(store, 0, skip * dtype.itemsize, high - low, dtype)
                found[low - begin : high - begin].copy_(source)

            self.ssd.range(False, place, length, take)
        return found

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Set elements from `begin` on. Raises SsdError."""
        dtype, end = self.dtype(name), begin + values.numel()
        for low, high, place, length, skip in self._parts(name, begin, end):
            whole = skip == 0 and (high - low) * dtype.itemsize == length

            def put(store: Any, low: int = low, high: int = high, skip: int = skip) -> None:
                target = _tensor(store, 0, skip * dtype.itemsize, high - low, dtype)
                target.copy_(values[low - begin : high - begin])

            with self.ssd.lock:
                if not whole:  # what is beside them in the first and last page
                    self.ssd.range(False, place, length, lambda _: None)
                self.ssd.range(True, place, length, put)


@dataclass
class Held:
    """A block in a buffer. tensors: by name, each of `count` elements from `begin` of the share."""

    key: tuple[int, int]
    buffer: int
    place: tuple[int, int]
    ticket: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    begin: int = 0


class Ring:
    """Blocks on their way to the optimizer and home; of one thread. See the head of the file."""

    def __init__(self, ssd: Ssd) -> None:
        self._store = ssd.store
        self._free = collections.deque(range(BUFFERS))
        self._coming: dict[tuple[int, int], Held] = {}
        self._going: collections.deque[Held] = collections.deque()
        self.failed: BaseException | None = None
        """After the first error nothing more is read or written."""

    @property
    def writing(self) -> bool:
        """Whether something is still on its way home."""
        return bool(self._going)

    def ahead(self, wanted: Iterable[tuple[Away, int]]) -> None:
        """Begin to bring these blocks, in this order, as far as there are buffers."""
        self._check()
        with self._guarded():
            for away, block in wanted:
                if (away.layout.begin, block) in self._coming:
                    continue
                if not self._free and not self._home(wait=False):
                    return
                self._bring(away, block)

    def take(self, away: Away, block: int) -> Held:
        """A block, when it is there."""
        self._check()
        with self._guarded():
            key = away.layout.begin, block
            if key not in self._coming:
                while not self._free:
                    self._home(wait=True)
                self._bring(away, block)
            held = self._coming.pop(key)
            self._store.wait(held.ticket)
            layout = away.layout
            held.begin = block * layout.block
            count = min(layout.block, layout.numel - held.begin)
            for name, _ in layout.fields:
                before, dtype = layout.field(block, name)
                held.tensors[name] = _tensor(self._store, held.buffer, before, count, dtype)
            return held

    def give(self, held: Held) -> None:
        """It was updated: take it home."""
        with self._guarded():
            held.tensors = {}
            held.ticket = self._store.submit(True, held.buffer, *held.place)
            self._going.append(held)
            while self._going and self._home(wait=False):
                pass

    def flush(self) -> None:
        """Until all is home."""
        with self._guarded():
            while self._going:
                self._home(wait=True)

    def _bring(self, away: Away, block: int) -> None:
        key, place = (away.layout.begin, block), away.layout.place(block)
        buffer = self._free.popleft()
        self._coming[key] = Held(key, buffer, place, self._store.submit(False, buffer, *place))

    def _home(self, wait: bool) -> bool:
        """Whether the oldest write has ended; its buffer is free then."""
        if not self._going:
            if wait:
                raise RuntimeError("no buffer is on its way home")
            return False
        oldest = self._going[0]
        if wait:
            self._store.wait(oldest.ticket)
        elif not self._store.poll(oldest.ticket):
            return False
        self._going.popleft()
        self._free.append(oldest.buffer)
        return True

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with explained():
                yield
        except BaseException as error:
            self.failed = self.failed or error
            self._going.clear()
            raise
