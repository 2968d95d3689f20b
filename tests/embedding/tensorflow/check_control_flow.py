"""Lookups inside of branches, loops and functions: the gradient is that of a lookup outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de

IDS = np.array([5, -(2**61), 7, 5, 2**60, 0], np.int64)
DRAW = np.random.default_rng(4)
WEIGHTS = DRAW.normal(size=(6, 3)).astype(np.float32)


def plain(table, ids, w):
    return tf.reduce_sum(table.lookup(ids) * w)


def in_cond(table, ids, w):
    return tf.cond(tf.size(ids) > 0, lambda: plain(table, ids, w), lambda: tf.constant(0.0))


def in_switch(table, ids, w):
    zero = lambda: tf.constant(0.0)  # noqa: E731
    return tf.switch_case(tf.size(ids) - 5, [zero, lambda: plain(table, ids, w)])


def in_loop(table, ids, w):
    def body(i, total):
        return i + 1, total + plain(table, ids[2 * i : 2 * i + 2], w[2 * i : 2 * i + 2])

    return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), tf.constant(0.0)))[1]


def in_map(table, ids, w):
    given = (ids, w)
    return tf.reduce_sum(
        tf.map_fn(
            lambda x: tf.reduce_sum(table.lookup(x[0]) * x[1]),
            given,
            fn_output_signature=tf.float32,
        )
    )


def in_cond_in_loop(table, ids, w):
    def body(i, total):
        part = tf.cond(
            i % 2 == 0,
            lambda: plain(table, ids[i : i + 1], w[i : i + 1]),
            lambda: in_loop(table, tf.repeat(ids[i], 6), tf.repeat(w[i : i + 1] / 6, 6, 0)),
        )
        return i + 1, total + part

    return tf.while_loop(lambda i, _: i < 6, body, (tf.constant(0), tf.constant(0.0)))[1]


def in_and_outside(table, ids, w):
    return in_cond(table, ids[:2], w[:2]) + plain(table, ids[2:], w[2:])


WAYS = [plain, in_cond, in_switch, in_loop, in_map, in_cond_in_loop, in_and_outside]


def wanted() -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for key, gradient in zip(IDS.tolist(), WEIGHTS, strict=True):
        found[key] = found.get(key, 0.0) + gradient
    return found


def check(table, steps, rate=0.5):
    assert table.size() == 5
    for key, gradient in wanted().items():
        row = table.lookup(np.array([key]), insert=False)[0]
        np.testing.assert_allclose(row, -rate * steps * gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_tape_in_the_function(name, way, parts):
    table = de.get_variable(name, 0.0, dim=3, devices=["CPU:0"] * parts)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table.anchor])

    @tf.function
    def step(ids, w):
        with tf.GradientTape() as tape:
            loss = way(table, ids, w)
        slices = tape.gradient(loss, table.anchor)
        assert isinstance(slices, tf.IndexedSlices)
        optimizer.apply_gradients([(slices, table.anchor)])

    step(tf.constant(IDS), tf.constant(WEIGHTS))
    step(tf.constant(IDS), tf.constant(WEIGHTS))
    check(table, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_tape_around_the_function(name, way):
    table = de.get_variable(name, 0.0, dim=3, optimizer={"kind": "sgd"})
    loss_of = tf.function(lambda ids, w: way(table, ids, w))
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = loss_of(tf.constant(IDS), tf.constant(WEIGHTS))
        table.apply_gradients(tape.gradient(loss, table.anchor), learning_rate=0.5)
    check(table, 2)


@pytest.mark.parametrize("way", [plain, in_cond, in_loop])
def test_a_tape_in_a_loop(name, way):
    """Whole steps in the loop of a function, as in `for batch in dataset`."""
    table = de.get_variable(name, 0.0, dim=3)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table.anchor])

    @tf.function
    def steps(ids, w):
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                loss = way(table, ids, w)
            optimizer.apply([tape.gradient(loss, table.anchor)], [table.anchor])

    steps(tf.constant(IDS), tf.constant(WEIGHTS))
    check(table, 4)


def test_a_gradient_of_something_else_leaves_nothing_behind(name):
    table = de.get_variable(name, 0.0, dim=3, optimizer={"kind": "sgd"})
    scale = tf.Variable(2.0)

    @tf.function
    def both(ids, w):
        with tf.GradientTape(persistent=True) as tape:
            loss = in_loop(table, ids, w * scale)
        return tape.gradient(loss, scale), tape.gradient(loss, table.anchor)

    for _ in range(2):
        _, slices = both(tf.constant(IDS), tf.constant(WEIGHTS))
        assert slices.values.shape == [6, 3]
        table.apply_gradients(slices, learning_rate=0.25)
    check(table, 2)


def test_a_filter_counts_what_a_loop_of_ones_own_trains(name):
    for way in (plain, in_cond):
        option = de.EmbeddingVariableOption(filter_option=de.CounterFilter(3))
        table = de.get_variable(f"{name}-{way.__name__}", 0.0, dim=3, ev_option=option)
        sizes = []
        for _ in range(4):
            with tf.GradientTape() as tape, de.inference():
                loss = tf.function(lambda ids, w, way=way, t=table: way(t, ids, w))(
                    tf.constant(IDS), tf.constant(WEIGHTS)
                )
            table.apply_gradients(tape.gradient(loss, table.anchor), learning_rate=0.5)
            sizes.append(int(table.size()))
        assert sizes == [0, 1, 5, 5]  # one key comes twice in each batch
