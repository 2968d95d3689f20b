"""Train a click model day by day on a table that grows, forgets, and is served meanwhile.

    python examples/recommend/train.py --days 3 --folder /tmp/clicks
    evener embedding serve /tmp/clicks            # in another terminal, also while it trains

Every batch is first predicted, then learned (progressive validation). A key gets a row when it has
come twice; rows that no step updated for a while go. Every --every steps the changed rows leave as
a delta. Started again with the same folder, it goes on after the last whole snapshot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import clicks
import numpy as np
import torch
from model import ClickModel

from evener.embedding import Adagrad, Counter, Options, Ttl
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer

DIM = 8


def main() -> None:
    """All days."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--samples", type=int, default=40_000, help="per day")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--every", type=int, default=50, help="steps between two deltas")
    parser.add_argument("--keep-days", type=int, default=3, help="a row lives without an update")
    parser.add_argument("--folder", type=Path, help="where snapshots and deltas go")
    given = parser.parse_args()
    per_day = given.samples // given.batch
    options = Options(
        DIM,
        optimizer=Adagrad(lr=0.05),
        admission=Counter(2),
        eviction=Ttl(given.keep_days * per_day),
        evict_every=per_day,
    )
    torch.manual_seed(0)
    embedding = DynamicEmbedding(options, "clicks")
    model = ClickModel(embedding, clicks.FIELDS, DIM)
    optimizer = DynamicOptimizer(model, torch.optim.Adam(model.top.parameters(), lr=1e-3))
    if given.folder and any(given.folder.glob("full-*.evs")):
        embedding.store.restore(given.folder)
        tower = torch.load(given.folder / "tower.pt", weights_only=True)
        model.top.load_state_dict(tower["top"])
        embedding.table.step = embedding.table.next_step()
        print(f"goes on with {len(embedding.store):,} rows after step {embedding.store.step}")
    elif given.folder:
        embedding.store.snapshot(given.folder)
    first = embedding.table.step // per_day
    for number in range(first, given.days):
        scores, labels = [], []
        data = clicks.day(number, per_day * given.batch)
        for start in range(0, len(data.labels), given.batch):
            keys = torch.from_numpy(data.keys[start : start + given.batch])
            truth = torch.from_numpy(data.labels[start : start + given.batch])
            logits = model(keys)
            scores.append(logits.detach().numpy())
            labels.append(truth.numpy())
            torch.nn.functional.binary_cross_entropy_with_logits(logits, truth).backward()
            optimizer.step()
            optimizer.zero_grad()
            if given.folder and embedding.table.step % given.every == 0:
                embedding.store.delta(given.folder)
        found = clicks.auc(np.concatenate(scores), np.concatenate(labels))
        best = clicks.auc(data.chance, data.labels)
        stats = embedding.store.stats()
        print(
            f"day {number}: AUC {found:.4f} (the teacher's {best:.4f}), {stats['rows']:,} rows, "
            f"{stats['evicted']:,} evicted, {stats['bytes'] / 1e6:.1f} MB",
            flush=True,
        )
        if given.folder:
            embedding.store.snapshot(given.folder)
            torch.save({"top": model.top.state_dict()}, given.folder / "tower.pt")


if __name__ == "__main__":
    main()
