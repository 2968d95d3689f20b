"""Tables of a recommender, whose gradients all cross together, on each of two ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
import evener.horovod.tensorflow as hvd
import evener.horovod.tensorflow.keras as hvdk
from evener.embedding.tensorflow.keras import Embedding
from evener.errors import UsageError

TABLES, BATCH, STEPS = 4, 8, 3
DIMS = [4 + i % 3 for i in range(TABLES)]


def slices_of(seed: int) -> list[Any]:
    """Each rank brings other rows, or none, in several types and shapes."""
    draw = np.random.default_rng(seed)
    found = []
    for i, kind in enumerate(["float32", "float16", "float32", "float64", "float32"]):
        n = int(draw.integers(0, 5)) if i else 0
        values = draw.normal(size=(n, *[(3,), (2,), (2, 2), (), (7,)][i])).astype(kind)
        indices = draw.integers(-(2**62), 2**62, n)
        indices = tf.cast(indices, tf.int64 if i % 2 else tf.int32)
        found.append(tf.IndexedSlices(tf.constant(values), indices))
    return found


@pytest.mark.parametrize(("graph", "op"), [(False, hvd.Average), (True, hvd.Sum)])
def test_together_they_are_the_same_bits_as_each_alone(graph: bool, op: int) -> None:
    def together(given: list[Any]) -> list[Any]:
        return hvd.grouped_allreduce(given, op=op)

    def alone(given: list[Any]) -> list[Any]:
        return [hvd.allreduce(each, op=op) for each in given]

    runs = [together, alone]
    if graph:
        kinds = [
            tf.IndexedSlicesSpec([None, *each.values.shape[1:]], each.dtype, each.indices.dtype)
            for each in slices_of(0)
        ]
        runs = [tf.function(run, input_signature=[kinds], autograph=False) for run in runs]
    for seed in range(4):
        given = slices_of(2 * seed + hvd.rank())
        found, right = [run(given) for run in runs]
        for ours, theirs in zip(found, right, strict=True):
            for part in ("values", "indices"):
                mine, other = getattr(ours, part).numpy(), getattr(theirs, part).numpy()
                assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
                assert mine.tobytes() == other.tobytes()


def test_gradients_go_through_them() -> None:
    x = tf.Variable(np.arange(6.0).reshape(3, 2))
    with tf.GradientTape(persistent=True) as tape:
        parts = [tf.IndexedSlices(x * (hvd.rank() + 1.0), tf.range(3, dtype=tf.int64))] * 2
        together = hvd.grouped_allreduce(parts, op=hvd.Sum)
        alone = [hvd.allreduce(each, op=hvd.Sum) for each in parts]
        losses = [tf.add_n([tf.reduce_sum(g.values**2) for g in got]) for got in (together, alone)]
    found, right = [tape.gradient(loss, x).numpy() for loss in losses]
    assert found.any() and found.tobytes() == right.tobytes()


def test_other_rows_on_a_rank_are_refused() -> None:
    one = tf.IndexedSlices(tf.ones([1, 2 + hvd.rank()]), tf.constant([1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="other rows"):
        hvd.grouped_allreduce([one, one], op=hvd.Sum)
    with pytest.raises(tf.errors.FailedPreconditionError):
        hvd.grouped_allreduce([one] * (2 + hvd.rank()), op=hvd.Sum)


def test_a_filter_is_refused_as_each_rank_counts_by_itself() -> None:
    option = de.EmbeddingVariableOption(filter_option=de.CounterFilter(2))
    table = de.get_variable("filtered", dim=2, ev_option=option)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(de.embedding_lookup(table, tf.constant([1, 2])))
    with pytest.raises(UsageError, match="'filtered' has a filter \\(counter\\)"):
        hvd.DistributedGradientTape(tape).gradient(loss, [table.anchor])


@pytest.mark.parametrize("kind", [tf.int64, tf.string])
def test_a_broadcast_brings_the_rows_of_one_rank(kind: Any) -> None:
    """As where rank 0 alone has loaded a checkpoint. What others have goes."""
    table = de.get_variable(f"broadcast-{kind.name}", dim=2, key_dtype=kind)
    keys = ["0", "1", "2", "7"] if kind == tf.string else [0, 1, 2, 7]
    rank, optimizer = hvd.rank(), de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    for _ in range(2 - rank):  # so slots and counts of steps differ, too
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup(tf.constant(keys[rank : 3 + rank])) ** 2)
        optimizer.apply(tape.gradient(loss, [table.anchor]), [table.anchor])
    before = hvd.allgather_object(whole(table))
    hvd.broadcast_variables([table.anchor], 0)
    after = hvd.allgather_object(whole(table))
    assert before[0] != before[1] and len(before[0]) == 4
    assert after == [before[0]] * 2


def whole(table: Any) -> list[Any]:
    """The count of steps; then key, values with slots, frequency and version of each row."""
    rows = [
        (int(key), row.tobytes(), int(frequency), int(version))
        for chunk in table.stores[0].export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    ]
    return [table.stores[0].step, *sorted(rows)]


def data(rank: int, step: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(10 * step + rank)
    return draw.integers(0, 9, (BATCH, TABLES)), draw.integers(0, 2, (BATCH, 1)).astype("float32")


def dlrm(name: str, wrap: Any) -> Any:
    """Keras' layer for each feature, and the products of what it gives with the rest's."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((TABLES,), dtype="int64")
    vectors = [
        keras.layers.Dense(4)(
            Embedding(dim, seed=i, optimizer={"kind": "sgd", "lr": 0.1}, name=f"{name}-{i}")(
                ids[:, i]
            )
        )
        for i, dim in enumerate(DIMS)
    ]
    both = keras.ops.stack(vectors, 1)
    products = keras.ops.matmul(both, keras.ops.transpose(both, (0, 2, 1)))
    score = keras.layers.Dense(1)(keras.layers.Flatten()(products))
    model = keras.Model(ids, score)
    optimizer = wrap(de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def rows_of(model: Any) -> dict[tuple[int, int], Any]:
    found = {}
    tables = [layer.table for layer in model.layers if isinstance(layer, Embedding)]
    for i, table in enumerate(tables):
        keys, rows = (each.numpy() for each in table.export())
        found.update({(i, int(key)): row for key, row in zip(keys, rows, strict=True)})
    return found


def test_keras_tables_of_all_ranks_are_those_of_one_process() -> None:
    ours = dlrm("ours", hvdk.DistributedOptimizer)
    alone = dlrm("alone", lambda optimizer: optimizer)
    for step in range(STEPS):
        x, y = data(hvd.rank(), step)
        ours.train_on_batch(x, y)
        everyone = [data(rank, step) for rank in range(2)]
        alone.train_on_batch(*[np.concatenate(part) for part in zip(*everyone, strict=True)])
    found, right = rows_of(ours), rows_of(alone)
    assert len(found) > 3 * TABLES and found.keys() == right.keys()
    for key, row in right.items():
        np.testing.assert_allclose(found[key], row, rtol=1e-4, atol=1e-6)
    both = hvd.allgather_object({key: row.tobytes() for key, row in found.items()})
    assert both[0] == both[1]


def test_a_step_of_26_tables_has_two_operations_for_them() -> None:
    tables = [de.get_variable(f"count-{i}", dim=2 + i % 3) for i in range(26)]
    weight = tf.Variable(1.0)
    variables = [*[table.anchor for table in tables], weight]

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            looked = [tf.reduce_sum(de.embedding_lookup(table, ids)) for table in tables]
            loss = tf.add_n(looked) * weight
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    made = tf.function(step, autograph=False).get_concrete_function(tf.constant([1, 2, 7]))
    kinds = [op.type for op in made.graph.get_operations() if op.type.startswith("Evener")]
    assert kinds.count("EvenerAllgather") == 2
    assert kinds.count("EvenerAllreduce") == 1
    assert kinds.count("EvenerEmbeddingLookup") == 26
