"""Tables whose rows are spread over two ranks: what crosses, what trains, what is refused.

Random programs are in tests/twins/keras_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
import evener.horovod.tensorflow as hvd
import evener.horovod.tensorflow.keras as hvdk
from evener.embedding import parts
from evener.embedding.tensorflow._sharded import Ranks
from evener.embedding.tensorflow.keras import Embedding, EmbeddingCollection
from evener.errors import UsageError

FEATURES, BATCH, STEPS = 4, 8, 3


def towers(name: str, shard: bool, wrap: Callable[[Any], Any]) -> Any:
    """A model of tables of several dims, of which one serves two features."""
    keras.utils.set_random_seed(3)
    layers = [
        Embedding(2 + i % 3, combiner="sum", seed=i, name=f"{name}_{i}", shard=shard)
        for i in range(FEATURES - 1)
    ]
    of = {f"f{i}": layers[i % len(layers)] for i in range(FEATURES)}
    ids = {feature: keras.Input((2,), dtype="int64", name=feature) for feature in of}
    vectors = EmbeddingCollection(of)(ids)
    score = keras.layers.Dense(1)(keras.layers.Concatenate()(list(vectors.values())))
    model = keras.Model(ids, score)
    optimizer = wrap(de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.1)))
    model.compile(optimizer, "mse")
    return model


def data(rank: int, step: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    draw = np.random.default_rng(10 * step + rank)
    ids = {f"f{i}": draw.integers(-20, 20, (BATCH, 2)) for i in range(FEATURES)}
    return ids, draw.normal(size=(BATCH, 1)).astype("float32")


def tables_of(model: Any) -> list[Any]:
    (collection,) = [each for each in model.layers if isinstance(each, EmbeddingCollection)]
    return [layer.table for layer in collection.embeddings]


def rows_of(model: Any) -> dict[tuple[int, int], np.ndarray]:
    found = {}
    for i, table in enumerate(tables_of(model)):
        keys, rows = (each.numpy() for each in table.export())
        found.update({(i, int(key)): row for key, row in zip(keys, rows, strict=True)})
    return found


def both(batches: list[Any]) -> Any:
    """The batches of all ranks, one behind another."""
    ids = {f: np.concatenate([each[0][f] for each in batches]) for f in batches[0][0]}
    return ids, np.concatenate([each[1] for each in batches])


def test_a_model_trains_as_in_one_process_with_all_rows(tmp_path: Path) -> None:
    ours = towers("spread", True, hvdk.DistributedOptimizer)
    alone = towers("gathered", False, lambda optimizer: optimizer)
    for step in range(STEPS):
        ours.train_on_batch(*data(hvd.rank(), step))
        alone.train_on_batch(*both([data(rank, step) for rank in range(2)]))
    mine, right = rows_of(ours), rows_of(alone)
    of_ranks = hvd.allgather_object(mine)
    assert 0 < len(of_ranks[0]) < len(right) and not of_ranks[0].keys() & of_ranks[1].keys()
    found = {**of_ranks[0], **of_ranks[1]}
    assert found.keys() == right.keys()
    for key, row in right.items():
        np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=1e-6)
    owners = parts.hashes(np.array([key for _, key in mine])) % 2
    assert (owners == hvd.rank()).all()
    # `predict` looks up on all ranks, and adds nothing.
    ids, _ = data(7, 7)
    np.testing.assert_allclose(
        ours.predict(ids, verbose=0), alone.predict(ids, verbose=0), rtol=1e-4, atol=1e-5
    )
    assert rows_of(ours).keys() == mine.keys()
    # All of it comes back, into other tables and another optimizer.
    folder = hvd.broadcast_object(str(tmp_path / "checkpoints"))
    de.save(ours, folder)
    dense = [weight.numpy() for weight in ours.get_layer(index=-1).weights]
    ours.train_on_batch(*data(hvd.rank(), 8))
    assert de.load(ours, folder) == STEPS - 1
    again = rows_of(ours)
    assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in mine.items()}
    for weight, value in zip(ours.get_layer(index=-1).weights, dense, strict=True):
        assert weight.numpy().tobytes() == value.tobytes()
    assert int(ours.optimizer.iterations) == STEPS


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_of_26_tables_crosses_three_times(graph: bool) -> None:
    layers = {f"f{i}": Embedding(2 + i % 4, name=f"three-{graph}-{i}", shard=True)
              for i in range(26)}  # fmt: skip
    collection = EmbeddingCollection(layers)
    collection.build(None)
    anchors = [layer.trainable_variables[0] for layer in layers.values()]
    ids = {feature: tf.constant([[1, 2, 7]], tf.int64) for feature in layers}

    def step(given: Any) -> Any:
        with tf.GradientTape() as tape:
            found = collection(given, training=True)
            loss = tf.add_n([tf.reduce_sum(each) for each in found.values()])
        return hvd.DistributedGradientTape(tape).gradient(loss, anchors)

    if graph:
        made = tf.function(step, autograph=False).get_concrete_function(ids)
        kinds = [op.type for op in made.graph.get_operations() if op.type.startswith("Evener")]
        assert kinds.count("EvenerAlltoall") == 3
        assert set(kinds) == {"EvenerAlltoall", "EvenerEmbeddingLookup"}
        return
    with mock.patch.object(Ranks, "swap", autospec=True, side_effect=Ranks.swap) as swap:
        slices = step(ids)
    assert swap.call_count == 3
    # The mean of what both ranks gave, on the key's owner alone.
    owners = parts.hashes(np.array([1, 2, 7])) % 2
    mine = np.array([1, 2, 7])[owners == hvd.rank()]
    assert slices[0].indices.numpy().tolist() == mine.tolist()
    assert (slices[0].values.numpy() == 1.0).all()


def test_a_filter_counts_on_the_owner() -> None:
    option = de.EmbeddingVariableOption(filter_option=de.CounterFilter(2))
    table = de.get_variable("spread-filtered", dim=2, ev_option=option, shard=True)
    ids = tf.constant([1, 2, 3, 4], tf.int64)
    table.lookup(ids)  # both ranks ask: once, as in one process with the whole batch
    assert int(table.size()) == 0
    table.lookup(ids)
    assert sum(hvd.allgather_object(int(table.size()))) == 4


def test_a_broadcast_leaves_rows_with_their_owners() -> None:
    table = de.get_variable("spread-broadcast", dim=2, shard=True)
    table.lookup(tf.range(40, dtype=tf.int64))
    before = sorted(table.export()[0].numpy())
    hvd.broadcast_variables([table.anchor], 0)
    assert sorted(table.export()[0].numpy()) == before and 0 < len(before) < 40


def test_other_tables_on_a_rank_are_an_error_on_both() -> None:
    tables = [de.get_variable(f"spread-other-{i}", dim=2, shard=True) for i in range(2)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="other embeddings"):
        tables[hvd.rank()].lookup(tf.constant([1, 2], tf.int64))


def test_a_gradient_that_is_not_finite_stops_both_ranks() -> None:
    table = de.get_variable("spread-finite", dim=2, shard=True)
    weight = tf.Variable([1.0])
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([table.anchor, weight])
    own = np.arange(9)[parts.hashes(np.arange(9)) % 2 == hvd.rank()][:1]
    values = np.full((1, 2), np.nan if hvd.rank() else 1.0, np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(own))
    with pytest.raises(tf.errors.InvalidArgumentError, match="NaN or infinite"):
        optimizer.apply([slices, tf.ones([1])], [table.anchor, weight])
    assert int(table.size()) == 0 and float(weight[0]) == 1.0


def test_what_would_lose_or_mix_rows_is_refused(tmp_path: Path) -> None:
    table = de.get_variable("spread-refused", dim=2, shard=True)
    model = towers("spread_refused", True, hvdk.DistributedOptimizer)
    model.train_on_batch(*data(hvd.rank(), 0))
    for call in (
        lambda: model.save(str(tmp_path / "model.keras")),
        lambda: model.save_weights(str(tmp_path / "model.weights.h5")),
        lambda: tf.train.Checkpoint(table=table).save(str(tmp_path / "checkpoint")),
        lambda: table.save_to_file_system(str(tmp_path)),
        lambda: table.load_from_file_system(str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=r"its own rows of embedding .* alone"):
            call()
    with pytest.raises(UsageError, match="string keys"):
        de.get_variable("spread-strings", dim=2, key_dtype=tf.string, shard=True)
    with pytest.raises(UsageError, match="devices, partitioners"):
        de.get_variable("spread-devices", dim=2, devices=["CPU:0", "CPU:1"], shard=True)
    with pytest.raises(UsageError, match="exists with shard=True"):
        de.get_variable("spread-refused", dim=2)
    with pytest.raises(UsageError, match="inside of a branch or loop"):
        tf.function(
            lambda x: tf.cond(x[0] > 0, lambda: table.lookup(x), lambda: table.lookup(x)),
            autograph=False,
        )(tf.constant([1], tf.int64))
    foreign = np.arange(40)[parts.hashes(np.arange(40)) % 2 != hvd.rank()]
    with pytest.raises(tf.errors.InvalidArgumentError, match="other ranks own"):
        table.upsert(tf.constant(foreign), tf.ones([len(foreign), 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup(tf.constant([1], tf.int64)))
    adasum = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
    with pytest.raises(UsageError, match="summed or averaged"):
        adasum.gradient(loss, [table.anchor])
    elastic = mock.patch.dict("os.environ", {"EVENER_ELASTIC": "1"})
    with elastic, pytest.raises(UsageError, match="elastic job"):
        de.get_variable("spread-elastic", dim=2, shard=True)
    whole = towers("spread_whole", False, hvdk.DistributedOptimizer)
    with pytest.raises(UsageError, match="no embedding of the model is spread"):
        de.save(whole, tmp_path)
