"""Run by test_tensorflow.py: buckets under TensorFlow, with XLA."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from evener.compile import Options
from evener.compile.tensorflow import bucketed, keep

QUICK = Options(plan_after=4, hits=1, judge=1000, most=2)
SIZES = [20, 33, 27, 40, 31, 22, 38, 40, 25, 29]


def batch(size: int, seed: int) -> tuple[Any, Any]:
    x = np.random.default_rng(seed).normal(size=(size, 4)).astype("float32")
    return tf.constant(x), tf.constant(x.sum(1, keepdims=True))


def ready(function: Any) -> int:
    return sum(b["calls"] for said in function.report().values() for b in said["buckets"])


def why(function: Any) -> str:
    return " ".join(said["off"] for said in function.report().values())


def a_whole_step() -> None:
    """Variables, an optimizer and a mask: the same weights as without, and none of the checks'."""

    def made() -> tuple[Any, Any]:
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(1)])
        model.build((None, 4))
        optimizer = tf.keras.optimizers.Adam(0.01)

        def step(x: Any, y: Any, weights: Any) -> Any:
            with tf.GradientTape() as tape:
                each = tf.reduce_mean(tf.square(model(x) - y), 1)
                loss = tf.reduce_sum(each * weights) / tf.reduce_sum(weights)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return model, step

    plain_model, plain = made()
    model, step = made()
    step = bucketed(step, mask="weights", options=QUICK)
    for seed, size in enumerate(SIZES):
        x, y = batch(size, seed)
        wanted = plain(x, y, tf.ones([size]))
        np.testing.assert_allclose(step(x, y), wanted, rtol=1e-3)
    for a, b in zip(plain_model.variables, model.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-5)
    assert not why(step), why(step)
    assert ready(step) >= 5, step.report()


def a_forward_under_a_tape() -> None:
    """Compiled in the background; gradients of variables are those of without."""
    w = tf.Variable(tf.random.normal([4, 3], seed=1))
    made = bucketed(lambda x: tf.tanh(x @ w), name="forward", options=QUICK)
    for seed, size in enumerate(SIZES):
        x, _ = batch(size, seed)
        found = []
        for function in (lambda x: tf.tanh(x @ w), made):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(function(x)))
            found.append(tape.gradient(loss, w).numpy())
        np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-6)
        made.wait()
    assert not why(made), why(made)
    assert ready(made) >= 5


def rows_that_depend_on_each_other() -> None:
    made = bucketed(lambda x: x - tf.reduce_mean(x, 0), name="centred", options=QUICK)
    for seed, size in enumerate(SIZES[:6]):
        x, _ = batch(size, seed)
        np.testing.assert_allclose(made(x), x - tf.reduce_mean(x, 0), atol=1e-6)
        made.wait()
    assert ready(made) == 0
    assert "depends on the padding" in why(made)


def what_acts_outside() -> None:
    def prints(x: Any) -> Any:
        tf.print("")
        return x + 1

    made = bucketed(prints, options=QUICK)
    for seed, size in enumerate(SIZES[:6]):
        x, _ = batch(size, seed)
        np.testing.assert_allclose(made(x), x + 1)
    assert "PrintV2" in why(made)


def main() -> None:
    assert keep()
    a_whole_step()
    a_forward_under_a_tape()
    rows_that_depend_on_each_other()
    what_acts_outside()
    assert "torch" not in sys.modules
    print("all right")


if __name__ == "__main__":
    main()
