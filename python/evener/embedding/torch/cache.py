"""Hot rows on the GPU: whole rows, values and slots, are lent by the store and stepped there.

A batch's rows are all in the cache while it trains, so forward and step touch GPU memory only. The
store is asked for what is missing, and gets back what has to go, the longest unused first. With
`prefetch`, a thread asks for the next batch's missing rows while this one trains: they cannot be
changed by this batch, because what this batch has is in the cache.

Which key is where: `_keys`, ascending, and beside it `_slots`. A lookup is a binary search, and a
change of the cache is a merge of two sorted lists; both are plain torch operations, so that a CPU
plays the GPU in tests. The arithmetic of the step is the store's, bit by bit (`updates`): with the
cache and without it the store ends with the same bytes.

A key that admission did not let in has no row to lend. It gets a place for one batch (`_stray`),
its gradient is dropped as the store drops it, and nothing of it is written back.

Two threads ask the store: one fetches, one writes back, so that a fetch never waits for rows that
go. A row that is wanted again while it is on its way back is taken from what goes (`_Going`), and
not from the store. Write-backs keep their order: of two of one key the later is the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from evener.embedding import Store, slots
from evener.embedding.torch import updates
from evener.embedding.torch.rows import HostRows, as_options, due, interval
from evener.errors import UsageError

# With each batch that needs room, so much of the cache is made free ahead.
_AHEAD = 1 / 64


@dataclass
class _Fetched:
    """A batch's keys, and the rows of it that were missing."""

    keys: torch.Tensor
    inverse: torch.Tensor | None  # of what `keys` was made of
    missing: torch.Tensor
    rows: torch.Tensor
    frequencies: torch.Tensor
    versions: torch.Tensor
    admitted: torch.Tensor
    ready: Any  # the event after which a stream may use them; None on a CPU
    epoch: int


@dataclass(eq=False)
class _Going:
    """Rows on their way to the store, keys ascending. `written`: the store has them."""

    keys: torch.Tensor
    rows: torch.Tensor
    frequencies: torch.Tensor
    versions: torch.Tensor
    stray: torch.Tensor
    written: Future[None] | None = None

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of `keys`, and whether a key is here with a row."""
        at = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        return at, (self.keys[at] == keys) & ~self.stray[at]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.rows, self.frequencies, self.versions, self.stray


@dataclass
class CacheStats:
    """What the cache did. `returned`: rows that were wanted again on their way back.

    Seconds: `host` of fetching from the store, `written` of writing back, `waited` of the trainer.
    """

    batches: int = 0
    keys: int = 0
    missing: int = 0
    evicted: int = 0
    prefetched: int = 0
    returned: int = 0
    host: float = 0.0
    written: float = 0.0
    waited: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of a batch's different keys that were there."""
        return 1 - self.missing / self.keys if self.keys else 0.0

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return {**asdict(self), "hit_rate": self.hit_rate, "hidden": self.hidden}

    @property
    def hidden(self) -> float:
        """The share of the store's time that the trainer did not wait for."""
        return max(0.0, 1 - self.waited / self.host) if self.host else 1.0


