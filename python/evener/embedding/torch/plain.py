"""Tables as plain arrays: from a weight that another library trained, and out for any other.

A file has `NAME.keys` int64 [n] and `NAME.values` float32 [n, dim] for each table. On several ranks
each writes the rows that it owns, to a file of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from evener.base.given import given
from evener.embedding.torch.modules import _Dynamic
from evener.embedding.torch.optimizer import tables
from evener.embedding.torch.state import shape
from evener.errors import UsageError

_CHUNK = 1 << 20


@given
@torch.no_grad()
def fill(module: _Dynamic, values: torch.Tensor, keys: torch.Tensor | None = None) -> int:
    """Set rows of a table to `values` [n, dim]; how many of them this rank owns.

    keys: int64 [n]; default: 0 to n - 1, as the rows of `nn.Embedding.weight` are. All ranks give
    the same. Rows that are not named stay; slots of rows that are there stay. Collective where the
    table is sharded.

    Raises UsageError where shapes do not fit.
    """
    table = module.table
    if values.ndim != 2 or values.shape[1] != table.dim:
        raise UsageError(
            f"values have shape {list(values.shape)}, and rows of embedding {table.name!r} have "
            f"{table.dim} values",
            f"give [n, {table.dim}]",
        )
    if keys is not None and keys.shape != values.shape[:1]:
        raise UsageError(f"{keys.numel()} keys for {len(values)} rows", "give one key per row")
    sharded, count = table.sharded, 0
    table.rows.forget()
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK].detach().float().cpu()
        own = torch.arange(start, start + len(part))
        if keys is not None:
            own = keys[start : start + _CHUNK].cpu()
        if sharded is not None:
            mine = sharded.owner(own) == sharded.place
            own, part = own[mine], part[mine]
        table._store.upsert(own, part.contiguous(), table._store.step)
        count += len(own)
    table.rows.reload()
    return count


@given
def export(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write keys and values of all tables of `model` to `path`; the file of this rank.

    path: ends with `.npz`, or with `.safetensors` where that package is installed. On several
    ranks `rows.npz` becomes `rows-0-of-2.npz` and `rows-1-of-2.npz`. Raises UsageError for another
    ending, or where the model has no embedding.
    """
    found, target = tables(model), Path(path)
    if not found:
        raise UsageError("the model has no embedding", "save its state_dict()")
    if target.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"{target.name} has no known ending", "end it with .npz or .safetensors")
    arrays: dict[str, np.ndarray] = {}
    for table in found:
        chunks = list(table.store.export())
        keys = [chunk.keys for chunk in chunks] or [np.empty(0, np.int64)]
        values = [chunk.values for chunk in chunks] or [np.empty((0, table.dim), np.float32)]
        arrays[f"{table.name}.keys"] = np.concatenate(keys)
        arrays[f"{table.name}.values"] = np.concatenate(values)
    place, size = max((shape(table) for table in found), key=lambda each: each[1])
    if size > 1:
        target = target.with_name(f"{target.stem}-{place}-of-{size}{target.suffix}")
    if target.suffix == ".npz":
        np.savez(target, **arrays)  # type: ignore[arg-type]
    else:
        try:
            from safetensors.numpy import save_file
        except ImportError:
            raise UsageError(
                "safetensors is not installed", "pip install safetensors, or end with .npz"
            ) from None
        save_file(arrays, target)
    return target
