"""LIGHT_* on both ranks, as if each was a host of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import evener.horovod.tensorflow as hvd
import evener.horovod.tensorflow.keras as hvdk
from evener.base import log
from evener.comm.world.meeting import RendezvousError
from evener.horovod.tensorflow import light
from evener.horovod.tensorflow._state import STATE

SHAPE, STEPS = (64, 64), 5


def value(rank: int, name: int) -> Any:
    """Small whole numbers: their sums are exact in any order, in float16 too."""
    return (np.arange(64 * 64).reshape(SHAPE) * 7 + 3 * rank + name) % 11 - 5.0


@pytest.fixture(scope="module")
def topk() -> Iterator[None]:
    """The world anew, with top-k."""
    given = {
        "NCCL_HOSTID": f"host{hvd.rank()}",
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_RATIO": "0.25",
        "LIGHT_TOPK_THRESHOLD": "1024",
        "LIGHT_2D_ALLREDUCE": "1",
    }
    hvd.shutdown()
    os.environ.update(given)
    hvd.init()
    yield
    hvd.shutdown()
    for name in given:
        del os.environ[name]
    hvd.init()


def sent() -> int:
    return STATE.engine.lightened()[1]


@pytest.mark.parametrize(
    "graph,options",
    [
        (False, {}),
        (True, {}),
        (True, {"compression": hvd.Compression.fp16}),
        (True, {"groups": 1}),
    ],
)
def test_what_is_owed_arrives(topk: None, graph: bool, options: dict[str, Any]) -> None:
    """A gradient, and then zeros: a quarter of the entries arrives per step, and all in the end.

    Two variables of one shape: what is kept back of one does not arrive at the other.
    """
    variables = [tf.Variable(tf.zeros(SHAPE)), tf.Variable(tf.zeros(SHAPE)), tf.Variable([0.0])]

    def gradients(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[2] * factor)
            for name, variable in enumerate(variables[:2]):
                mine = tf.constant(value(hvd.rank(), name), tf.float32)
                loss += tf.reduce_sum(variable * mine * factor)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **options)
        return tape.gradient(loss, variables)

    step = tf.function(gradients) if graph else gradients
    totals = [np.zeros(SHAPE), np.zeros(SHAPE)]
    before = sent()
    for number in range(STEPS):
        *got, bias = step(tf.constant(1.0 if number == 0 else 0.0))
        # One dimension: it is sent whole.
        assert bias.numpy().tolist() == [2.0 if number == 0 else 0.0]
        for total, each in zip(totals, got, strict=True):
            assert np.count_nonzero(each) <= 64 * 64 // 2, number  # a quarter of each rank's
            total += each.numpy()
    for name, total in enumerate(totals):
        np.testing.assert_array_equal(total, value(0, name) + value(1, name))
        first, second = hvd.allgather_object(total)
        np.testing.assert_array_equal(first, second)
    assert sent() - before == 2 * STEPS


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_the_guard(topk: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What uses a tape's gradients is looked for: under Adam they go whole from the sixth step on.

    Rank 1 alone has Adam: all ranks must decide the same.
    """
    monkeypatch.setattr(light, "_looked", None)
    monkeypatch.setattr(light, "_optimizer_classes", lambda: {type(optimizer)})
    optimizer = getattr(tf.keras.optimizers, kind if hvd.rank() else "SGD")()
    assert light.is_linear(hvd.DistributedOptimizer(optimizer)) == light.is_linear(optimizer)
    variable = tf.Variable(tf.zeros(SHAPE))
    mine = tf.constant(value(hvd.rank(), 0), tf.float32)
    total, before = np.zeros(SHAPE), sent()
    for step in range(1, 9):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * mine)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        total += tape.gradient(loss, [variable])[0].numpy()
        exact = np.array_equal(total, step * (value(0, 0) + value(1, 0)))
        assert exact == (kind == "Adam" and step >= 6), step
    assert sent() - before == (6 if kind == "Adam" else 8)
    mark = max(light._NAMES)
    assert "Variable:0 falls back from top-k to exact" in light.fell(mark, 6, 1.5, 0.25)


def test_all_optimizers_of_the_process_are_found(topk: None) -> None:
    optimizers = [tf.keras.optimizers.Adam(), tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)]
    assert {type(each) for each in optimizers} <= light._optimizer_classes()
    assert [light.is_linear(each) for each in optimizers] == [False, True]


def test_what_is_no_gradient_arrives_whole(topk: None) -> None:
    mine = tf.constant(value(hvd.rank(), 0), tf.float32)
    before = sent()
    whole = hvd.allreduce(mine, op=hvd.Sum, name="metric").numpy()
    np.testing.assert_array_equal(whole, value(0, 0) + value(1, 0))
    assert sent() == before


def test_keras_learns_with_topk(topk: None) -> None:
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([tf.keras.layers.Dense(64, "tanh"), tf.keras.layers.Dense(1)])
    model.build((None, 64))
    optimizer = hvdk.DistributedOptimizer(tf.keras.optimizers.SGD(0.05))
    # As scripts for Keras 2 say it: the argument is left out.
    model.compile(optimizer, "mse", experimental_run_tf_function=False)
    x = np.random.default_rng(hvd.rank()).normal(size=(256, 64)).astype("float32")
    before = sent()
    losses = model.fit(x, x[:, :1] * 2, batch_size=32, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0], losses
    assert sent() - before == 32
    flat = np.concatenate([np.ravel(each) for each in model.get_weights()])
    first, second = hvd.allgather_object(flat)
    np.testing.assert_array_equal(first, second)


def test_what_cannot_be_is_named(
    topk: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings that differ, a class of the script's own, what is for torch alone."""
    told = [{**light.said(), "host": f"host{rank // 2}"} for rank in range(4)]
    planned = light.plan(1, told)
    assert planned is not None
    assert (planned["inner"], planned["outer"]) == ([0, 1], [1, 3])
    # 2 + 1: rank 1 owns no shard.
    ways = [light.plan(rank, [*told[:2], told[3]]) for rank in range(3)]
    assert [way and way["outer"] for way in ways] == [[0, 2], [1], [0, 2]]
    assert all(way and way["sizes"] == [2, 1] for way in ways)
    other = {**told[0], "light": {**told[0]["light"], "LIGHT_TOPK_RATIO": 0.5}}
    with pytest.raises(RendezvousError, match=r"LIGHT_TOPK_RATIO is 0\.25 on rank 0 and 0\.5 on"):
        light.plan(0, [*told[:3], other])

    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(logging.getLogger("evener"), "propagate", True)
    monkeypatch.setenv("EVENER_GUARD_COSINE", "0.5")
    variable = tf.Variable([[1.0]])
    with caplog.at_level(logging.DEBUG, "evener"):
        light.plan(0, told)
        assert light.marked([variable], hvd.Compression.bf16, hvd.Sum, True)[0] == 0
        assert light.marked([variable], hvd.Compression.none, hvd.Sum, False)[0] == 0
        assert light.marked([variable], hvd.Compression.none, hvd.Adasum, True)[0] == 0
    said = " ".join(record.getMessage() for record in caplog.records)
    for word in ("EVENER_GUARD_COSINE", "BF16Compressor", "process set", "Adasum"):
        assert word in said, said