class CachedRows:
    """`Rows` over a store, with `capacity` of them on `device`. Keys of a batch come once each.

    Raises UsageError for a batch with more different keys than the cache has room for.
    """

    def __init__(self, store: Store, device: torch.device, capacity: int) -> None:
        options = as_options(store.options)
        self.store, self.device, self.capacity = store, device, capacity
        self.dim, self._width = store.dim, store.dim + slots(store.options)
        self._update = updates.of(options)
        self._every = interval(options)
        self._cold = HostRows(store, device)
        self._rows = torch.zeros(capacity, self._width, device=device)
        whole = {"dtype": torch.int64, "device": device}
        self._frequency = torch.zeros(capacity, **whole)  # type: ignore[call-overload]
        self._version = torch.zeros(capacity, **whole)  # type: ignore[call-overload]
        self._used = torch.zeros(capacity, **whole)  # type: ignore[call-overload]
        self._stray = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._clear()
        self._clock = 0
        self._epoch = 0  # changes when rows change in a way that a prefetch could not foresee
        self._pending: Future[_Fetched] | None = None
        self._going: list[_Going] = []
        self._current: tuple[torch.Tensor, torch.Tensor] | None = None  # keys, slots
        self._bad: torch.Tensor | None = None
        self._t = int(store.stats()["steps"])
        self._refuses = options["admission"]["kind"] != "none"
        self._fetcher = ThreadPoolExecutor(1, "evener-embedding-fetch")
        self._writer = ThreadPoolExecutor(1, "evener-embedding-write")
        gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if gpu else None
        self._back = torch.cuda.Stream(device) if gpu else None
        self.stats = CacheStats()

    def _clear(self) -> None:
        self._keys = torch.empty(0, dtype=torch.int64, device=self.device)
        self._slots = torch.empty(0, dtype=torch.int64, device=self.device)
        self._free = torch.arange(self.capacity, device=self.device)
        self._current = None

    # What a batch asks.

    def read(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        self._raise_late()
        fetched = self._take(keys, step)
        places = self._admit(fetched)
        self._current = (keys, places)
        return self._rows[places, : self.dim]

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        unique, inverse = torch.unique(keys, return_inverse=True)
        at, found = self._find(unique)
        values = torch.empty(unique.numel(), self.dim, device=self.device)
        values[found] = self._rows[self._slots[at[found]], : self.dim]
        # What is on its way to the store has to be there first.
        self._settle()
        values[~found] = self._cold.peek(unique[~found])
        return values[inverse]

    def prefetch(self, keys: torch.Tensor, step: int) -> None:
        self._pending = self._ask(keys, step)
        self.stats.prefetched += 1

    def prefetch_ids(self, ids: torch.Tensor, step: int) -> Future[_Fetched]:
        """The same for ids [n] that repeat; the result has keys, and each id's place in them."""
        self._pending = self._ask(ids, step, repeats=True)
        self.stats.prefetched += 1
        return self._pending

    def wait(self, fetched: Future[_Fetched]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [u], once each and ascending, and the place of each id among them [n]."""
        began = time.perf_counter()
        found = fetched.result()
        self.stats.waited += time.perf_counter() - began
        self._use(found)
        assert found.inverse is not None
        return found.keys, found.inverse

    def write(self, keys: torch.Tensor, gradients: torch.Tensor, step: int, lr: float) -> None:
        self._raise_late()
        if keys.numel():
            if self._current is not None and self._current[0] is keys:
                places = self._current[1]
            else:
                keys, gradients = self._with_rows(keys, gradients)
                places = self._places(keys, step)
            if keys.numel():
                self._step(places, gradients, step, lr)
        if self.evicts(step):
            self.forget()
        # The store counts the step, and evicts where that is due.
        nothing = torch.empty(0, dtype=torch.int64)
        self.store.apply(nothing, torch.empty(0, self.dim), step, lr=lr)
        self._t += 1

    def _step(self, places: torch.Tensor, gradients: torch.Tensor, step: int, lr: float) -> None:
        rows = self._rows[places]
        w, *kept = rows.split(self.dim, 1)
        version = self._version[places]
        absent = ((step - version).clamp_(min=0) - 1).clamp_(min=0)
        lr = updates.rounded(lr)
        batch = updates.Batch(w, tuple(kept), gradients, absent, self._t + 1, lr)
        new = torch.cat(self._update(batch), 1)
        # A gradient that is not finite changes nothing, and is an error when the GPU has said so.
        fine = gradients.isfinite().all()
        keep = fine & ~self._stray[places]
        self._rows[places] = torch.where(keep.unsqueeze(1), new, rows)
        self._version[places] = torch.where(keep, step, version)
        self._frequency[places] += keep
        self._bad = ~fine

    def _raise_late(self) -> None:
        ended = [going for going in self._going if going.written and going.written.done()]
        self._going = [going for going in self._going if going not in ended]
        for going in ended:
            assert going.written is not None
            going.written.result()
        bad, self._bad = self._bad, None
        if bad is not None and bool(bad):
            raise UsageError(
                f"a gradient of embedding {self.store.name!r} was not finite in the last step: "
                "nothing of that step was changed in it",
                "look for the loss that is not finite, or use torch.amp.GradScaler",
            )

    def evicts(self, step: int) -> bool:
        return due(self._every, step)

    def flush(self) -> None:
        self._raise_late()
        self._give_back(self._keys, self._slots)
        self._settle()

    def forget(self) -> None:
        self._give_back(self._keys, self._slots)
        self._settle()
        self._clear()
        self._epoch += 1

    def reload(self) -> None:
        """The store was restored: begin with what it has now."""
        self._clear()
        self._epoch += 1
        self._t = int(self.store.stats()["steps"])

    def _settle(self) -> None:
        """Wait until the store has all that was given back."""
        self._writer.submit(lambda: None).result()
        self._raise_late()

    # Between the cache and the store.

    def _find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in `_keys`, and whether a key is there and has a row."""
        if not self._keys.numel():
            nothing = torch.zeros_like(keys)
            return nothing, nothing.bool()
        at = torch.searchsorted(self._keys, keys).clamp_(max=self._keys.numel() - 1)
        return at, (self._keys[at] == keys) & ~self._stray[self._slots[at]]

    def _ask(self, keys: torch.Tensor, step: int, repeats: bool = False) -> Future[_Fetched]:
        """Fetch what is missing of `keys`, in the thread."""
        # The latest first: of a key that goes twice it has the last values.
        going = self._going[::-1]
        return self._fetcher.submit(
            self._fetch, keys, step, going, self._now(), self._epoch, repeats
        )

    def _now(self) -> Any:
        """The event of what the current stream has been given so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _fetch(
        self,
        keys: torch.Tensor,
        step: int,
        going: list[_Going],
        event: Any,
        epoch: int,
        repeats: bool,
    ) -> _Fetched:
        inverse = None
        with self._side(self._stream, event):
            for tensor in (keys, *(part for each in going for part in each.parts)):
                if self._stream is not None:
                    tensor.record_stream(self._stream)
            if repeats:
                keys, inverse = torch.unique(keys, return_inverse=True)
            _, found = self._find(keys)
            missing = keys[~found]
            returning = []
            absent = torch.ones_like(missing, dtype=torch.bool)
            for each in going:
                at, there = each.find(missing)
                there &= absent
                absent &= ~there
                returning.append((each, at, there))
            wanted = missing[absent].cpu()
            began = time.perf_counter()
            room = torch.empty(wanted.numel(), self._width, pin_memory=self._stream is not None)
            _, *taken = self.store.take_rows(wanted, step, out=room)
            parts = [room.to(self.device, non_blocking=True)]
            parts += [self._up(torch.from_numpy(part)) for part in taken]
            took = time.perf_counter() - began
            returned = missing.numel() - wanted.numel()
            if returned:
                parts = _joined(parts, absent, returning)
            rows, frequencies, versions, admitted = parts
            admitted = admitted.bool()  # all work is on this stream, and done before `done`
            done = None
            if self._stream is not None:
                done = torch.cuda.Event()
                done.record(self._stream)
        self.stats.host += took
        self.stats.missing += missing.numel()
        self.stats.returned += returned
        return _Fetched(keys, inverse, missing, rows, frequencies, versions, admitted, done, epoch)

    def _up(self, part: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return part.to(self.device)
        return part.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def _side(self, stream: Any, event: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(event)
            yield

    def _take(self, keys: torch.Tensor, step: int) -> _Fetched:
        """What was prefetched for these keys, or else what is fetched now."""
        pending, self._pending = self._pending, None
        self.stats.batches += 1
        self.stats.keys += keys.numel()
        began = time.perf_counter()
        fetched = None
        if pending is not None:
            ahead = pending.result()
            if ahead.keys is keys and ahead.epoch == self._epoch:
                fetched = ahead
        if fetched is None:
            fetched = self._ask(keys, step).result()
        self.stats.waited += time.perf_counter() - began
        self._use(fetched)
        return fetched

    def _use(self, fetched: _Fetched) -> None:
        """Let the current stream use what the thread's stream made."""
        if fetched.ready is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(fetched.ready)
        for part in (fetched.keys, fetched.missing, fetched.rows, fetched.admitted):
            part.record_stream(stream)
        for more in (fetched.frequencies, fetched.versions, fetched.inverse):
            if more is not None:
                more.record_stream(stream)

    def _with_rows(
        self, keys: torch.Tensor, gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Without keys that admission did not let in: to fetch them would count as a lookup."""
        if not self._refuses:
            return keys, gradients
        _, keep = self._find(keys)
        rest = keys[~keep]
        if rest.numel():
            self._settle()  # rows on their way are rows
            frequencies, _ = self.store.meta(rest.cpu())
            keep[~keep] = torch.from_numpy(frequencies >= 0).to(self.device)
        return keys[keep], gradients[keep]

    def _places(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        """Where keys are that an earlier batch had: some may have gone since."""
        at, found = self._find(keys)
        there = self._keys[at] == keys if self._keys.numel() else found
        if bool(there.all()):
            return self._slots[at]
        self._epoch += 1
        return self._admit(self._ask(keys, step).result())

    def _admit(self, fetched: _Fetched) -> torch.Tensor:
        """Make room for the missing rows, take them in; the places of all keys of the batch."""
        keys, missing = fetched.keys, fetched.missing
        if keys.numel() > self.capacity:
            raise UsageError(
                f"a batch has {keys.numel()} different keys, and the cache of embedding "
                f"{self.store.name!r} has room for {self.capacity} rows",
                f"give cache_rows={2 * keys.numel()} or smaller batches",
            )
        self._clock += 1
        self._drop_strays()
        at, found = self._find(keys)
        self._used[self._slots[at[found]]] = self._clock
        lacks = missing.numel() - self._free.numel()
        if lacks > 0:
            in_batch = keys.numel() - missing.numel()
            most = self._keys.numel() - in_batch
            self._evict(min(most, lacks + int(self.capacity * _AHEAD)))
        n = missing.numel()
        places, self._free = self._free[:n], self._free[n:]
        self._rows[places] = fetched.rows
        self._frequency[places] = fetched.frequencies
        self._version[places] = fetched.versions
        self._used[places] = self._clock
        self._stray[places] = ~fetched.admitted
        self._merge(missing, places)
        return self._slots[torch.searchsorted(self._keys, keys)]

    def _drop_strays(self) -> None:
        if not self._refuses:
            return
        stray = self._stray[self._slots]
        if n := int(stray.sum()):
            self._remove(stray, n)

    def _evict(self, n: int) -> None:
        """Give back the `n` rows that were not used for longest."""
        oldest = torch.argsort(self._used[self._slots], stable=True)[:n]
        oldest = oldest.sort()[0]  # keys of what goes ascend, as `_keys` does
        gone = torch.zeros_like(self._slots, dtype=torch.bool)
        gone[oldest] = True
        self._give_back(self._keys[oldest], self._slots[oldest])
        self._remove(gone, n)
        self.stats.evicted += n

    def _give_back(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Hand rows to the thread, which writes them into the store."""
        if not keys.numel():
            return
        going = _Going(
            keys,
            self._rows[places],
            self._frequency[places],
            self._version[places],
            self._stray[places],
        )
        going.written = self._writer.submit(self._put, going, self._now())
        self._going.append(going)

    def _put(self, going: _Going, event: Any) -> None:
        parts = going.parts
        with self._side(self._back, event):
            if self._back is not None:
                for part in parts:
                    part.record_stream(self._back)
                parts = tuple(part.to("cpu", non_blocking=True) for part in parts)
                self._back.synchronize()
        keys, rows, frequencies, versions, stray = parts
        if bool(stray.any()):
            keep = ~stray
            keys, rows, frequencies, versions = (
                part[keep] for part in (keys, rows, frequencies, versions)
            )
        began = time.perf_counter()
        self.store.put_rows(keys, rows, frequencies, versions)
        self.stats.written += time.perf_counter() - began

    # The sorted lists. The number of entries that go or come is known, so nothing waits for a GPU.

    def _remove(self, gone: torch.Tensor, n: int) -> None:
        left = self._keys.numel() - n
        to = torch.where(gone, left, torch.cumsum(~gone, 0) - 1)
        back = torch.where(gone, torch.cumsum(gone, 0) - 1, n)
        self._free = torch.cat((self._free, _placed(self._slots, back, n)))
        self._keys, self._slots = _placed(self._keys, to, left), _placed(self._slots, to, left)

    def _merge(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        old, new = self._keys.numel(), keys.numel()
        if not new:
            return
        count = torch.arange(max(old, new), device=self.device)
        of_new = torch.searchsorted(self._keys, keys) + count[:new]
        of_old = torch.searchsorted(keys, self._keys) + count[:old]
        merged = []
        for was, more in ((self._keys, keys), (self._slots, places)):
            out = torch.empty(old + new, dtype=torch.int64, device=self.device)
            out[of_old] = was
            out[of_new] = more
            merged.append(out)
        self._keys, self._slots = merged


def _joined(
    parts: list[torch.Tensor],
    absent: torch.Tensor,
    returning: list[tuple[_Going, torch.Tensor, torch.Tensor]],
) -> list[torch.Tensor]:
    """What the store gave for the `absent`, and what goes for the others, in the order of keys."""
    whole = [part.new_ones(absent.numel(), *part.shape[1:]) for part in parts]
    for out, part in zip(whole, parts, strict=True):
        out[absent] = part
    for each, at, there in returning:
        places = at[there]
        for out, part in zip(whole, (each.rows, each.frequencies, each.versions), strict=False):
            out[there] = part[places]
    return whole


def _placed(values: torch.Tensor, to: torch.Tensor, n: int) -> torch.Tensor:
    """[n]: `values[i]` at `to[i]`; what goes to place n is left out."""
    out = torch.empty(n + 1, dtype=values.dtype, device=values.device)
    out[to] = values
    return out[:n]
