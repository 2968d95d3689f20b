"""The cache of hot rows: with it and without it the store ends with the same bytes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.embedding import (
    Adagrad,
    Adam,
    AdamW,
    Counter,
    Ftrl,
    Lamb,
    LazyAdam,
    Lru,
    Options,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    Sgd,
    Store,
    Ttl,
    forget,
)
from evener.embedding.options import Optimizer
from evener.embedding.torch import DynamicEmbedding, DynamicEmbeddingBag, DynamicOptimizer
from evener.embedding.torch.cache import CachedRows
from evener.embedding.torch.table import Table
from evener.errors import UsageError

DIM = 6
_NAMES = count()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are made unique before the store is asked, with and without a cache.

    A store on the CPU is given all ids, and then bags are summed in another order.
    """
    monkeypatch.setattr(Table, "repeats", property(lambda _: False))


def contents(store: Store) -> dict[int, tuple[bytes, int, int]]:
    """Every row: key > its bytes with slots, frequency and version."""
    found = {}
    for chunk in store.export_rows():
        for key, row, frequency, version in zip(*chunk, strict=True):
            found[int(key)] = (row.tobytes(), int(frequency), int(version))
    return found


def batches(n: int, skew: bool = True) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for step in range(n):
        draw = torch.rand(8, 6, generator=generator)
        ids = (draw.pow(3) * 200).long() if skew else (draw * 200).long()
        yield ids - 20 + step  # hot keys drift


def train(options: Options, cache_rows: int, prefetch: bool = False, evict: int = 0) -> Store:
    """Steps on the same batches, each key once in a bag."""
    bag = DynamicEmbeddingBag(options, f"cache-{next(_NAMES)}", mode="sum", cache_rows=cache_rows)
    optimizer = DynamicOptimizer(bag)
    given = list(batches(30))
    for number, ids in enumerate(given):
        (bag(ids) * torch.arange(1, DIM + 1)).square().mean().backward()
        if prefetch and number + 1 < len(given):
            bag.prefetch(given[number + 1])
        optimizer.step()
        optimizer.zero_grad()
        if evict and number == evict:
            bag.evict()
        if number == 17:
            bag.eval()
            bag(given[3])
            bag.train()
    forget(bag.table.name)
    if bag.cache_stats is not None:
        assert 0 < bag.cache_stats.missing < bag.cache_stats.keys
        assert bag.cache_stats.evicted > 0
    return bag.store


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(weight_decay=0.01),
        Adagrad(),
        Adam(lr=0.01),
        LazyAdam(lr=0.01),
        AdamW(lr=0.01),
        RowWiseAdagrad(weight_decay=0.01),
        RowWiseAdagrad(weight_decay=0.01, decoupled=True),
        PartialRowWiseAdam(lr=0.01, weight_decay=0.01),
        Lamb(lr=0.01, weight_decay=0.01),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_same_bytes(optimizer: Optimizer, prefetch: bool) -> None:
    options = Options(DIM, optimizer=optimizer)
    assert contents(train(options, 70, prefetch)) == contents(train(options, 0))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_same_bytes_in_16_bits(dtype: str) -> None:
    options = Options(DIM, dtype=dtype, optimizer=Adagrad())
    assert contents(train(options, 70, True)) == contents(train(options, 0))


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_same_bytes_where_admission_refuses(prefetch: bool) -> None:
    options = Options(DIM, admission=Counter(5))
    with_cache, without = train(options, 70, prefetch), train(options, 0)
    assert contents(with_cache) == contents(without)
    assert 0 < len(without) < 150


@pytest.mark.parametrize(
    "options",
    [
        Options(DIM, eviction=Ttl(4), evict_every=5),
        Options(DIM, optimizer=Adam(), eviction=Lru(40), evict_every=7),
    ],
)
def test_the_same_bytes_where_rows_are_evicted(options: Options) -> None:
    assert contents(train(options, 70, True)) == contents(train(options, 0))
    assert contents(train(options, 70, evict=11)) == contents(train(options, 0, evict=11))


