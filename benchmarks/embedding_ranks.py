"""Steps of a recommender's tables on several ranks: collectives and milliseconds.

    python benchmarks/embedding_ranks.py --json benchmarks/results/embedding-ranks.json

Each rank looks up `--batch` samples of `--hot` ids (Zipf 1.05) in each of `--tables` tables, sums
them, and steps all rows. Ranks are processes of this machine over Gloo, each on one thread. Ways
take turns in one run:

    by table    a DynamicEmbeddingBag per table, called one after another
    together    an EmbeddingBagCollection

Collectives are the calls of torch.distributed in a step, counted on rank 0. A step's processor
time (rank 0, all threads) says what its wall clock does not where other programs run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from evener.embedding import Adagrad, Options
from evener.embedding.torch import (
    DynamicEmbeddingBag,
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
    KeyedTensor,
)
from evener.tools.bench.embedding.command import draw

_CALLS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather", "broadcast")
OPTIMIZER = Adagrad(lr=0.01)
TABLES, DIM, BATCH, ROWS = 26, 16, 1024, 100_000


class Counted:
    """How many collectives this rank has begun."""

    def __init__(self) -> None:
        self.n = 0
        for name in _CALLS:
            setattr(dist, name, self._counts(getattr(dist, name)))

    def _counts(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.n += 1
            return call(*args, **kwargs)

        return counted


class Together(nn.Module):
    """One module for all tables."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(ROWS, DIM, f"together-{i}", feature_names=[str(i)])
            for i in range(TABLES)
        ]
        self.bags = EmbeddingBagCollection(configs, optimizer=OPTIMIZER)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As ByTable."""
        keys, lengths = (
            [str(i) for i in range(TABLES)],
            torch.ones(TABLES * BATCH, dtype=torch.long),
        )
        found: KeyedTensor = self.bags(Jagged(keys, ids.view(-1), lengths=lengths))
        return found.values()


class ByTable(nn.Module):
    """A module per table."""

    def __init__(self) -> None:
        super().__init__()
        options = Options(DIM, optimizer=OPTIMIZER, threads=1)
        self.bags = nn.ModuleList(
            DynamicEmbeddingBag(options, f"by-table-{i}", mode="sum") for i in range(TABLES)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[samples, tables * dim] for ids [tables, samples, 1]."""
        return torch.cat([bag(each) for bag, each in zip(self.bags, ids, strict=True)], 1)


def worker(given: Any) -> None:
    """One rank."""
    harness.join()
    counted = Counted()
    turns = given.steps + given.warmup
    size, rank = dist.get_world_size(), dist.get_rank()
    drawn = draw(ROWS, TABLES * BATCH, 1.05, turns * size)[rank::size]
    batches = [torch.from_numpy(ids).view(TABLES, BATCH, 1) for ids in drawn]
    ways: dict[str, Callable[[], Any]] = {}
    calls: dict[str, list[tuple[int, float]]] = {}
    for name, model in {"by table": ByTable(), "together": Together()}.items():
        optimizer, turn, calls[name] = DynamicOptimizer(model), iter(batches), []

        def step(model: Any = model, optimizer: Any = optimizer, turn: Any = turn,
                 own: list[tuple[int, float]] = calls[name]) -> None:  # fmt: skip
            before, began = counted.n, time.process_time()
            model(next(turn)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append((counted.n - before, time.process_time() - began))

        ways[name] = step
    took = harness.turns(ways, given.steps, warmup=given.warmup, settle=dist.barrier)
    found = {
        name: {
            "collectives": statistics.median(n for n, _ in calls[name]),
            "cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in calls[name]), 2),
            "ms": round(1e3 * statistics.median(seconds), 2),
            "steps_ms": [round(1e3 * each, 2) for each in seconds],
        }
        for name, seconds in took.items()
    }
    if rank == 0:
        harness.say(ways=found)
    dist.destroy_process_group()


def main() -> None:
    """All numbers of ranks."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker(given)
        return
    words = ["--worker", *harness.arguments_of(given, "steps", "warmup")]
    results = {}
    for count in map(int, given.ranks.split(",")):
        job = harness.ranks(*words, count=count)
        results[str(count)] = job.row.get("ways", job.row)
        keys = ("collectives", "ms", "cpu_ms")
        rows = ([name, *map(each.get, keys)] for name, each in results[str(count)].items())
        head = [f"{count} ranks", "collectives", "ms", "CPU ms of rank 0"]
        print(harness.show(head, rows), flush=True)
    what = f"{TABLES} tables of dim {DIM}, {BATCH} ids each per rank"
    harness.keep(given, what=what, results=results)


if __name__ == "__main__":
    main()
