"""Memory that is counted where it is made: every storage that an operation returns, until it dies.

A dispatch mode sees all operations of its thread, autograd's too where they run on the CPU, and of
fake tensors all there are. `trace` measures a model with it that is nowhere in memory; the
simulated device plays an accelerator of a given size with it. What a kernel takes inside itself is
not seen: `inside` knows it for those where it matters.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from evener.zero.vocabulary import LazyLogits

logger = logging.getLogger("evener.zero")

_UNCOUNTED: set[Any] = set()
"""Operations whose arithmetic could not be counted; each is said once."""
PER_CORE = 1_080_000
"""Bytes that a sum of small floats takes at most for each multiprocessor: its partial sums. Found,
as all that `inside` knows, on an H200 with torch 2.11."""


def inside(func: Any, args: Any, cores: int) -> int:
    """Bytes that a kernel of CUDA takes inside itself, and gives back before it returns. `cores`:
    the accelerator's multiprocessors."""
    packet = str(func._overloadpacket)[5:]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not tensors:
        return 0
    first = tensors[0]
    if packet == "sum" and first.dtype.itemsize == 2:
        return min(8 * first.numel(), cores * PER_CORE)
    if packet == "logsumexp":
        return first.nbytes
    if packet == "embedding_dense_backward":
        return 9 * first.nbytes // 4
    if packet == "_softmax_backward_data":
        return first.nbytes
    if packet == "_safe_softmax":
        return first.numel()
    if packet.endswith("gemm_4bit"):
        # bitsandbytes makes the weight whole where there are many rows (read, not measured).
        rows, columns = args[2]
        return int(rows * columns * first.dtype.itemsize)
    if packet.startswith("_scaled_dot_product") and packet.endswith(
        ("attention_backward", "attention_for_cpu_backward")
    ):
        # The query's gradient in float32; keys' and values' for every head of the query.
        query, key = tensors[1], tensors[2]
        repeated = 2 * query.nbytes if query.shape[1] != key.shape[1] else 0
        return query.numel() * 4 + repeated
    return 0


def attention(func: Any, args: Any, kwargs: Any) -> int:
    """FLOP of a kernel for scaled dot product attention, 0 of another operation. A causal one skips
    half, and a backward pass has five products where the forward pass has two. torch's own formulas
    count no kernel of the CPU (which a GPU that is not here is traced with), and no half."""
    packet = str(func._overloadpacket)[5:]
    if not packet.startswith("_scaled_dot_product"):
        return 0
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        return 0
    scores: int = query.shape[:-1].numel() * key.shape[-2]
    products: int = scores * (query.shape[-1] + value.shape[-1])
    if given.get("is_causal") and query.shape[-2] == key.shape[-2]:
        products //= 2
    return products * (5 if packet.endswith("backward") else 2)


BLOCK = 512
"""Bytes: what CUDA's caching allocator rounds up to."""


class Ledger:
    """Bytes that are held now and were held at most. Any thread may use it."""

    def __init__(self, limit: int | None = None) -> None:
        self.now = 0
        self.peak = 0
        self.limit = limit
        self._beside = 0
        self._lock = threading.RLock()  # a storage may die, and be booked, inside of `take`

    def take(self, size: int) -> None:
        """Raises torch.OutOfMemoryError, with nothing booked, where the limit would be passed."""
        with self._lock:
            self._check(size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def book(self, size: int) -> None:
        """As `take`, for memory that is limited with the rest and has a peak of its own."""
        with self._lock:
            self._check(size)
            self._beside += size

    @property
    def used(self) -> int:
        """Bytes now, of both."""
        return self.now + self._beside

    def _check(self, size: int) -> None:
        used = self.used
        if self.limit is not None and size > 0 and used + size > self.limit:
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {size / 2**20:.2f} MiB: {used} bytes of "
                f"{self.limit} are in use (simulated device)"
            )

    def mark(self) -> int:
        """The most since the last mark."""
        with self._lock:
            peak, self.peak = self.peak, self.now
            return peak


def tensors(given: Any) -> Iterator[torch.Tensor]:
    """Those in what an operation takes or gives: lists and tuples, nothing deeper. A trace asks
    this some times per operation, and pytree's walk takes ten times as long."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from tensors(each)


def _strided(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own: lazy logits have none."""
    return tensor.layout == torch.strided and not isinstance(tensor, LazyLogits)


class Meter(TorchDispatchMode):
    """Books new storages in `ledger`. `work`: where to count operations as (FLOP, bytes moved);
    `seen`: is told every operation's tensors. `cores`: of a CUDA device that is only imagined: what
    its kernels take inside themselves is then booked too."""

    def __init__(self, ledger: Ledger, *, count_work: bool = False, cores: int = 0) -> None:
        super().__init__()
        self.ledger = ledger
        self.cores = cores
        self.work: Counter[tuple[int, int]] | None = Counter() if count_work else None
        self.seen: Any = None
        self.events: list[tuple[int, int]] | None = None
        """Where to write what is made and given back, as `pool` plays it."""
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.seen is not None:
            self.seen(args, kwargs)
        out = func(*args, **kwargs)
        made = False
        fresh = [x for x in tensors(out) if _strided(x)]
        if fresh:
            # A view, or what was written in place, is no new memory.
            given = {
                x.untyped_storage()._cdata for x in tensors((args, *kwargs.values())) if _strided(x)
            }
            for leaf in fresh:
                made = self._book(leaf, given) or made
        if self.cores and (more := inside(func, args, self.cores)):
            self.ledger.take(more)
            self.ledger.take(-more)
        if self.work is not None and (made or func._schema.is_mutable):
            self._count(func, args, kwargs, out)
        return out

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """The work of what runs inside counts this many `times`."""
        before = Counter(self.work)
        yield
        if self.work is not None:
            for key, count in (self.work - before).items():
                self.work[key] += (times - 1) * count

    def _book(self, tensor: torch.Tensor, given: set[int]) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in given:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        ledger, live, events = self.ledger, self._live, self.events
        number = len(events) if events is not None else 0

        def gone(_: Any) -> None:
            if live.pop(key, None) is not None:
                ledger.take(-size)
                if events is not None:
                    events.append((number, 0))

        ledger.take(size)
        if events is not None:
            events.append((number, size))
        live[key] = weakref.ref(storage, gone)
        return True

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        assert self.work is not None
        moved = 0
        for leaf in tensors((args, *kwargs.values(), out)):
            moved += leaf.numel() * leaf.element_size()
        flops = attention(func, args, kwargs)
        packet = func._overloadpacket
        if not flops and packet in flop_registry:
            try:
                flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
            except Exception as error:  # noqa: BLE001  # a formula that does not know such shapes
                if packet not in _UNCOUNTED:
                    _UNCOUNTED.add(packet)
                    logger.info("the plan counts no arithmetic of %s: %s", packet, error)
        elif "grouped_mm" in str(packet):
            a, b = args[0], args[1]
            flops = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
        self.work[flops, moved] += 1
