"""Gradients and optimizers against dense variables of TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
from evener.embedding import Store
from evener.errors import UsageError

IDS = np.array([[3, 1], [3, 7], [0, 3], [1, 1]])
TARGET = np.array([[1.0], [0.0], [2.0], [-1.0]], np.float32)


def pair(name, make, **options):
    """A table with `make`'s optimizer, and a dense variable of the same rows with another one."""
    table = de.get_variable(name, dim=4, seed=1, **options)
    same = tf.Variable(table.lookup(tf.range(8, dtype=tf.int64)))
    return table, de.DynamicEmbeddingOptimizer(make()), same, make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
        lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    ],
)
def test_steps_are_those_of_a_dense_variable(name, make):
    table, mine, same, theirs = pair(name, make)
    for _ in range(5):
        with tf.GradientTape(persistent=True) as tape:
            ours = tf.reduce_mean((tf.reduce_sum(table.lookup(IDS), [1, 2]) - TARGET[:, 0]) ** 2)
            dense = tf.reduce_mean(
                (tf.reduce_sum(tf.gather(same, IDS), [1, 2]) - TARGET[:, 0]) ** 2
            )
        slices = tape.gradient(ours, table.anchor)
        assert isinstance(slices, tf.IndexedSlices)
        mine.apply_gradients([(slices, table.anchor)])
        # Keras' own Adagrad and Ftrl do not add up equal ids of slices: they get a dense gradient.
        # A norm of slices counts equal ids apart, for either variable.
        whole = tape.gradient(dense, same)
        linear = isinstance(theirs, keras.optimizers.SGD)
        theirs.apply_gradients([(whole if linear else tf.convert_to_tensor(whole), same)])
    # Of rows that no id asks for, a dense Ftrl makes zeros.
    seen = [0, 1, 3, 7]
    np.testing.assert_allclose(table.lookup(seen), tf.gather(same, seen), rtol=2e-4, atol=2e-6)
    assert not table.anchor.numpy().any()


def test_adam_is_keras_adam_where_all_rows_are_seen(name):
    table, mine, same, theirs = pair(name, lambda: keras.optimizers.Adam(0.01))
    every = tf.range(8, dtype=tf.int64)
    for _ in range(5):
        with tf.GradientTape(persistent=True) as tape:
            ours = tf.reduce_sum((table.lookup(every) - 1.0) ** 2)
            dense = tf.reduce_sum((same - 1.0) ** 2)
        mine.apply_gradients([(tape.gradient(ours, table.anchor), table.anchor)])
        theirs.apply_gradients([(tape.gradient(dense, same), same)])
    np.testing.assert_allclose(table.lookup(every), same, rtol=1e-4, atol=1e-6)


