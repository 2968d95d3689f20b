"""The Keras layer where Keras handles it as any layer: clones, files, weights, callbacks."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import evener.embedding.tensorflow as de
from evener.embedding.tensorflow.keras import Embedding
from evener.errors import UsageError

DRAW = np.random.default_rng(2)
IDS = DRAW.choice(2**62, (32, 2), replace=False)
TARGET = DRAW.normal(size=(32, 1)).astype(np.float32)
OPTION = de.EmbeddingVariableOption(
    filter_option=de.CBFFilter(2, 1000, 0.02),
    evict_option=de.L2WeightEvict(0.01),
    evict_every=7,
    init_option=de.InitializerOption(keras.initializers.RandomNormal(0.1, 0.2, seed=5), "zeros"),
)


def model(name, optimizer=None, **options):
    inputs = keras.Input((2,), dtype="int64")
    rows = Embedding(3, combiner="sum", name=name, **options)(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1)(rows))
    made.compile(de.DynamicEmbeddingOptimizer(optimizer or keras.optimizers.Adam(0.05)), "mse")
    return made


def rows(made):
    keys, values = (x.numpy() for x in made.layers[1].table.export())
    return {key: value.tobytes() for key, value in zip(keys.tolist(), values, strict=True)}


def options_of(made):
    return made.layers[1].table.stores[0].options.to_dict()


@pytest.mark.parametrize("option", [OPTION, None])
def test_a_clone_and_a_file_have_the_options(name, tmp_path, option):
    first = model(name, ev_option=option, init_size=64)
    first.fit(IDS, TARGET, verbose=0)
    first.save(tmp_path / "m.keras")
    unknown = DRAW.choice(2**62, (4, 2))
    want = first.layers[1](tf.constant(unknown)).numpy()
    for other in (
        keras.models.clone_model(first),
        keras.models.load_model(tmp_path / "m.keras"),
        pickle.loads(pickle.dumps(first)),
    ):
        other(IDS[:1])
        for field in ("admission", "eviction", "evict_every", "missing", "init", "seed", "reserve"):
            assert options_of(other)[field] == options_of(first)[field], field
        np.testing.assert_array_equal(other.layers[1](tf.constant(unknown)), want)


def test_options_survive_json():
    parts = [
        {"filter_option": de.CounterFilter(3), "evict_option": de.GlobalStepEvict(9)},
        {"filter_option": de.ProbabilityFilter(0.5), "evict_option": de.LRUEvict(10)},
        {"storage_option": de.StorageOption("/x", 5), "evict_option": de.LFUEvict(10)},
        {"init_option": de.InitializerOption("zeros", "zeros"), "evict_every": 3},
    ]
    for given in parts:
        option = de.EmbeddingVariableOption(**given)
        back = de.EmbeddingVariableOption.from_config(option.to_config())
        assert back.options() == option.options()
    with pytest.raises(UsageError, match="'Other'"):
        de.EmbeddingVariableOption.from_config({"filter_option": {"class": "Other"}})


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl"])
def test_a_loaded_model_trains_on(name, tmp_path, kind):
    def make():
        return getattr(keras.optimizers, kind)(0.05)

    first = model(name, make())
    first.fit(IDS, TARGET, batch_size=16, shuffle=False, verbose=0)
    first.save(tmp_path / "m.keras")
    second = keras.models.load_model(tmp_path / "m.keras")
    second.compile(de.DynamicEmbeddingOptimizer(make()), "mse")
    before = rows(second)
    assert before == rows(first)
    second.fit(IDS, TARGET, batch_size=16, shuffle=False, verbose=0)
    assert all(before[key] != row for key, row in rows(second).items())


def test_a_loaded_model_needs_no_second_compile(name, tmp_path):
    first = model(name)
    given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    first.fit(IDS, TARGET, **given)
    first.save(tmp_path / "m.keras")
    second = keras.models.load_model(tmp_path / "m.keras")
    for one in (first, second):
        one.fit(IDS, TARGET, **given)
    assert rows(second) == rows(first)


def test_the_loss_scale_that_keras_adds_by_itself(name):
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        made = model(name)
        losses = made.fit(IDS, TARGET, epochs=20, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)
    assert losses[-1] < losses[0]


class Best(keras.callbacks.Callback):
    """Says that one epoch is the best, and keeps what the model was then."""

    def on_epoch_end(self, epoch, logs=None):
        logs["watched"] = abs(epoch - 1.0)
        if epoch == 1:
            self.kept = rows(self.model)


def test_early_stopping_brings_the_rows_back(name):
    made, best = model(name), Best()
    stop = keras.callbacks.EarlyStopping(
        "watched", mode="min", patience=2, restore_best_weights=True
    )
    more = DRAW.choice(2**62, (8, 2))
    made.fit(IDS, TARGET, batch_size=8, epochs=9, verbose=0, callbacks=[best, stop])
    assert rows(made) == best.kept
    made.fit(more, TARGET[:8], verbose=0)  # and it trains on


def test_a_backup_resumes_with_the_rows(name, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    whole = model(f"{name}-whole", seed=1)
    broken = model(f"{name}-broken", seed=1)
    broken.set_weights(whole.get_weights())
    given = {"batch_size": 8, "epochs": 4, "verbose": 0, "shuffle": False}
    whole.fit(IDS, TARGET, **given)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(RuntimeError, match="interrupted"):
        broken.fit(IDS, TARGET, **given, callbacks=[backup, Fails()])
    broken.layers[1].table.clear()
    broken.fit(IDS, TARGET, **given, callbacks=[backup])
    assert rows(broken) == rows(whole)


@pytest.mark.parametrize("keys", ["int64", "string"])
def test_weights_go_from_model_to_model(name, keys):
    ids = IDS if keys == "int64" else IDS.astype(str).astype(object)

    def made(suffix):
        inputs = keras.Input((2,), dtype=keys)
        found = Embedding(3, combiner="sum", key_dtype=keys, name=name + suffix)(inputs)
        one = keras.Model(inputs, keras.layers.Dense(1)(found))
        one.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1)), "mse")
        return one

    first, second = made("a"), made("b")
    ids = tf.constant(ids)
    first.fit(ids, TARGET, verbose=0)
    second.fit(ids[:4], TARGET[:4], verbose=0)
    want = first.predict(ids, verbose=0)
    weights = first.get_weights()
    first.fit(ids, TARGET, verbose=0)
    for carried in (weights, copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        second.set_weights(carried)
        np.testing.assert_array_equal(second.predict(ids, verbose=0), want)
        assert second.layers[1].table.size() == 64
    with pytest.raises(UsageError, match="hold no rows"):
        second.set_weights([0.5 * one for one in weights])


def test_slots_stay_as_they_do_in_keras(name):
    """`set_weights` moves weights alone, so the next step has the moments of the last."""
    ids = np.arange(8).reshape(4, 2)
    mine = model(name, keras.optimizers.Adagrad(0.1), seed=1)
    inputs = keras.Input((2,), dtype="int64")
    dense = keras.layers.Embedding(8, 3)
    summed = keras.layers.Lambda(lambda x: keras.ops.sum(x, -2))(dense(inputs))
    theirs = keras.Model(inputs, keras.layers.Dense(1)(summed))
    theirs.compile(keras.optimizers.Adagrad(0.1), "mse")
    mine(ids)
    start = mine.layers[1].table.lookup(np.arange(8), insert=False).numpy()
    theirs.set_weights([start, *mine.get_weights()[1:]])
    for one in (mine, theirs):
        one.fit(ids, TARGET[:4], epochs=2, verbose=0)
        kept = one.get_weights()
        one.fit(ids, TARGET[:4], epochs=2, verbose=0)
        one.set_weights(kept)
        one.fit(ids, TARGET[:4], epochs=2, verbose=0)
    found = mine.layers[1].table.lookup(np.arange(8), insert=False)
    np.testing.assert_allclose(found, dense.embeddings, rtol=1e-4, atol=1e-6)


def test_a_filter_counts_in_a_loop_of_ones_own(name):
    made = model(name, ev_option=de.EmbeddingVariableOption(filter_option=de.CounterFilter(3)))
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(made.trainable_variables)
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((made(IDS) - TARGET) ** 2)
        optimizer.apply(tape.gradient(loss, made.trainable_variables))
        assert made.layers[1].table.size() == (64 if step >= 2 else 0)
        made(IDS)  # nothing is counted where nobody trains


def test_a_whole_model_in_hdf5_is_refused(name, tmp_path):
    made = model(name)
    made.fit(IDS, TARGET, verbose=0)
    with pytest.raises(UsageError, match="would lose the rows"):
        made.save(tmp_path / "m.h5")
    made.save_weights(tmp_path / "m.weights.h5")


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_a_step_without_a_gradient_is_said_once_where_moments_decay(name, caplog, kind):
    made = model(name, getattr(keras.optimizers, kind)(0.05))
    made.fit(IDS, TARGET, verbose=0)
    anchor, *dense = made.trainable_variables
    for _ in range(2):
        gradients = [None, *(tf.ones_like(variable) for variable in dense)]
        made.optimizer.apply(gradients, [anchor, *dense])
    said = [record for record in caplog.records if "has no gradient" in record.getMessage()]
    assert len(said) == (kind == "Adam")


def test_what_would_have_no_effect_is_refused(name):
    with pytest.raises(UsageError, match="synchronous"):
        de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(), synchronous=True)
    with pytest.raises(TypeError):
        de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(), averaged=True)
    with pytest.raises(UsageError, match="steps_to_live"):
        de.get_variable(name, dim=3, steps_to_live=100)
    option = de.EmbeddingVariableOption(filter_option=de.CounterFilter(2))
    assert de.get_variable(name, dim=3, ev_option=option, bp_v2=True)
    assert de.get_variable(name, dim=3, ev_option=option) is de.get_variable(name, dim=3)
    for other in ({"ev_option": de.EmbeddingVariableOption()}, {"optimizer": {"kind": "adam"}}):
        with pytest.raises(UsageError, match="exists with"):
            de.get_variable(name, dim=3, **other)


def test_recomputation_has_no_silent_gradient(name):
    table = de.get_variable(name, dim=3)
    scale = tf.Variable(tf.ones([3]))
    lookup = tf.recompute_grad(lambda x: table.lookup(tf.constant(IDS[:, 0])) * x * scale)
    with pytest.raises(ValueError, match="IndexedSlices"), tf.GradientTape() as tape:
        tape.gradient(tf.reduce_sum(lookup(tf.ones([3]))), [table.anchor, scale])
