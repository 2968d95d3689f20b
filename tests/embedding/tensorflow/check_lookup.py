"""Lookups against dense variables and TensorFlow's own functions."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
from evener.errors import UsageError


def dense(table: de.DynamicVariable, ids: int) -> tf.Tensor:
    """The rows 0 to ids - 1 as one matrix."""
    return table.lookup(tf.range(ids, dtype=tf.int64), insert=False)


def test_torch_is_not_imported(name):
    assert "torch" not in sys.modules


def test_the_name_of_the_mission(name):
    table = tf.dynamic_embedding.get_variable(
        name, tf.keras.initializers.Constant(0.5), 4, ["/CPU:0"], init_size=8
    )
    rows = tf.dynamic_embedding.embedding_lookup(table, [3, 7], "rows")
    np.testing.assert_array_equal(rows, np.full((2, 4), 0.5))
    assert table.size() == 2


def test_all_of_int64_is_keys(name):
    table = de.get_variable(name, dim=3)
    extremes = [-(2**63), 2**63 - 1, 0, -1]
    first = de.embedding_lookup(table, extremes)
    assert table.size() == 4
    np.testing.assert_array_equal(first, de.embedding_lookup(table, extremes))
    assert len({tuple(row) for row in first.numpy()}) == 4


def test_rows_depend_on_seed_and_key_alone(name):
    one = de.get_variable(f"{name}a", dim=4, seed=7)
    two = de.get_variable(f"{name}b", dim=4, seed=7)
    keys = np.arange(50)
    backwards = de.embedding_lookup(two, keys[::-1].copy())
    np.testing.assert_array_equal(de.embedding_lookup(one, keys), backwards[::-1])
    other = de.get_variable(f"{name}c", dim=4, seed=8)
    assert not np.array_equal(de.embedding_lookup(other, keys), de.embedding_lookup(one, keys))


def test_inference_adds_no_row(name):
    table = de.get_variable(name, dim=4)
    with de.inference():
        before = de.embedding_lookup(table, [1, 2])
    de.embedding_lookup(table, [3], insert=False)
    assert table.size() == 0
    np.testing.assert_array_equal(before, de.embedding_lookup(table, [1, 2]))
    assert table.size() == 2
    frozen = de.get_variable(f"{name}f", dim=4, trainable=False)
    de.embedding_lookup(frozen, [1])
    assert frozen.size() == 0


def test_shapes_are_static_in_graphs(name):
    table = de.get_variable(name, dim=5)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def rows(ids):
        found = de.embedding_lookup(table, ids)
        assert found.shape.as_list() == [None, 3, 5]
        assert de.embedding_lookup_unique(table, ids).shape.as_list() == [None, 3, 5]
        return found

    assert rows([[1, 2, 3], [4, 5, 6]]).shape == [2, 3, 5]


def test_unique_is_the_same_rows(name):
    table = de.get_variable(name, dim=4)
    ids = [[5, 5], [1, 5]]
    np.testing.assert_array_equal(
        de.embedding_lookup_unique(table, ids), de.embedding_lookup(table, ids)
    )


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_is_what_tensorflow_gives(name, combiner, weighted):
    table = de.get_variable(name, dim=4)
    ids = tf.SparseTensor(
        [[0, 0], [0, 2], [1, 0], [3, 1]], tf.constant([2, 5, 2, 9], tf.int64), [4, 3]
    )
    weights = tf.SparseTensor(ids.indices, [0.5, 2.0, 3.0, 1.5], [4, 3]) if weighted else None
    mine = de.embedding_lookup_sparse(table, ids, weights, combiner=combiner, max_norm=0.08)
    theirs = tf.nn.embedding_lookup_sparse(
        dense(table, 10), ids, weights, combiner=combiner, max_norm=0.08
    )
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    group = de.group_embedding_lookup_sparse(
        [table, table], [ids, ids], [combiner, "sum"], [weights, weights]
    )
    np.testing.assert_allclose(
        group[0],
        tf.nn.embedding_lookup_sparse(dense(table, 10), ids, weights, combiner=combiner),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("default", [None, 6])
@pytest.mark.parametrize("weighted", [False, True])
def test_safe_sparse_is_what_tensorflow_gives(name, default, weighted):
    table = de.get_variable(name, dim=4)
    ids = tf.SparseTensor(
        [[0, 0, 0], [0, 0, 2], [1, 1, 0], [1, 1, 1]], tf.constant([2, 5, 2, 9], tf.int64), [2, 2, 3]
    )
    weights = tf.SparseTensor(ids.indices, [0.5, 2.0, 3.0, -1.0], [2, 2, 3]) if weighted else None
    mine = de.safe_embedding_lookup_sparse(table, ids, weights, default_id=default)
    theirs = tf.nn.safe_embedding_lookup_sparse(dense(table, 10), ids, weights, default_id=default)
    assert mine.shape.as_list() == [2, 2, 4]
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_strings_never_collide(name):
    table = de.get_variable(name, dim=4, key_dtype=tf.string)
    words = tf.constant([f"feature:{i}" for i in range(2000)] + ["", "x" * 100, "é"])
    rows = de.embedding_lookup(table, words)
    assert table.size() == 2003 and len({tuple(r) for r in rows.numpy()}) == 2003
    np.testing.assert_array_equal(rows[::-1], de.embedding_lookup(table, words[::-1]))
    sparse = tf.sparse.from_dense(tf.constant([["feature:1", ""], ["", "feature:7"]]))
    combined = de.embedding_lookup_sparse(table, sparse, combiner="sum")
    np.testing.assert_array_equal(combined, tf.gather(rows, [1, 7]))


def test_half_tables_give_half_rows(name):
    table = de.get_variable(name, dim=4, value_dtype=tf.bfloat16)
    assert de.embedding_lookup(table, [1]).dtype == tf.bfloat16
    sparse = tf.sparse.from_dense(tf.constant([[1, 2]], tf.int64))
    assert de.embedding_lookup_sparse(table, sparse).dtype == tf.bfloat16


def test_several_devices_hold_parts(name):
    table = de.get_variable(name, dim=4, devices=["/CPU:0", "/CPU:0", "/CPU:0"], seed=1)
    one = de.get_variable(f"{name}one", dim=4, seed=1)
    ids = tf.constant([[-7, 1, 2], [3, 2**40, 1]], tf.int64)
    np.testing.assert_array_equal(de.embedding_lookup(table, ids), de.embedding_lookup(one, ids))
    assert table.size() == 5 and len(table.stores) == 3
    assert all(0 < len(store) < 5 for store in table.stores)
    table.upsert([1, 2], [[1.0] * 4, [2.0] * 4])
    np.testing.assert_array_equal(de.embedding_lookup(table, [2, 1])[:, 0], [2.0, 1.0])
    assert table.remove([1, 2, 99]) == 2 and table.size() == 3


def test_upsert_remove_clear_export(name):
    table = de.get_variable(name, dim=2)
    table.upsert([5, 6, 5], [[1, 1], [2, 2], [3, 3]])
    keys, rows = table.export()
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys.numpy()[order], [5, 6])
    np.testing.assert_array_equal(rows.numpy()[order], [[3, 3], [2, 2]])
    assert table.remove([6, 7]) == 1
    table.clear()
    assert table.size() == 0


def test_counter_filter_lets_keys_in_late(name):
    table = de.get_variable(
        name, dim=2, ev_option=de.EmbeddingVariableOption(filter_option=de.CounterFilter(3))
    )
    for expected in (0, 0, 1):
        de.embedding_lookup(table, [9])
        assert table.size() == expected


def test_storage_option_keeps_most_rows_in_a_file(name, tmp_path):
    option = de.EmbeddingVariableOption(
        storage_option=de.StorageOption(str(tmp_path), rows_in_memory=640)
    )
    table = de.get_variable(name, "normal", dim=4, ev_option=option)
    first = de.embedding_lookup(table, tf.range(500, dtype=tf.int64))
    for start in range(500, 5000, 500):
        de.embedding_lookup(table, tf.range(start, start + 500, dtype=tf.int64))
    stats = table.stores[0].stats()
    assert stats["rows"] == 5000 and stats["cold_rows"] >= 5000 - 640 - 500
    np.testing.assert_array_equal(first, de.embedding_lookup(table, tf.range(500, dtype=tf.int64)))
    with pytest.raises(UsageError, match="rows_in_memory"):
        de.StorageOption("cold").options()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (tf.constant([1.5]), "float32"),
        (tf.constant(["a"]), "string"),
        ([[1, 2], [3]], "no tensor"),
        (tf.ragged.constant([[1, 2], [3]]), "ragged"),
        (tf.sparse.from_dense([[1, 2]]), "sparse"),
    ],
)
def test_ids_that_cannot_be_are_refused(name, ids, words):
    table = de.get_variable(name, dim=2)
    with pytest.raises(UsageError, match=words) as caught:
        de.embedding_lookup(table, ids)
    assert name in str(caught.value) and caught.value.fix
    assert table.size() == 0


def test_arguments_that_cannot_be_are_refused(name):
    with pytest.raises(UsageError, match="dim None"):
        de.get_variable(name)
    with pytest.raises(UsageError, match="colour"):
        de.get_variable(name, dim=2, colour=3)
    with pytest.raises(UsageError, match="float64"):
        de.get_variable(name, dim=2, value_dtype=tf.float64)
    with pytest.raises(UsageError, match="Orthogonal"):
        de.get_variable(name, tf.keras.initializers.Orthogonal(), dim=2)
    table = de.get_variable(name, dim=2)
    with pytest.raises(UsageError, match="exists with dim 2"):
        de.get_variable(name, dim=3)
    assert de.get_variable(name, dim=2) is table
    with pytest.raises(UsageError, match="combiner 'max'"):
        de.embedding_lookup_sparse(table, tf.sparse.from_dense([[1]]), combiner="max")
    with pytest.raises(UsageError, match="Tensor"):
        de.embedding_lookup(tf.zeros([3, 2]), [1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be of shape \[1, 2\]"):
        table.upsert([1], [[1.0, 2.0, 3.0]])
    assert table.size() == 0
