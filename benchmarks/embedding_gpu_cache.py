"""Hot rows on the GPU against rows in host memory alone: steps, what is hidden, and equal bytes.

    python benchmarks/embedding_gpu_cache.py --json benchmarks/results/embedding-gpu-cache.json

26 features, Zipf 1.05, 65,536 samples; 10% of all rows fit the cache; Adagrad in the row; the
tower of MLPerf's DLRM behind. Three ways through the same batches, in turns:

    host      ids and rows on the CPU: the store is asked for every id, values and gradients cross
    unique    ids on the GPU, made unique there; rows in host memory
    cache     the same with hot rows on the GPU, the next batch prefetched while this one trains

Then `unique` and `cache` train again from the same seed, and every row that they touched is
compared with its slots, frequency and version, bit by bit.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import traceback

import harness
import torch
from torch import nn

from evener.embedding import Adagrad, Options, Store, forget
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer

FIELDS, DIM, ALPHA = 26, 16, 1.05
TOWER = (1024, 1024, 512, 256)  # as in MLPerf's DLRM


def make_batches(n: int, size: int, per_field: int, device: torch.device) -> list[torch.Tensor]:
    """Keys int64 [size, 26]: Zipf ranks per field, spread over all of int64."""
    generator = torch.Generator(device).manual_seed(1)
    rank = torch.arange(1, per_field + 1, device=device, dtype=torch.float64)
    reach = torch.cumsum(rank**-ALPHA, 0)
    reach /= reach[-1].clone()
    field = torch.arange(FIELDS, device=device) * per_field
    found = []
    for _ in range(n):
        draw = torch.rand(size, FIELDS, device=device, generator=generator, dtype=torch.float64)
        found.append(spread(torch.searchsorted(reach, draw).clamp_(max=per_field - 1) + field))
    return found


def spread(number: torch.Tensor) -> torch.Tensor:
    """A key for each number: odd multiplication permutes int64."""
    return number * -7046029254386353131


def options() -> Options:
    return Options(DIM, optimizer=Adagrad(lr=0.05), seed=7)


def fill(name: str, rows: int) -> Store:
    """A store in which all rows are."""
    store = Store(name, options())
    for start in range(0, rows, 1 << 20):
        store.lookup(spread(torch.arange(start, min(rows, start + (1 << 20)))), 0)
    return store


class Model(nn.Module):
    """Embeddings, and a dense model on the GPU."""

    def __init__(self, name: str, device: torch.device, way: str, cache_rows: int) -> None:
        super().__init__()
        place = torch.device("cpu") if way == "host" else device
        self.embedding = DynamicEmbedding(
            options(), name, device=place, cache_rows=cache_rows if way == "cache" else 0
        )
        torch.manual_seed(2)
        widths = (FIELDS * DIM, *TOWER, 1)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.top = nn.Sequential(*layers[:-1]).to(device)
        self.device = device
        self.optimizer = DynamicOptimizer(self, torch.optim.SGD(self.top.parameters(), lr=0.01))

    def train_on(self, ids: torch.Tensor, following: torch.Tensor | None) -> None:
        """One step."""
        given = ids.cpu() if self.embedding.table.device.type == "cpu" else ids
        values = self.embedding(given).to(self.device)
        if following is not None and self.embedding.cache_stats is not None:
            self.embedding.prefetch(following)
        out = self.top(values.flatten(1)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(out, (ids[:, 0] & 1).float()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(model: Model, batches: list[torch.Tensor], after: torch.Tensor | None) -> float:
    """Milliseconds per step."""
    harness.settle()
    began = time.perf_counter()
    for ids, following in zip(batches, [*batches[1:], after], strict=True):
        model.train_on(ids, following)
    harness.settle()
    return (time.perf_counter() - began) / len(batches) * 1e3


def dense_alone(model: Model, batch: torch.Tensor) -> float:
    """Milliseconds of the dense model's step."""
    values = torch.randn(batch.shape[0], FIELDS * DIM, device=model.device, requires_grad=True)
    took = []
    for _ in range(6):
        harness.settle()
        began = time.perf_counter()
        out = model.top(values).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(out, (batch[:, 0] & 1).float()).backward()
        harness.settle()
        took.append((time.perf_counter() - began) * 1e3)
    model.top.zero_grad()
    return statistics.median(took[2:])