def test_duplicates_are_summed_before_the_step(name):
    table, mine, same, theirs = pair(name, lambda: keras.optimizers.Adagrad(0.1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([3, 3, 3]) * 2.0)
    mine.apply_gradients([(tape.gradient(loss, table.anchor), table.anchor)])
    gradient = np.zeros((8, 4), np.float32)
    gradient[3] = 6.0
    theirs.apply_gradients([(tf.constant(gradient), same)])
    np.testing.assert_allclose(table.lookup([3]), same[3:4], rtol=1e-5)


def test_one_tape_over_several_lookups_and_functions(name):
    table = de.get_variable(name, dim=2, optimizer={"kind": "sgd"})
    before = table.lookup([1, 2]).numpy()

    @tf.function
    def loss(ids):
        return tf.reduce_sum(de.embedding_lookup_unique(table, ids) * 3.0)

    with tf.GradientTape() as tape:
        total = loss(tf.constant([1, 1], tf.int64)) + tf.reduce_sum(table.lookup([2]))
    table.apply_gradients(tape.gradient(total, table.anchor), learning_rate=0.5)
    np.testing.assert_allclose(table.lookup([1, 2]), before - [[3.0], [0.5]], rtol=1e-6)


def test_a_whole_step_in_a_function(name):
    table = de.get_variable(name, dim=4)
    tower = tf.Variable(tf.ones([4, 1]))
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05))
    optimizer.build([table.anchor, tower])

    @tf.function
    def step(ids, target):
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(de.embedding_lookup(table, ids), 1)
            loss = tf.reduce_mean((rows @ tower - target) ** 2)
        variables = [table.anchor, tower]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    losses = [float(step(IDS, TARGET)) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.iterations == 60 and table.size() == 4


def test_nan_gradients_change_nothing(name):
    table = de.get_variable(name, dim=2, optimizer={"kind": "adam"})
    before = table.lookup([1, 2]).numpy()
    bad = tf.IndexedSlices(tf.constant([[1.0, 1.0], [np.nan, 1.0]]), tf.constant([1, 2], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="NaN") as caught:
        table.apply_gradients(bad)
    assert name in str(caught.value)
    np.testing.assert_array_equal(table.lookup([1, 2]), before)
    with pytest.raises(UsageError, match="dense tensor"):
        table.apply_gradients(tf.zeros([2]))
    short = tf.IndexedSlices(tf.zeros([1, 3]), tf.constant([1], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"shape \[1, 2\]"):
        table.apply_gradients(short)
    np.testing.assert_array_equal(table.lookup([1, 2]), before)


def test_a_loss_scale_skips_what_is_not_finite(name):
    table = de.get_variable(name, dim=2)
    before = table.lookup([1]).numpy()
    optimizer = de.DynamicEmbeddingOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    )
    optimizer.build([table.anchor])
    for factor, changed in ((np.inf, False), (1.0, True)):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(table.lookup([1]) * factor))
        optimizer.apply([tape.gradient(loss, table.anchor)], [table.anchor])
        assert np.array_equal(table.lookup([1]), before) is not changed
    np.testing.assert_allclose(table.lookup([1]), before - 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "momentum=0.9"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad"),
        (lambda: keras.optimizers.RMSprop(), "RMSprop"),
        (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), "gradient_accumulation"),
        (lambda: keras.optimizers.Adam(use_ema=True), "use_ema"),
    ],
)
def test_optimizers_that_no_store_does_are_refused(name, make, words):
    table = de.get_variable(name, dim=2)
    with pytest.raises(UsageError, match=words):
        de.DynamicEmbeddingOptimizer(make()).build([table.anchor])


def test_a_table_may_have_a_step_of_its_own(name):
    table = de.get_variable(name, dim=2, optimizer={"kind": "lazy_adam"})
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.RMSprop(0.01))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1]))
    before = table.lookup([1]).numpy()
    optimizer.apply_gradients([(tape.gradient(loss, table.anchor), table.anchor)])
    np.testing.assert_allclose(table.lookup([1]), before - 0.01, rtol=1e-4)
    with pytest.raises(UsageError, match="int is no optimizer"):
        de.DynamicEmbeddingOptimizer(3)


def test_the_same_steps_elsewhere_give_the_same_bytes(name):
    """500 steps through TensorFlow and through the store alone, which PyTorch's door calls."""
    table = de.get_variable(name, dim=8, seed=5, optimizer={"kind": "adam", "lr": 0.01})
    plain = Store(f"{name}-plain", table.stores[0].options)

    @tf.function
    def step(ids, target, number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((de.embedding_lookup(table, ids) - target) ** 2)
        slices = tape.gradient(loss, table.anchor)
        table.apply_gradients(slices, learning_rate=0.02, step=number)

    draw = np.random.default_rng(3)
    for number in range(500):
        ids = draw.zipf(1.3, 32).astype(np.int64) % 1000
        target = draw.normal(size=(32, 8)).astype(np.float32)
        step(ids, target, tf.constant(number, tf.int64))  # a number of Python's is traced anew
        rows = plain.lookup(ids, number)
        plain.apply(ids, 2 * (rows - target), number, 0.02)

    def whole(store):
        parts = list(store.export_rows())
        keys = np.concatenate([part.keys for part in parts])
        order = np.argsort(keys)
        columns = [np.concatenate([part[i] for part in parts])[order] for i in range(1, 4)]
        return [keys[order], *columns]

    for mine, theirs in zip(whole(table.stores[0]), whole(plain), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, weight_decay=0.3),
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-5),
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-5, weight_decay=0.3),
        lambda: keras.optimizers.AdamW(0.01, epsilon=1e-5, weight_decay=0.3),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.0),
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-10),
    ],
)
def test_epsilon_and_decay_are_where_keras_has_them(name, make, scale):
    table, mine, same, theirs = pair(name, make)
    mine.build([table.anchor])
    theirs.build([same])
    every = tf.range(8, dtype=tf.int64)
    draw = np.random.default_rng(1)
    for _ in range(5):
        gradient = (scale * draw.normal(size=(8, 4))).astype(np.float32)
        mine.apply([tf.IndexedSlices(tf.constant(gradient), every)], [table.anchor])
        theirs.apply([tf.constant(gradient)], [same])
    np.testing.assert_allclose(table.lookup(every), same, rtol=1e-3, atol=1e-6)


