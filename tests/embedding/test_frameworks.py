"""The same 500 steps in TensorFlow and in torch, from one seed: the same bytes in the store.

TensorFlow trains in a child, which saves its rows; then torch trains here on a store with the same
options. The loss is one whose gradients both compute without rounding differently.
"""

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.embedding import Options, Store, forget
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer
from tests.conftest import START

STEPS, DIM, BATCH, LR = 500, 5, (16, 3), 0.05

CHILD = """
import sys
import keras, numpy as np, tensorflow as tf
import evener.embedding.tensorflow as de
from test_frameworks_batches import batches

for kind, make in (("adagrad", keras.optimizers.Adagrad), ("adam", keras.optimizers.Adam)):
    table = de.get_variable(kind, dim={dim}, seed=11)
    optimizer = de.DynamicEmbeddingOptimizer(make({lr}))

    @tf.function
    def step(ids, target):
        with tf.GradientTape() as tape:
            off = table.lookup(ids) - target
            loss = tf.reduce_sum(off * off)
        optimizer.apply_gradients([(tape.gradient(loss, table.anchor), table.anchor)])

    for ids, target in batches():
        step(tf.constant(ids), tf.constant(target))
    (store,) = table.stores
    store.save(f"{{sys.argv[1]}}/{{kind}}.evs")
    with open(f"{{sys.argv[1]}}/{{kind}}.json", "w") as file:
        file.write(store.options.to_json())
"""

BATCHES = """
import numpy as np

def batches():
    random = np.random.default_rng(5)
    for step in range({steps}):
        # Keys drift, come twice in a batch, and rest for some steps.
        ids = (random.random({batch}) ** 2 * 120).astype(np.int64) + step // 10
        yield ids, random.normal(size=(*{batch}, {dim})).astype(np.float32)
"""


def contents(store: Store) -> dict[int, tuple[bytes, int, int]]:
    """Every row: key > its bytes with slots, frequency and version."""
    return {
        int(key): (row.tobytes(), int(frequency), int(version))
        for chunk in store.export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    }


@pytest.mark.timeout(300)  # TensorFlow takes its time on a busy machine
def test_500_steps_leave_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    made = BATCHES.format(steps=STEPS, batch=BATCH, dim=DIM)
    (tmp_path / "test_frameworks_batches.py").write_text(made, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(dim=DIM, lr=LR), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{START}:{tmp_path}", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.syspath_prepend(tmp_path)
    batches = importlib.import_module("test_frameworks_batches").batches
    for kind in ("adagrad", "adam"):
        options = Options.from_json((tmp_path / f"{kind}.json").read_text(encoding="utf-8"))
        assert options.optimizer.kind == kind and options.seed == 11
        theirs = Store(f"frameworks-tf-{kind}", options)
        theirs.restore(tmp_path / f"{kind}.evs")
        # Keras gives its learning rate with each step; here it is the table's own.
        same = dataclasses.replace(options, optimizer=dataclasses.replace(options.optimizer, lr=LR))
        embedding = DynamicEmbedding(same, f"frameworks-{kind}")
        optimizer = DynamicOptimizer(embedding)
        for ids, target in batches():
            off = embedding(torch.from_numpy(ids)) - torch.from_numpy(target)
            (off * off).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        mine, other = contents(embedding.store), contents(theirs)
        assert mine.keys() == other.keys() and len(mine) > 150
        differ = [key for key in mine if mine[key][0] != other[key][0]]
        assert not differ, f"{len(differ)} of {len(mine)} rows differ, such as {differ[:3]}"
        assert mine == other  # frequencies and versions too
        forget(theirs.name)
        forget(embedding.table.name)