def equal_bytes(batches: list[torch.Tensor], device: torch.device, cache_rows: int) -> int:
    """Train two ways from one seed; how many rows were compared. Raises where one differs."""
    kept = []
    for way in ("unique", "cache"):
        model = Model(f"equal-{way}", device, way, cache_rows)
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            model.train_on(ids, following)
        keys = torch.unique(torch.cat([ids.flatten() for ids in batches])).cpu()
        kept.append(model.embedding.store.take_rows(keys, len(batches) + 1))
        forget(model.embedding.table.name)
        del model
    for name, one, other in zip(("rows", "frequencies", "versions"), *kept, strict=False):
        if name == "frequencies" and device.type == "cpu":
            continue  # there the store is given all ids, and counts each
        if one.tobytes() != other.tobytes():
            wrong = int((one != other).reshape(len(one), -1).any(1).sum())
            raise SystemExit(f"{name} differ in {wrong} of {len(one)} rows with the cache")
    return len(keys)


def main() -> None:
    """All three ways, then the comparison."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=16_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--share", type=float, default=0.1, help="of rows that fit the cache")
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    per_field = given.rows // FIELDS
    cache_rows = int(given.rows * given.share)
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {what}", flush=True)

    count = given.warm + given.rounds * given.steps + 1
    batches = make_batches(count, given.batch, per_field, device)
    unique = statistics.mean(torch.unique(ids).numel() for ids in batches[:3])
    say(f"{given.batch} x {FIELDS} ids, {unique:,.0f} different; {given.rows:,} rows of {DIM}")
    models: dict[str, Model] = {}
    for way in ("cache", "unique", "host"):
        fill(way, given.rows)
        say(f"{way}: filled")
        models[way] = Model(way, device, way, cache_rows)
        first = timed(models[way], batches[:1], batches[1])
        say(f"{way}: first step {first:.1f} ms")
        if way == "cache":
            timed(models[way], batches[1 : given.warm], batches[given.warm])
            say(f"{way}: warm")
    dense = dense_alone(models["cache"], batches[0])
    say(f"dense model alone: {dense:.2f} ms")
    rounds: dict[str, list[float]] = {way: [] for way in models}
    stats = models["cache"].embedding.cache_stats
    assert stats is not None
    names = ("host", "written", "waited", "keys", "missing", "returned", "batches")
    before = [getattr(stats, name) for name in names]
    for number in range(given.rounds):
        start = given.warm + number * given.steps
        part = batches[start : start + given.steps]
        for way, model in models.items():
            rounds[way].append(timed(model, part, batches[start + given.steps]))
        say("  ".join(f"{way} {took[-1]:.2f} ms" for way, took in rounds.items()))
    did = {name: getattr(stats, name) - was for name, was in zip(names, before, strict=True)}
    step = {way: statistics.median(took) for way, took in rounds.items()}
    steps = did["batches"]
    result = {
        "rows": given.rows,
        "cache_rows": cache_rows,
        "ids": given.batch * FIELDS,
        "unique": unique,
        "step_ms": step,
        "rounds_ms": rounds,
        "dense_ms": dense,
        **{f"ratio_to_{way}": step[way] / step["cache"] for way in step if way != "cache"},
        "hit_rate_of_keys": 1 - did["missing"] / did["keys"],
        "returned_keys_per_step": did["returned"] / steps,
        "fetch_ms_per_step": did["host"] / steps * 1e3,
        "write_back_ms_per_step": did["written"] / steps * 1e3,
        "waited_ms_per_step": did["waited"] / steps * 1e3,
        "hidden": max(0.0, 1 - did["waited"] / did["host"]),
        "seconds": time.perf_counter() - began,
    }
    print(harness.show(["way", "ms per step", "x cache"],
                       [(way, ms, ms / step["cache"]) for way, ms in step.items()]))  # fmt: skip
    print(
        f"dense model alone {dense:.2f} ms; keys found in the cache "
        f"{result['hit_rate_of_keys']:.1%}; the store took {result['fetch_ms_per_step']:.2f} ms "
        f"per step, of which {result['hidden']:.1%} hidden"
    )
    harness.keep(given, **result)
    compared = equal_bytes(batches[:6], device, cache_rows)
    say(f"{compared:,} rows compared: bytes equal")
    harness.keep(given, **result, rows_with_equal_bytes=compared)


if __name__ == "__main__":
    try:
        main()
    except torch.AcceleratorError:
        # After such an error no tensor of the GPU can be given back: torch aborts when it tries.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