def test_what_is_excluded_does_not_decay(name):
    table = de.get_variable(name, 1.0, dim=2)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    optimizer.exclude_from_weight_decay([table.anchor])
    optimizer.build([table.anchor])
    assert table.stores[0].options.optimizer.weight_decay == 0.0


@pytest.mark.parametrize("kind", ["Adagrad", "Ftrl"])
def test_decay_that_no_store_does_is_refused(name, kind):
    table = de.get_variable(name, dim=2)
    optimizer = getattr(keras.optimizers, kind)(0.1, weight_decay=0.1)
    with pytest.raises(UsageError, match=r"weight_decay=0\.1"):
        de.DynamicEmbeddingOptimizer(optimizer).build([table.anchor])


def test_a_class_with_a_step_of_its_own_is_refused(name):
    class Adam(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            pass

    table = de.get_variable(name, dim=2)
    with pytest.raises(UsageError, match="not a step"):
        de.DynamicEmbeddingOptimizer(Adam()).build([table.anchor])


def test_two_optimizers_with_slots_are_refused(name):
    table = de.get_variable(name, dim=2)
    pair = [de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1)) for _ in range(2)]
    for optimizer in pair:
        optimizer.build([table.anchor])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64))
    pair[1].apply([slices], [table.anchor])
    with pytest.raises(UsageError, match="two optimizers"):
        pair[0].apply([slices], [table.anchor])


def test_a_step_without_a_gradient_counts_as_in_keras(name):
    table, mine, same, theirs = pair(name, lambda: keras.optimizers.Adam(0.1))
    towers = [tf.Variable([1.0]) for _ in range(2)]
    every = tf.range(8, dtype=tf.int64)
    for optimizer, rows, tower in ((mine, table.anchor, towers[0]), (theirs, same, towers[1])):
        optimizer.build([rows, tower])
        for with_rows in (False, False, True, False, True):
            dense = tf.ones([8, 4]) * (1.0 if with_rows else 0.0)
            gradient = tf.IndexedSlices(dense, every) if rows is not same else dense
            left_out = rows is not same and not with_rows
            optimizer.apply([None if left_out else gradient, tf.ones([1])], [rows, tower])
    # The rows rest in steps without them, so only what the first of them did is the same.
    assert mine.iterations == 5
    assert table.stores[0].stats()["steps"] == 5


@pytest.mark.parametrize("in_function", [False, True])
def test_a_step_that_is_refused_changes_nothing(name, in_function):
    tables = [de.get_variable(f"{name}-{i}", dim=2) for i in range(2)]
    tower = tf.Variable([1.0])
    variables = [*(table.anchor for table in tables), tower]
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1, weight_decay=0.1))
    optimizer.build(variables)

    def step(scale):
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(table.lookup([1, 2])) for table in tables]
            loss = losses[0] + losses[1] * scale + tf.reduce_sum(tower) * scale
        optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(step) if in_function else step

    def state():
        return [
            *(table.lookup([1, 2]).numpy().tobytes() for table in tables),
            tower.numpy().tobytes(),
            int(optimizer.iterations),
        ]

    step(tf.constant(1.0))
    before = state()
    for bad in (np.nan, np.inf):
        with pytest.raises(tf.errors.InvalidArgumentError, match="nothing was changed"):
            step(tf.constant(bad))
        assert state() == before
    step(tf.constant(1.0))
    assert all(a != b for a, b in zip(state(), before, strict=True))
