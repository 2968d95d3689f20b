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


MIXED = {
    "mean": lambda x: x - tf.reduce_mean(x, 0),
    "largest": lambda x: x / (1 + tf.abs(tf.reduce_max(x, 0))),
    "softmax": lambda x: tf.nn.softmax(x, 0),
    "from the end": lambda x: tf.cumsum(x, 0, reverse=True),
    "number of rows": lambda x: x / tf.cast(tf.shape(x)[0], tf.float32),
    "number in Python": lambda x: x / x.shape[0],
    "next row": lambda x: x + tf.roll(x, -1, 0),
    "sorted": lambda x: tf.sort(x, 0),
    "a branch on the first row": lambda x: tf.cond(
        x[0, 0] > -1, lambda: 2 * x, lambda: x - tf.reduce_mean(x, 0)
    ),
    "a loop on the first row": lambda x: tf.while_loop(
        lambda y: tf.abs(y[0, 0]) > 2,
        lambda y: (y - tf.reduce_mean(y, 0) + y / 2,),
        (x,),
        maximum_iterations=3,
    )[0],
    "a branch": lambda x: tf.cond(tf.reduce_min(x) < -1e3, lambda: x, lambda: 2 * x),
}
APART = {
    "row by row": lambda x: tf.nn.relu(x @ tf.ones([4, 3])),
    "from the start": lambda x: tf.cumsum(x, 0),
    "a loop over rows": lambda x: tf.map_fn(lambda row: 2 * row, x),
    "a branch on the shape": lambda x: tf.cond(tf.shape(x)[1] > 3, lambda: x, lambda: -x),
    "of numbers above zero": lambda x: tf.math.log(tf.abs(x)) + tf.sqrt(tf.abs(x)),
}


def a_full_first_batch() -> None:
    """One row of padding in 512 hides what rows have to do with each other."""
    quick = Options(plan_after=4, hits=1, judge=10_000, most=2, background=False)
    draw = np.random.default_rng(3)
    for name, function in {**MIXED, **APART}.items():
        made = bucketed(function, name=name, options=quick, record=False)
        for size in [512] * 5 + [300, 511, 400, 512]:
            x = tf.constant(draw.normal(size=(size, 4)), tf.float32)
            np.testing.assert_allclose(made(x), function(x), rtol=1e-4, atol=1e-5, err_msg=name)
        assert (ready(made) > 0) is (name in APART), (name, why(made))


def random_numbers() -> None:
    made = bucketed(lambda x: x - tf.reduce_mean(x, 0) + tf.random.normal([1]), options=QUICK)
    for seed, size in enumerate(SIZES):
        made(batch(size, seed)[0])
    assert ready(made) == 0 and "random numbers" in why(made)


def two_kinds_of_calls() -> None:
    """Calls with the same sizes and other outputs: each is cut as it must be."""

    def function(x: Any, both: bool = False) -> Any:
        return (tf.zeros([3]), x + 1) if both else (x + 1, tf.zeros([3]))

    made = bucketed(function, options=QUICK)
    for seed, size in enumerate(SIZES * 2):
        x, _ = batch(size, seed)
        for both in (False, True):
            for found, right in zip(made(x, both), function(x, both), strict=True):
                np.testing.assert_allclose(found, right)
        made.wait()
    assert ready(made) >= 5, made.report()


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
    a_full_first_batch()
    random_numbers()
    two_kinds_of_calls()
    what_acts_outside()
    assert "torch" not in sys.modules
    print("all right")


if __name__ == "__main__":
    main()
