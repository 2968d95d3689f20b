"""Checkpoints, SavedModels and Keras' files hold rows and slots, and give them back."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
from evener.embedding import Store
from evener.embedding.tensorflow.keras import Embedding
from evener.errors import UsageError


def trained(name, **options):
    """A table with two steps of Adam behind it."""
    table = de.get_variable(name, dim=3, optimizer={"kind": "adam"}, **options)
    for number in range(2):
        rows = tf.constant(table.lookup([1, -5, 2**62]))
        table.apply_gradients(tf.IndexedSlices(rows, [1, -5, 2**62]), step=number)
    return table


def content(table):
    """Key > row with slots, of all parts."""
    return {
        int(key): tuple(values)
        for store in table.stores
        for part in store.export_rows()
        for key, values in zip(part.keys, part.values, strict=True)
    }


def test_a_checkpoint_gives_rows_and_slots_back(name, tmp_path):
    table = trained(name)
    before = content(table)
    path = tf.train.Checkpoint(table=table, other=tf.Variable(1.0)).save(str(tmp_path / "c"))
    table.upsert([1, 77], [[9.0] * 3, [8.0] * 3])
    tf.train.Checkpoint(table=table, other=tf.Variable(0.0)).restore(path).assert_consumed()
    assert content(table) == before and len(before) == 3
    table.apply_gradients(tf.IndexedSlices(tf.ones([1, 3]), [1]))
    assert content(table) != before


def test_a_checkpoint_of_another_dim_is_refused(name, tmp_path):
    path = tf.train.Checkpoint(table=trained(name)).save(str(tmp_path / "c"))
    other = de.get_variable(f"{name}other", dim=4)
    other.upsert([1], [[1.0] * 4])
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=r"dim|shape"):
        tf.train.Checkpoint(table=other).restore(path)
    assert len(content(other)) == 1


def test_files_go_between_tables_and_frameworks(name, tmp_path):
    table = trained(name, devices=["/CPU:0", "/CPU:0"])
    table.save_to_file_system(str(tmp_path))
    before = content(table)
    table.clear()
    table.load_from_file_system(str(tmp_path))
    assert content(table) == before
    plain = Store("elsewhere", table.stores[0].options)
    plain.restore(tmp_path / f"{name}.part_0.evs")
    assert len(plain) == len(table.stores[0])
    with pytest.raises(UsageError, match=name):
        table.load_from_file_system(str(tmp_path / "nothing"))
    assert content(table) == before


def test_a_saved_model_serves_and_adds_nothing(name, tmp_path):
    table = trained(name)

    class Scorer(tf.Module):
        def __init__(self):
            self.table = table
            self.weight = tf.Variable([[1.0], [2.0], [3.0]])

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def __call__(self, ids):
            return de.embedding_lookup(self.table, ids) @ self.weight

    scorer = Scorer()
    want = scorer(tf.constant([1, -5, 2**62], tf.int64)).numpy()
    tf.saved_model.save(scorer, str(tmp_path / "m"))
    with pytest.raises(tf.errors.FailedPreconditionError, match="trained in this process"):
        tf.saved_model.load(str(tmp_path / "m"))
    table.close()
    served = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(served(tf.constant([1, -5, 2**62], tf.int64)), want)
    served(tf.constant([4, 5, 6], tf.int64))
    store = Store.find(name)
    assert len(store) == 3 and store.frozen
    de.thaw(name)
    assert not store.frozen
    # Where nothing of Evener is imported, only the library of ops is loaded.
    code = (
        "import sys, tensorflow as tf; tf.load_op_library(sys.argv[1]);"
        "m = tf.saved_model.load(sys.argv[2]);"
        "assert not any(k.startswith('evener') for k in sys.modules);"
        "print(m(tf.constant([1, -5, 2**62], tf.int64)).numpy().tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(de.library_path()), str(tmp_path / "m")],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == want.tobytes().hex(), done.stderr


def model(name):
    inputs = keras.Input((2,), dtype="int64")
    rows = Embedding(4, seed=3, name=name)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def test_keras_fits_and_its_files_hold_the_table(name, tmp_path):
    draw = np.random.default_rng(0)
    x = draw.integers(-(2**62), 2**62, 50)[draw.integers(0, 50, (800, 2))]
    y = (x[:, 0] % 2).astype(np.float32)
    first = model(name)
    first.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.02)), "mse")
    losses = first.fit(x, y, epochs=4, batch_size=50, verbose=0).history["loss"]
    table = first.layers[1].table
    assert losses[-1] < 0.3 * losses[0] and table.size() == 50
    want = first.predict(x[:5], verbose=0)
    first.predict(np.array([[3, 4]]), verbose=0)
    assert table.size() == 50

    first.save(tmp_path / "m.keras")
    first.save_weights(tmp_path / "m.weights.h5")
    second = keras.models.load_model(tmp_path / "m.keras")
    assert second.layers[1].table.name != table.name
    np.testing.assert_array_equal(second.predict(x[:5], verbose=0), want)
    assert content(second.layers[1].table) == content(table)
    third = model(name)
    third.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(third.predict(x[:5], verbose=0), want)
    third.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.02)), "mse")
    third.fit(x, y, batch_size=50, verbose=0)

    first.export(str(tmp_path / "served"), verbose=False)
    table.close()
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(tf.constant(x[:5])), want, rtol=1e-5)
