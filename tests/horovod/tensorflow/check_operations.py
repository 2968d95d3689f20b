"""The operations of `horovod.tensorflow`, on each of two ranks."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

import evener.horovod.tensorflow as hvd

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64]


def of(rank: int, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    values = np.random.default_rng(rank).integers(0, 5, shape)
    return tf.cast(tf.constant(values), dtype)


def test_place() -> None:
    assert hvd.size() == 2
    assert hvd.local_size() == 2
    assert int(hvd.rank_op()) == hvd.rank() == hvd.local_rank() == int(hvd.local_rank_op())
    assert int(hvd.size_op()) == int(hvd.local_size_op()) == 2
    assert hvd.is_homogeneous()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=lambda dtype: dtype.name)
def test_reductions(dtype: tf.DType) -> None:
    for shape in ((), (0,), (7,), (3, 4, 5)):
        everyone = np.stack([tf.cast(of(r, dtype, shape), tf.float64).numpy() for r in range(2)])
        want = {
            hvd.Sum: everyone.sum(0),
            hvd.Average: everyone.mean(0),
            hvd.Min: everyone.min(0),
            hvd.Max: everyone.max(0),
            hvd.Product: everyone.prod(0),
        }
        for op, expected in want.items():
            if op == hvd.Average and dtype in INTEGERS:
                expected = np.trunc(expected)
            got = hvd.allreduce(of(hvd.rank(), dtype, shape), op=op)
            assert got.dtype == dtype
            assert got.shape == shape
            np.testing.assert_array_equal(tf.cast(got, tf.float64).numpy(), expected)


def test_integer_averages_go_toward_zero() -> None:
    mine = tf.constant([-5, 7, 11, -9]) if hvd.rank() == 0 else tf.zeros(4, tf.int32)
    assert hvd.allreduce(mine).numpy().tolist() == [-2, 3, 5, -4]


def test_factors_and_compression() -> None:
    got = hvd.allreduce(tf.ones(2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
    assert got.numpy().tolist() == [3.0, 3.0]
    small = hvd.allreduce(tf.fill([3], 1.0009765625), compression=hvd.Compression.fp16)
    assert small.dtype == tf.float32
    assert small.numpy().tolist() == [1.0009765625] * 3


def test_large_tensors_go_around_the_ring() -> None:
    mine = tf.range(300_000, dtype=tf.float32) + hvd.rank()
    got = hvd.allreduce(mine, op=hvd.Sum).numpy()
    np.testing.assert_array_equal(got, 2.0 * np.arange(300_000, dtype=np.float32) + 1)


def test_groups_of_several_types() -> None:
    mine = [tf.ones(3), tf.ones([2, 2], tf.float64), tf.fill([4], 2.0)]
    got = hvd.grouped_allreduce(mine, op=hvd.Sum)
    assert [each.numpy().ravel().tolist() for each in got] == [[2.0] * 3, [2.0] * 4, [4.0] * 4]


def test_more_operations_than_threads_in_another_order() -> None:
    """A kernel that waited would stop the graph: there are 60, and a thread or two."""

    def graph(order: list[int]) -> tf.Tensor:
        @tf.function
        def run() -> tf.Tensor:
            found = {
                i: hvd.allreduce(tf.fill([5], float(i)), op=hvd.Sum, name=f"many{i}") for i in order
            }
            return tf.stack([found[i] for i in sorted(found)])

        return run()

    order = list(range(60)) if hvd.rank() == 0 else list(range(59, -1, -1))
    got = graph(order).numpy()
    np.testing.assert_array_equal(got[:, 0], 2.0 * np.arange(60))


def test_dynamic_shapes_in_a_function() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def run(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        gathered = hvd.allgather(x, name="dynamic_gather")
        assert gathered.shape.as_list() == [None, 2]
        return gathered, hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum, name="dynamic_sum")

    for rows in (1, 3):
        gathered, total = run(tf.fill([rows + hvd.rank(), 2], 1.0))
        assert gathered.shape == (2 * rows + 1, 2)
        assert float(total) == 2.0 * (2 * rows + 1)


def test_v1_graph_and_session() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None])
        total = hvd.allreduce(x, op=hvd.Sum, name="v1")
        assert session.run(total, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]
        assert session.run(total, {x: [3.0]}).tolist() == [6.0]


def test_gather_broadcast_and_exchange() -> None:
    rank = hvd.rank()
    got = hvd.allgather(tf.fill([1 + rank, 2], rank))
    assert got.numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    first, second = hvd.grouped_allgather([tf.fill([rank], 1.0), tf.ones([1, 2])])
    assert (first.shape, second.shape) == ((1,), (2, 2))
    for root in (0, 1):
        assert hvd.broadcast(tf.constant([rank]), root).numpy().tolist() == [root]
    flags = hvd.broadcast(tf.constant([rank == 0, False]), 0)
    assert flags.numpy().tolist() == [True, False]
    big = hvd.broadcast(tf.fill([100_000], rank + 1.0), 1)
    assert float(tf.reduce_min(big)) == 2.0
    rows, received = hvd.alltoall(tf.range(3) + 10 * rank, splits=[1, 2])
    assert rows.numpy().tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
    assert received.numpy().tolist() == [rank + 1] * 2
    assert hvd.alltoall(tf.constant([rank, rank])).numpy().tolist() == [0, 1]
    part = hvd.reducescatter(tf.reshape(tf.range(6.0), [3, 2]), op=hvd.Sum)
    assert part.numpy().tolist() == ([[0.0, 2.0], [4.0, 6.0]] if rank == 0 else [[8.0, 10.0]])
    parts = hvd.grouped_reducescatter([tf.ones([2]), tf.ones([4])])
    assert [each.numpy().tolist() for each in parts] == [[1.0], [1.0, 1.0]]


def test_gradients() -> None:
    x = tf.Variable([1.0, 2.0])
    rank = hvd.rank()
    with tf.GradientTape(persistent=True) as tape:
        reduced = tf.reduce_sum(hvd.allreduce(x * (rank + 1), op=hvd.Sum) * (rank + 1.0))
        gathered = tf.reduce_sum(hvd.allgather(x) * (rank + 1.0))
        sent = tf.reduce_sum(hvd.broadcast(x, 0))
        scattered = tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum))
        swapped = tf.reduce_sum(hvd.alltoall(x) * (rank + 1.0))
    assert tape.gradient(reduced, x).numpy().tolist() == [3.0 * (rank + 1)] * 2
    assert tape.gradient(gathered, x).numpy().tolist() == [1.5, 1.5]
    assert tape.gradient(sent, x).numpy().tolist() == [1.0 - rank] * 2
    assert tape.gradient(scattered, x).numpy().tolist() == [2.0, 2.0]
    assert tape.gradient(swapped, x).numpy().tolist() == [1.0, 2.0]


def test_indexed_slices() -> None:
    mine = tf.IndexedSlices(tf.fill([1, 2], 1.0 + hvd.rank()), [hvd.rank()], [2, 2])
    got = tf.convert_to_tensor(hvd.allreduce(mine))
    assert got.numpy().tolist() == [[0.5, 0.5], [1.0, 1.0]]


def test_adasum() -> None:
    parallel = hvd.allreduce(tf.constant([2.0, 0.0]), op=hvd.Adasum)
    assert parallel.numpy().tolist() == [2.0, 0.0]
    crossed = hvd.allreduce(tf.constant([1.0 - hvd.rank(), hvd.rank()]), op=hvd.Adasum)
    assert crossed.numpy().tolist() == [1.0, 1.0]


def test_process_sets() -> None:
    rank = hvd.rank()
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([0])
    alone = hvd.ProcessSet([rank])
    alone.process_set_id = rank + 1
    assert hvd.allreduce(tf.constant(5.0), op=hvd.Sum, process_set=alone).numpy() == 5.0
    other = hvd.ProcessSet([1 - rank])
    other.process_set_id = 2 - rank
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in process set"):
        hvd.allreduce(tf.constant(5.0), process_set=other)
    other.process_set_id = 10
    with pytest.raises(ValueError, match="process set 10 does not exist"):
        hvd.allreduce(tf.constant(5.0), process_set=other)
    hvd.barrier()


def test_ranks_that_do_not_fit_together() -> None:
    rank = hvd.rank()
    for tensor, text in (
        (tf.ones([2 + rank]), "Mismatched ALLREDUCE tensor shapes"),
        (tf.cast(tf.ones([2]), tf.float32 if rank else tf.float64), "Mismatched data types"),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match=text):
            hvd.allreduce(tensor)
    with pytest.raises(tf.errors.FailedPreconditionError, match="root rank"):
        hvd.broadcast(tf.ones(2), rank)
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits"):
        hvd.alltoall(tf.ones(3), splits=[1, 1])
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2.0]


def test_join() -> None:
    if hvd.rank() == 1:
        got = hvd.allreduce(tf.ones(3), op=hvd.Sum, name="after_the_other_joined")
        assert got.numpy().tolist() == [1.0] * 3
    assert int(hvd.join()) == 1


def test_objects() -> None:
    mine = {"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()}
    assert hvd.broadcast_object(mine, root_rank=1)["rank"] == 1
    assert [each["rank"] for each in hvd.allgather_object(mine)] == [0, 1]


def test_a_frozen_schedule() -> None:
    from evener.horovod.tensorflow._state import STATE

    before = STATE.engine.frozen()[1]
    for step in range(200):
        assert float(hvd.allreduce(tf.constant(float(step)), op=hvd.Sum)) == 2.0 * step
    assert STATE.engine.frozen()[1] > before + 50


def test_init_again() -> None:
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    with pytest.raises(tf.errors.FailedPreconditionError, match="not been initialized"):
        hvd.allreduce(tf.ones(1))
    hvd.init()
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2.0]


def test_no_torch() -> None:
    assert "torch" not in sys.modules
