"""AUC of exact, hashed and dynamic tables on the teacher's clicks; admission and eviction in drift.

    python benchmarks/embedding_auc.py --json benchmarks/results/embedding-auc.json

The model and the data are those of examples/recommend. Every batch is predicted before it is
learned; AUC is over the last half of that. Exact: a row for each id (`nn.Embedding` and torch's
Adagrad), with the initial values that the store would give. Hashed: ids modulo 10% of the ids.
Drift: ten days with new ids every day. A table that keeps all against one that admits a key when
it has come twice, one that evicts what no step updated for three days, one that does both, the
same with zeros instead of first values until a key is let in, the same with five days, and one
that admits and holds at most this many rows. `--drift-json` writes these figures alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from evener.embedding import Adagrad, Counter, Lru, Options, Store, Ttl, forget
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/recommend"))
import clicks
from model import ClickModel

DIM, LR, BATCH = 8, 0.05, 512


class Rows(nn.Module):
    """`nn.Embedding` over the place of each key among `keys`, or over its hash."""

    def __init__(self, keys: np.ndarray, seed: int, share: float) -> None:
        super().__init__()
        self.keys, self.share = torch.from_numpy(keys), share
        n = len(keys) if share == 1 else int(len(keys) * share)
        name = f"initial-{seed}-{share}"
        store = Store(name, options(seed))
        values = store.lookup_infer(self.keys[:n])
        forget(name)
        self.rows = nn.Embedding.from_pretrained(values, freeze=False)
        self.n = n

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, fields, dim]"""
        if self.share == 1:
            return self.rows(torch.searchsorted(self.keys, ids))
        return self.rows((ids % self.n + self.n) % self.n)


def options(seed: int, **how: Any) -> Options:
    return Options(DIM, optimizer=Adagrad(lr=LR), seed=seed, **how)


def run(model: ClickModel, optimizer: torch.optim.Optimizer, data: clicks.Clicks) -> np.ndarray:
    """Scores, each given before its batch was learned."""
    scores = []
    for start in range(0, len(data.labels), BATCH):
        logits = model(torch.from_numpy(data.keys[start : start + BATCH]))
        scores.append(logits.detach().numpy())
        truth = torch.from_numpy(data.labels[start : start + BATCH])
        nn.functional.binary_cross_entropy_with_logits(logits, truth).backward()
        optimizer.step()
        optimizer.zero_grad()
    return np.concatenate(scores)


def built(embedding: nn.Module, seed: int) -> tuple[ClickModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ClickModel(embedding, clicks.FIELDS, DIM)
    dense: torch.optim.Optimizer = torch.optim.Adam(model.top.parameters(), lr=1e-3)
    if isinstance(embedding, Rows):
        rows = torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=1e-10)
        return model, Both(rows, dense)
    return model, DynamicOptimizer(model, dense)


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each = each

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)


def static(seed: int, samples: int) -> dict[str, float]:
    """AUC of each kind of table."""
    data = clicks.day(0, samples, seed)
    keys, half = np.unique(data.keys), samples // 2
    found = {"teacher": clicks.auc(data.chance[half:], data.labels[half:])}
    tables = {
        "exact": lambda: Rows(keys, seed, 1),
        "hashed to 10%": lambda: Rows(keys, seed, 0.1),
        "dynamic": lambda: DynamicEmbedding(options(seed), f"dynamic-{seed}"),
    }
    for name, make in tables.items():
        scores = run(*built(make(), seed), data)
        found[name] = clicks.auc(scores[half:], data.labels[half:])
    forget(f"dynamic-{seed}")
    found["ids"] = len(keys)
    return found


def drift(seed: int, samples: int, days: int, rows: int) -> dict[str, Any]:
    """Keep all against admission and eviction."""
    found: dict[str, Any] = {}
    steps = samples // BATCH
    often = max(1, steps // 8)
    stale: dict[str, Any] = {"eviction": Ttl(3 * steps), "evict_every": often}
    ways: dict[str, dict[str, Any]] = {
        "keeps all": {},
        "admits": {"admission": Counter(2)},
        "evicts": stale,
        "admits and evicts": {"admission": Counter(2), **stale},
        "both, zeros before": {"admission": Counter(2), "missing": "zeros", **stale},
        "both, five days": {"admission": Counter(2), **stale, "eviction": Ttl(5 * steps)},
        "bounded": {"admission": Counter(2), "eviction": Lru(rows), "evict_every": often},
    }
    for name, how in ways.items():
        embedding = DynamicEmbedding(options(seed, **how), f"drift-{name}-{seed}")
        model, optimizer = built(embedding, seed)
        scores, labels, most = [], [], 0
        for number in range(days):
            data = clicks.day(number, steps * BATCH, seed)
            scores.append(run(model, optimizer, data))
            labels.append(data.labels)
            most = max(most, len(embedding.store))
        later = slice(1, None)  # all start alike
        auc = clicks.auc(np.concatenate(scores[later]), np.concatenate(labels[later]))
        stats = embedding.store.stats()
        found[name] = {
            "auc": auc,
            "seed": seed,
            "rows": stats["rows"],
            "most_rows": most,
            "days": [clicks.auc(one, truth) for one, truth in zip(scores, labels, strict=True)],
            "bytes": stats["bytes"],
        }
        forget(embedding.table.name)
    return found


def main() -> None:
    """Both tables."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=120_000)
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--per-day", type=int, default=30_000)
    parser.add_argument("--rows", type=int, default=40_000, help="the bound in drift")
    parser.add_argument("--drift-json", type=Path, help="drift alone")
    given = parser.parse_args()
    began = time.perf_counter()
    runs: list[dict[str, float]] = []
    drifts: list[dict[str, Any]] = []
    for seed in range(0 if given.drift_json else given.seeds):
        runs.append(static(seed, given.samples))
        print(f"seed {seed}: {runs[-1]}", flush=True)
    for seed in range(given.seeds):
        drifts.append(drift(seed, given.per_day, given.days, given.rows))
        kept = drifts[-1]["keeps all"]["auc"]
        for name, found in drifts[-1].items():
            print(
                f"drift, seed {seed}: {name:18} AUC {found['auc']:.5f} "
                f"({found['auc'] - kept:+.5f}), {found['rows']:,} rows, "
                f"at most {found['most_rows']:,} at a day's end",
                flush=True,
            )
    gaps = [abs(one["dynamic"] - one["exact"]) for one in runs]
    lost = {
        name: [one["keeps all"]["auc"] - one[name]["auc"] for one in drifts] for name in drifts[0]
    }
    losses = {name: statistics.mean(each) for name, each in lost.items()}
    spreads = {name: harness.interval(each) for name, each in lost.items()}
    if gaps:
        print(f"largest difference of dynamic and exact: {max(gaps):.1e} (at most 1e-4)")
    rows = ((name, f"{loss:+.5f}", f"{spreads[name]:.5f}") for name, loss in losses.items())
    print(harness.show(["mean loss of AUC (at most 0.001)", "", "95% interval +-"], rows))
    figures = {"drift": drifts, "mean_loss": losses, "half_of_95_percent_interval": spreads}
    if given.drift_json:
        harness.write(given.drift_json, harness.record(given, **figures))
    harness.keep(
        given, static=runs, **figures, largest_difference=max(gaps, default=None),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


if __name__ == "__main__":
    main()
