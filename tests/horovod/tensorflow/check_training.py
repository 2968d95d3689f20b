"""Tapes, optimizers, Keras and elastic states, on each of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import evener.horovod.tensorflow as hvd
import evener.horovod.tensorflow.keras as hvdk


def rank_data(rows: int = 8) -> tuple[Any, Any]:
    generator = np.random.default_rng(hvd.rank())
    x = generator.normal(size=(rows, 3)).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5]], "float32")


def dense(seed: int = 0) -> Any:
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build((None, 3))
    return model


def same_on_both(values: list[Any]) -> None:
    flat = np.concatenate([np.ravel(value) for value in values])
    first, second = hvd.allgather_object(flat)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("graph", [False, True])
def test_tape(graph: bool) -> None:
    weight, rows, unused = tf.Variable([2.0]), tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)
    rank = hvd.rank()

    def step() -> Any:
        with tf.GradientTape() as tape:
            picked = tf.gather(rows, [rank, 3])
            loss = weight[0] * (rank + 1.0) + tf.reduce_sum(picked)
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [weight, rows, unused])

    first, second, third = (tf.function(step) if graph else step)()
    assert first.numpy().tolist() == [1.5]
    assert isinstance(second, tf.IndexedSlices)
    dense_rows = tf.convert_to_tensor(second).numpy()[:, 0].tolist()
    assert dense_rows == [0.5, 0.5, 0.0, 1.0]
    assert third is None


def test_groups_dense_and_predivide() -> None:
    variables = [tf.Variable([float(i)]) for i in range(5)]
    for groups in (2, [variables[:2], variables[3:]]):
        with tf.GradientTape() as tape:
            loss = tf.add_n([v[0] * (hvd.rank() + i) for i, v in enumerate(variables)])
        tape = hvd.DistributedGradientTape(tape, groups=groups, gradient_predivide_factor=2.0)
        got = tape.gradient(loss, variables)
        assert [each.numpy()[0] for each in got] == [i + 0.5 for i in range(5)]
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)


def test_local_layers_stay_local() -> None:
    near, far = tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)
    x = tf.ones([1, 1]) * (1.0 + hvd.rank())
    near(x), far(x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(near(x) + far(x))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=near)
    mine, ours = tape.gradient(loss, [near.kernel.value, far.kernel.value])
    assert ours.numpy()[0, 0] == 1.5
    assert mine.numpy()[0, 0] == (1.0 + hvd.rank()) / 2


@pytest.mark.parametrize("make", [lambda step: step, tf.function], ids=["eager", "graph"])
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(make: Any) -> None:
    """Else gradients of this rank's next step would meet the others' of this one."""
    inner = hvdk.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)
    weight = tf.keras.Variable(1.0)
    optimizer.build([weight])
    step = make(lambda gradient: optimizer.apply([gradient], [weight]))
    step(tf.constant(float("inf") if hvd.rank() else 2.0))
    assert float(optimizer.dynamic_scale) == 1.0
    step(tf.constant(float(hvd.rank() + 1)))
    assert int(optimizer.iterations) == 1
    assert float(weight) == 1.0 - 1.5


def test_operations_of_keras_give_tensors() -> None:
    rank = float(hvd.rank())
    assert hvdk.allreduce(np.float32(rank)).numpy() == 0.5
    assert hvdk.allgather([rank]).numpy().tolist() == [0.0, 1.0]
    assert hvdk.broadcast([rank], 1).numpy().tolist() == [1.0]
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
        assert hvdk.allreduce(tf.constant(rank), op=hvd.Sum) == 1.0


def test_an_optimizer_with_local_layers() -> None:
    near, far = tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)
    with pytest.raises(ValueError, match="build the model first"):
        hvdk.PartialDistributedOptimizer(tf.keras.optimizers.SGD(1.0), local_layers=near)
    near.build((None, 1)), far.build((None, 1))
    for layer in (near, far):
        layer.kernel.assign([[0.0]])
    optimizer = hvdk.PartialDistributedOptimizer(tf.keras.optimizers.SGD(1.0), local_layers=[near])
    mine = tf.constant([[1.0 + hvd.rank()]])
    optimizer.apply([mine, mine], [near.kernel, far.kernel])
    assert far.kernel.numpy()[0, 0] == -1.5
    assert near.kernel.numpy()[0, 0] == -(1.0 + hvd.rank()) / 2


def test_fit_is_the_same_as_one_process_on_all_data(tmp_path: Path) -> None:
    x, y = rank_data()
    model = dense(seed=hvd.rank())  # not the same before the broadcast
    model.compile(hvdk.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
    hvd.broadcast_variables(model.variables, 0)
    begin = [v.copy() for v in model.get_weights()]
    callbacks = [
        hvdk.callbacks.BroadcastGlobalVariablesCallback(0),
        hvdk.callbacks.MetricAverageCallback(),
        hvdk.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, steps_per_epoch=1),
    ]
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    same_on_both(model.get_weights())
    same_on_both(history.history["loss"])
    # Alone, with both ranks' data, and the rates that the warm-up gave.
    alone = dense()
    alone.set_weights(begin)
    alone.compile(tf.keras.optimizers.SGD(0.1), "mse")
    everyone = [np.concatenate(each) for each in zip(*hvd.allgather_object((x, y)), strict=True)]
    for rate in history.history["lr"]:
        alone.optimizer.learning_rate = rate
        alone.train_on_batch(*everyone)
    assert history.history["lr"][-1] == pytest.approx(0.1)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    if hvd.rank() == 0:
        model.save(tmp_path / "model.keras")
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), 0)
    loaded = hvdk.load_model(path)
    assert loaded.optimizer.apply.__func__ is model.optimizer.apply.__func__
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes(average: bool) -> None:
    weight = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    step = tf.function(lambda g: optimizer.apply([g], [weight]))
    seen = []
    for _ in range(4):
        step(tf.constant([1.0 + 2 * hvd.rank()]))
        seen.append(float(weight[0]))
    each = -2.0 if average else -4.0
    assert seen == [0.0, each, each, 2 * each]


def test_v1_optimizers() -> None:
    v1 = tf.compat.v1
    for passes in (1, 2):
        with tf.Graph().as_default(), v1.Session() as session:
            weight = v1.get_variable("w", initializer=[1.0 + hvd.rank()])
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=passes
            )
            train = optimizer.minimize(weight[0] * (1.0 + hvd.rank()))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(hvd.broadcast_global_variables(0))
            assert session.run(weight).tolist() == [1.0]
            for _ in range(passes):
                session.run(train)
            assert session.run(weight).tolist() == [1.0 - 1.5 * passes]


def test_adasum_optimizer() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=[0.0, 0.0])
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
        train = optimizer.minimize(-weight[hvd.rank()])
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert session.run(weight).tolist() == [1.0, 1.0]


def test_sync_batch_norm() -> None:
    layer = hvd.SyncBatchNormalization(epsilon=1e-5)
    rank = hvd.rank()
    mine = tf.constant(np.random.default_rng(rank).normal(size=(3 + rank, 2)).astype("float32"))
    everyone = tf.concat(hvd.allgather_object(mine.numpy()), 0).numpy()
    got = layer(mine, training=True).numpy()
    want = (mine - everyone.mean(0)) / np.sqrt(everyone.var(0) + 1e-5)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_elastic_states() -> None:
    model = dense(seed=hvd.rank())
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    state = hvd.elastic.TensorFlowKerasState(model, epoch=hvd.rank())
    state.sync()
    same_on_both(model.get_weights())
    assert state.epoch == 0
    kept = [value.copy() for value in model.get_weights()]
    state.commit()
    model.set_weights([value + 1 for value in kept])
    state.epoch = 7
    state.restore()
    assert state.epoch == 0
    for ours, before in zip(model.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(ours, before)
    variables = [tf.Variable(float(hvd.rank()))]
    plain = hvd.elastic.TensorFlowState(variables, batch=3)
    plain.sync()
    assert float(variables[0]) == 0.0
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(state.batch)
        if len(calls) == 1:
            state.batch = 9
            raise hvd.HorovodInternalError("a rank has failed")
        return "done"

    assert train(plain) == "done"
    assert calls == [3, 3]
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2.0]
