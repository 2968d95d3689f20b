"""A collection as the file that `evener plan-memory` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from evener.base.given import given
from evener.embedding.torch.collections import EmbeddingBagCollection, EmbeddingCollection
from evener.embedding.torch.table import Table
from evener.errors import UsageError


@given
def describe(
    collection: EmbeddingBagCollection | EmbeddingCollection, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """Write tables, and how often their rows were used, to `path` for `evener plan-memory`.

    Gives what it writes: {"tables": [...]}. On several ranks it is collective, the counts are those
    of all, and rank 0 writes. Raises UsageError, on all ranks, where one has trained nothing.
    """
    steps, tables = collection._steps_seen, []
    for config, module in zip(collection.configs, collection._modules_of, strict=True):
        table = module.table
        ranks = 1 if table.sharded is None else table.sharded.size
        ids, samples = np.array(collection._seen[config.name]).T
        times, rows, trained = _frequencies(table, bool(samples.all()))
        if not trained:
            raise UsageError(
                f"table {config.name!r} was not trained", "describe it after some steps"
            )
        tables.append(
            {
                "name": config.name,
                "num_embeddings": max(config.num_embeddings, int(rows.sum())),
                "embedding_dim": config.embedding_dim,
                "feature_names": list(config.feature_names),
                "ids": (ids / samples).tolist(),
                "optimizer": module.store.options.optimizer.to_dict(),
                "dtype": module.store.options.dtype,
                "frequencies": np.stack((times, rows), 1).tolist(),
                "steps": int(module.store.stats()["steps"]),
                "samples": max(1, round(samples.mean() / steps * ranks)),
            }
        )
    found = {"tables": tables}
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    return found


def _frequencies(table: Table, trained: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    """Counts that rows have, and how many rows have each, int64 [n], of all ranks; and whether all
    of them have `trained`."""
    parts = [rows.frequencies for rows in table.store.export()]
    own = np.unique(np.concatenate(parts or [np.empty(0, np.int64)]), return_counts=True)
    if table.sharded is None:
        return *own, trained
    every: list[Any] = [None] * table.sharded.size
    dist.all_gather_object(every, (*own, trained), group=table._group)
    *those, all_trained = zip(*every, strict=True)
    times, counts = (np.concatenate(each) for each in those)
    found, place = np.unique(times, return_inverse=True)
    return found, np.bincount(place, counts, len(found)).astype(np.int64), all(all_trained)
