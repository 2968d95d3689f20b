"""The tables that are compared, each behind the same two calls.

A peer that is not installed says so in words and is left out. All get the same ids and gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Made:
    """A table that is ready. `lookup(ids)`; `step(ids, gradients)`, None where there is none."""

    lookup: Callable[[np.ndarray], Any]
    step: Callable[[np.ndarray, np.ndarray], Any] | None


@dataclass(frozen=True)
class Peer:
    """`needs`: the module that must be installed. `make(rows, dim)` fills a table."""

    name: str
    needs: str
    make: Callable[[int, int], Made]

    def missing(self) -> str:
        """Why it is left out, or nothing."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return ""


def _store(rows: int, dim: int) -> Made:
    import numpy as np  # not for the help

    from evener.embedding import Adagrad, Options, Store, forget

    name = "bench-embedding"
    forget(name)
    store = Store(name, Options(dim, optimizer=Adagrad(lr=0.01)))
    for start in range(0, rows, 1 << 18):
        store.lookup(np.arange(start, min(rows, start + (1 << 18))), 0)
    state = {"step": 0}

    def step(ids: np.ndarray, gradients: np.ndarray) -> None:
        state["step"] += 1
        store.lookup(ids, state["step"])
        store.apply(ids, gradients, state["step"])

    return Made(store.lookup_infer, step)


def _torch(rows: int, dim: int) -> Made:
    import torch
    from torch import nn

    table = nn.Embedding(rows, dim, sparse=True)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.01)

    def lookup(ids: np.ndarray) -> Any:
        with torch.no_grad():
            return table(torch.from_numpy(ids))

    def step(ids: np.ndarray, gradients: np.ndarray) -> None:
        optimizer.zero_grad()
        table(torch.from_numpy(ids)).backward(torch.from_numpy(gradients))
        optimizer.step()

    return Made(lookup, step)


def _fbgemm(rows: int, dim: int) -> Made:
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )

    def ends(n: int) -> Any:
        return torch.arange(n + 1)

    def lookup(ids: np.ndarray) -> Any:
        with torch.no_grad():
            return table(torch.from_numpy(ids), ends(len(ids)))

    def step(ids: np.ndarray, gradients: np.ndarray) -> None:
        table(torch.from_numpy(ids), ends(len(ids))).backward(torch.from_numpy(gradients))

    return Made(lookup, step)


def _gather(rows: int, dim: int) -> Made:
    import tensorflow as tf

    table = tf.Variable(tf.random.normal((rows, dim)))
    return Made(lambda ids: tf.gather(table, ids), None)


def _dense_hash(rows: int, dim: int) -> Made:
    import tensorflow as tf

    table = tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.float32, tf.zeros(dim), empty_key=-1, deleted_key=-2
    )
    for start in range(0, rows, 1 << 18):
        keys = tf.range(start, min(rows, start + (1 << 18)), dtype=tf.int64)
        table.insert(keys, tf.random.normal((keys.shape[0], dim)))
    return Made(table.lookup, None)


def _tfra(rows: int, dim: int) -> Made:
    import tensorflow as tf
    import tensorflow_recommenders_addons.dynamic_embedding as de

    table = de.get_variable("bench", dim=dim, init_size=rows)
    for start in range(0, rows, 1 << 18):
        keys = tf.range(start, min(rows, start + (1 << 18)), dtype=tf.int64)
        table.upsert(keys, tf.random.normal((keys.shape[0], dim)))
    return Made(table.lookup, None)


PEERS = (
    Peer("evener", "evener", _store),
    Peer("nn.Embedding(sparse)", "torch", _torch),
    Peer("fbgemm (torchrec) on the CPU", "fbgemm_gpu", _fbgemm),
    Peer("tf.gather, static table", "tensorflow", _gather),
    Peer("tf DenseHashTable", "tensorflow", _dense_hash),
    Peer("TFRA", "tensorflow_recommenders_addons", _tfra),
)
