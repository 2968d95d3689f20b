"""What `evener plan-memory tables.json` predicts, beside what tables of these sizes do.

    python benchmarks/embedding_plan.py benchmarks/tables/*.json --json FILE

Tables of each file, cut to `--rows` at most, are filled and trained by a collection on a lab of two
nodes of one rank: ids as often as the file says, forward, backward and step. Bytes of the stores
and bytes that cross are beside their prediction, and the shortest step of all, with the least
processor time of one. Files in /tmp are not found: a lab has one of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist

from evener.base.budget import Budget
from evener.base.units import parse_rate
from evener.embedding.placement import Cluster, Table, plan, seconds
from evener.embedding.planning import tables_of
from evener.embedding.torch import (
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
)


def tables(given: Any) -> list[Table]:
    """Those of the file, cut."""
    found = json.loads(given.tables.read_text(encoding="utf-8"))
    for table in found["tables"]:
        table["num_embeddings"] = min(table["num_embeddings"], given.rows)
    return tables_of(found, given.tables.parent, given.batch * 2)


def draw(table: Table, count: int, random: np.random.Generator) -> torch.Tensor:
    """`count` ids, as often as the table's use says; the most used have the least number."""
    use, ends = table.use, np.cumsum(table.use.rows)
    weights = use.rows * use.p
    which = random.choice(len(weights), count, p=weights / weights.sum())
    inside = (random.random(count) * use.rows[which]).astype(np.int64)
    return torch.from_numpy((ends - use.rows)[which].astype(np.int64) + inside)


def worker(given: Any) -> None:
    """One rank."""
    harness.join()
    made, random = tables(given), np.random.default_rng(dist.get_rank())
    configs = [
        EmbeddingBagConfig(t.rows, t.options.dim, t.name, feature_names=[t.name]) for t in made
    ]
    bags = EmbeddingBagCollection(configs, optimizer={t.name: t.options.optimizer for t in made})
    for table in made:
        module = bags.embedding_bags[table.name]
        keys = torch.arange(table.rows)
        sharded = module.table.sharded
        own = keys[sharded.owner(keys) == sharded.place]
        for part in own.split(1 << 16):
            module.store.lookup(part, 0)
    optimizer = DynamicOptimizer(bags)
    counts = [round(given.batch * table.ids) for table in made]
    lengths = torch.cat(
        [torch.tensor([n // given.batch + (i < n % given.batch) for i in range(given.batch)])
         for n in counts]
    )  # fmt: skip
    batches = []
    for _ in range(given.steps + given.warmup):
        ids = torch.cat([draw(t, n, random) for t, n in zip(made, counts, strict=True)])
        batches.append(Jagged([t.name for t in made], ids, lengths=lengths))
    turn, busy = iter(batches), []

    def step() -> None:
        began = time.process_time()
        bags(next(turn)).values().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        busy.append(time.process_time() - began)

    took = harness.turns(
        {"step": step}, given.steps, warmup=given.warmup, settle=lambda: dist.barrier()
    )["step"]
    modules = [bags.embedding_bags[table.name] for table in made]
    sent = torch.tensor(
        [sum(m.traffic.total for m in modules) / len(batches),
         sum(m.store.stats()["bytes"] for m in modules)], dtype=torch.float64,
    )  # fmt: skip
    dist.all_reduce(sent)
    crossing, held = (sent / dist.get_world_size()).tolist()
    harness.say(
        crossing=crossing,
        bytes=held,
        ms=1e3 * min(took),
        cpu_ms=1e3 * min(busy),
        steps_ms=[1e3 * each for each in took],
    )
    dist.destroy_process_group()


def compare(given: Any) -> dict[str, Any]:
    """Predicted and measured, of one file."""
    made = plan(tables(given), Cluster(given.batch, ranks=1, nodes=2), Budget(0, 1 << 60))
    times = seconds(made, Cluster(given.batch, ranks=1, nodes=2), parse_rate(given.link))
    predicted = {
        "crossing": sum(place.crossing for place in made.places),
        "bytes": made.bytes("host"),
        "ms": 1e3 * sum(times.values()),
    }
    words = harness.arguments_of(given, "rows", "batch", "steps", "warmup")
    argv = [sys.executable, __file__, str(given.tables.resolve()), "--worker", *words]
    job = harness.in_lab(
        f"2x1@{given.link},queue=50ms", argv, limit=500, env={"OMP_NUM_THREADS": "1"}
    )
    if job.failed:
        sys.exit(job.failed)
    measured = job.said[0]
    rows = [
        [what, *(f"{each[what]:,.1f}" for each in (predicted, measured)),
         f"{predicted[what] / measured[what]:.3f}"]
        for what in predicted
    ]  # fmt: skip
    head = [given.tables.stem, "predicted", "measured", "ratio"]
    print(harness.show(head, rows), flush=True)
    return {"predicted": predicted, "times": times, "measured": measured}


def main() -> None:
    """All files."""
    parser = harness.arguments(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    results = {}
    for path in given.files:
        given.tables = path
        if given.worker:
            worker(given)
        else:
            results[given.tables.stem] = compare(given)
    if results:
        del given.tables
        harness.keep(given, results=results)


if __name__ == "__main__":
    main()
