"""Many tables in one exchange: the bits of tables that go alone, and four collectives per step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.embedding import Adagrad, Adam, Counter, Options, RowWiseAdagrad, Sgd
from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer, clip_grad_norm_, lookups
from evener.errors import UsageError
from tests import worlds

# Dims, dtypes, optimizers, admission and forms differ; ids are many, few, and none on some ranks.
TABLES: list[tuple[Options, dict[str, Any], int]] = [
    (Options(8, optimizer=Adagrad(0.1)), {}, 40),
    (Options(3, dtype="f16", optimizer=Sgd(0.1)), {"wire": "fp16"}, 7),
    (Options(1, dtype="bf16", optimizer=RowWiseAdagrad(0.1)), {"gradient_wire": "bf16"}, 25),
    (Options(5, optimizer=Adam(0.1), admission=Counter(2)), {"wire": "int8"}, 60),
    (Options(17, optimizer=Adagrad(0.1)), {"average": False}, 0),
    (Options(4, optimizer=Adam(0.1)), {"cache_rows": 200}, 33),
]


class Counts:
    """Collectives that this process begins while it is open."""

    def __init__(self) -> None:
        self.n, self._was = 0, {}

    def __enter__(self) -> "Counts":
        for name in ("all_to_all_single", "all_reduce", "all_gather_object", "broadcast"):
            self._was[name] = getattr(dist, name)
            setattr(dist, name, self._of(self._was[name]))
        return self

    def _of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.n += 1
            return call(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, call in self._was.items():
            setattr(dist, name, call)


def ids_of(step: int, rank: int, table: int) -> torch.Tensor:
    count = TABLES[table][2] * (0 if (step + rank + table) % 5 == 0 else 1)
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + table)
    return torch.unique((torch.rand(count, generator=generator).pow(3) * 50).long() - 20)


def rows_of(bag: DynamicEmbeddingBag) -> dict[int, bytes]:
    """Whole rows: values, slots, frequency and version."""
    return {
        int(key): row.tobytes() + bytes([int(frequency), int(version)])
        for chunk in bag.store.export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    }


def train(rank: int, _size: int, way: str) -> tuple[list[dict[int, bytes]], list[int]]:
    """Rows after some steps, and collectives of each step."""
    bags = torch.nn.ModuleList(
        DynamicEmbeddingBag(options, f"{way}-{i}", mode="sum", **how)
        for i, (options, how, _) in enumerate(TABLES)
    )
    optimizer = DynamicOptimizer(bags)
    each = []
    for step in range(5):
        asked = [(bag.table, ids_of(step, rank, i)) for i, bag in enumerate(bags)]
        counts = Counts()
        with counts if step else Counts():
            if way == "together":
                if step == 3:
                    lookups.prefetch([(table, keys, keys) for table, keys in asked])
                    asked = [(table, table.unique(keys, keys)[0]) for table, keys in asked]
                found = lookups.look(asked, True)
                losses = [losses_of(values) for values in found]
                used = losses if step != 2 else losses[:-2]  # what no loss uses is not stepped
                torch.stack(used).sum().backward()
            else:
                for i, (table, keys) in enumerate(asked):
                    (values,) = lookups.look([(table, keys)], True)
                    if step != 2 or i < len(asked) - 2:
                        losses_of(values).backward()
            optimizer.step()
        each.append(counts.n)
        optimizer.zero_grad()
    return [rows_of(bag) for bag in bags], each


def losses_of(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.linspace(-1, 2, values.numel()).view(values.shape)).square().sum()


@pytest.mark.parametrize(("shape", "levels"), [((1, 1), 1), ((2, 2), 2), ((3,), 1)])
def test_tables_together_have_the_bits_of_tables_alone(shape: tuple[int, ...], levels: int) -> None:
    cases = {way: (train, way) for way in ("together", "alone")}
    found = worlds.several(shape, cases)
    for (rows, each), (alone, _) in zip(found["together"], found["alone"], strict=True):
        assert rows == alone
        assert sum(map(len, rows)) > 0
        assert each[1:] == [4 * levels] * 4


def overflow(rank: int, _size: int) -> tuple[str, list[int]]:
    """Each rank's gradients are finite, and their sum on the owner is not."""
    bags = [DynamicEmbeddingBag(4, f"large-{i}", average=False) for i in range(3)]
    model = torch.nn.ModuleList(bags)
    optimizer = DynamicOptimizer(model)
    keys = torch.arange(6)
    scales = (1.0, 3e38, 2e38 if rank == 1 else 0.0)  # the third's sum is finite
    found = lookups.look([(bag.table, keys) for bag in bags], True)
    sum((values * scale).sum() for values, scale in zip(found, scales, strict=True)).backward()  # type: ignore[union-attr]
    bad = [not bool(bag.table.overflow.grad.isfinite().all()) for bag in bags]
    try:
        optimizer.step()
    except UsageError as error:
        return str(error), [int(each) for each in bad]
    return "", [int(each) for each in bad]


def test_sums_that_overflow_are_seen_on_all_ranks() -> None:
    for error, bad in worlds.run((2, 1), overflow):
        assert "large-1" in error and "not finite" in error
        assert bad == [0, 1, 0]


def clip(rank: int, _size: int) -> tuple[float, float]:
    bags = torch.nn.ModuleList(DynamicEmbeddingBag(4, f"clip-{i}", average=False) for i in range(3))
    optimizer = DynamicOptimizer(bags)
    keys = torch.arange(6)
    found = lookups.look([(bag.table, keys) for bag in bags], True)
    torch.stack([values.sum() * (rank + 1) for values in found]).sum().backward()
    with Counts() as counts:
        norm = float(clip_grad_norm_(bags, 1.0))
    optimizer.step()
    return norm, counts.n


def test_one_sum_clips_all_tables() -> None:
    wanted = (3 * 6 * 4 * 3.0**2) ** 0.5  # each entry has 1 + 2
    assert worlds.run((1, 1), clip) == [(pytest.approx(wanted), 1)] * 2