class Slow:
    """Writes rows back only when someone waits for it. Up to that time they are on their way."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, work, given))
        if not given:  # the cache waits for all that was submitted
            waiting, self.waiting = self.waiting, []
            for each, work, given in waiting:
                each.set_result(work(*given))
        return future


@pytest.mark.parametrize("admission", [None, Counter(3)])
def test_rows_that_are_wanted_again_on_their_way_back(
    monkeypatch: pytest.MonkeyPatch, admission: Counter | None
) -> None:
    options = Options(DIM, optimizer=Adam(lr=0.01), admission=admission)
    plain = contents(train(options, 0))
    made: list[CachedRows] = []
    init = CachedRows.__init__

    def slow(self: CachedRows, *given: Any) -> None:
        init(self, *given)
        self._writer = Slow()  # type: ignore[assignment]
        made.append(self)

    monkeypatch.setattr(CachedRows, "__init__", slow)
    for prefetch in (False, True):
        assert contents(train(options, 70, prefetch)) == plain
    assert all(each.stats.returned > 0 for each in made)


class OnStream(TorchDispatchMode):
    """Fails where something is computed outside of the stream: a GPU would not wait for it."""

    here = threading.local()  # the writer has a stream of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(self.here, "inside", False), f"{func} is not on the stream of the fetch"
        return func(*args, **(kwargs or {}))


def test_all_of_a_fetch_is_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = CachedRows._fetch
    seen = []

    @contextmanager
    def side(*_: Any) -> Iterator[None]:
        OnStream.here.inside = True
        yield
        OnStream.here.inside = False

    def watched(self: CachedRows, *given: Any) -> Any:
        with OnStream():
            seen.append(fetch(self, *given))
            return seen[-1]

    monkeypatch.setattr(CachedRows, "_side", side)
    monkeypatch.setattr(CachedRows, "_fetch", watched)
    train(Options(DIM), 70, prefetch=True)
    assert len(seen) > 20


def test_accumulated_batches_whose_rows_had_to_go_before_the_step() -> None:
    def accumulate(cache_rows: int, ahead: bool) -> Store:
        bag = DynamicEmbeddingBag(
            Options(DIM), f"cache-{next(_NAMES)}", mode="sum", cache_rows=cache_rows
        )
        optimizer = DynamicOptimizer(bag)
        given = [torch.unique(ids).unsqueeze(0) for ids in batches(24, skew=False)]
        for number, ids in enumerate(given):
            bag(ids).square().mean().backward()
            if ahead and number + 1 < len(given):
                bag.prefetch(given[number + 1])
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return bag.store

    plain = contents(accumulate(0, False))
    for ahead in (False, True):
        found = contents(accumulate(90, ahead))
        assert found.keys() == plain.keys()
        assert found == plain


def test_a_batch_that_was_not_prefetched_is_right_too() -> None:
    bag = DynamicEmbeddingBag(Options(DIM), mode="sum", cache_rows=64)
    first, second = (torch.unique(ids).unsqueeze(0) for ids in batches(2))
    bag.prefetch(first)
    out = bag(second)
    torch.testing.assert_close(out, bag.store.lookup_infer(second[0]).sum(0, keepdim=True))
    bag.prefetch(first)
    first += 1  # changed in place since
    torch.testing.assert_close(bag(first), bag.store.lookup_infer(first[0]).sum(0, keepdim=True))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    bag = DynamicEmbeddingBag(Options(DIM), mode="sum", cache_rows=64)
    optimizer = DynamicOptimizer(bag)
    ids = torch.arange(10).unsqueeze(0)
    bag(ids)
    before = contents(bag.store)
    (bag(ids) * float("inf")).sum().backward()
    with pytest.raises(UsageError, match="not finite"):
        optimizer.step()
    assert contents(bag.store) == before


def test_too_small_and_what_only_the_store_steps() -> None:
    bag = DynamicEmbeddingBag(Options(DIM), mode="sum", cache_rows=8)
    with pytest.raises(UsageError, match=r"10 different keys.*room for 8 rows"):
        bag(torch.arange(10).unsqueeze(0))
    bag(torch.arange(5).unsqueeze(0))
    with pytest.raises(UsageError, match="stepped by ftrl"):
        DynamicEmbeddingBag(Options(DIM, optimizer=Ftrl()), cache_rows=8)


def test_a_step_is_no_lookup_to_admission() -> None:
    """Two batches wait for one step: its fetch of their keys let them in a lookup too early."""
    module = DynamicEmbedding(Options(4, optimizer=Sgd(), admission=Counter(3)), cache_rows=20)
    optimizer = DynamicOptimizer(module)
    for batch in (torch.arange(6), torch.arange(3, 9)):
        module(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    keys, counts = module.store.counts()
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {
        **dict.fromkeys((0, 1, 2, 6, 7, 8), 1),
        **dict.fromkeys((3, 4, 5), 2),
    }
    assert len(module.store) == 0
