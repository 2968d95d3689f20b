"""The click model of train.py in TensorFlow, on the same store.

    python examples/recommend/train_tensorflow.py --days 3 --folder /tmp/clicks
    evener embedding serve /tmp/clicks            # in another terminal, also while it trains

The table's options are those of train.py, so the snapshots and deltas that this leaves are the
same: what one of the two has trained the other goes on with. Towers are each framework's own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import clicks
import keras
import numpy as np
import tensorflow as tf

import evener.embedding.tensorflow as de

DIM = 8


class ClickModel(keras.Model):
    """Embeddings of all fields, the products of each two of them, and a tower on both."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table
        first, second = np.triu_indices(clicks.FIELDS, 1)
        self.pairs = tf.constant(first * clicks.FIELDS + second)
        self.top = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])

    def call(self, keys: Any) -> Any:
        """Logits [batch] of int64 [batch, fields]."""
        rows = de.embedding_lookup(self.table, keys)
        products = tf.reshape(
            tf.matmul(rows, rows, transpose_b=True), [-1, clicks.FIELDS * clicks.FIELDS]
        )
        products = tf.gather(products, self.pairs, axis=1)
        flat = tf.reshape(rows, [-1, clicks.FIELDS * DIM])
        return self.top(tf.concat([flat, products], 1))[:, 0]


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
    keras.utils.set_random_seed(0)
    table = de.get_variable(
        "clicks",
        "normal",
        DIM,
        ev_option=de.EmbeddingVariableOption(
            filter_option=de.CounterFilter(2),
            evict_option=de.GlobalStepEvict(given.keep_days * per_day),
            evict_every=per_day,
        ),
        optimizer={"kind": "adagrad", "lr": 0.05},
    )
    store = table.stores[0]
    model = ClickModel(table)
    model(tf.zeros([1, clicks.FIELDS], tf.int64), training=False)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(1e-3))
    variables = [table.anchor, *model.top.trainable_variables]
    optimizer.build(variables)

    @tf.function
    def step(keys: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(keys, training=True)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logits

    if given.folder and any(given.folder.glob("full-*.evs")):
        store.restore(given.folder)
        # Keras counts steps by itself; versions of rows go on from those of the store.
        optimizer.iterations.assign(store.step + 1 if store.stats()["steps"] else 0)
        if (given.folder / "tower.weights.h5").exists():
            model.top.load_weights(given.folder / "tower.weights.h5")
        print(f"goes on with {len(store):,} rows after step {store.step}")
    elif given.folder:
        store.snapshot(given.folder)
    done = store.stats()
    first = (done["step"] + 1 if done["steps"] else 0) // per_day
    for number in range(first, given.days):
        scores, labels = [], []
        data = clicks.day(number, per_day * given.batch)
        for at in range(per_day):
            part = slice(at * given.batch, (at + 1) * given.batch)
            logits = step(tf.constant(data.keys[part]), tf.constant(data.labels[part]))
            scores.append(logits.numpy())
            labels.append(data.labels[part])
            if given.folder and (number * per_day + at + 1) % given.every == 0:
                store.delta(given.folder)
        found = clicks.auc(np.concatenate(scores), np.concatenate(labels))
        best = clicks.auc(data.chance, data.labels)
        stats = store.stats()
        print(
            f"day {number}: AUC {found:.4f} (the teacher's {best:.4f}), {stats['rows']:,} rows, "
            f"{stats['evicted']:,} evicted, {stats['bytes'] / 1e6:.1f} MB",
            flush=True,
        )
        if given.folder:
            store.snapshot(given.folder)
            model.top.save_weights(given.folder / "tower.weights.h5")


if __name__ == "__main__":
    main()
