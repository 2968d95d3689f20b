"""Tables in TensorFlow and Keras, beside a dense variable that plain Keras steps.

A program picks an optimizer, and then trains: in eager mode, in branches and loops of functions,
with steps that leave the table out or that are refused, with weights that are kept and set again,
files, clones. The reference is a dense variable of all ids, with the same optimizer of Keras. Adam
and Ftrl see all ids in each step, because Keras moves rows that a step does not see. Keys that
an admission filter has not let in are a matter of counting, which the reference does in a dict.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import evener.embedding.tensorflow as de
from evener.embedding.tensorflow import _gradients, _optimizer, _stores, _variable, _weights
from evener.embedding.tensorflow.keras import Embedding
from tests.twins.harness import Program, Twin

ROWS, DIM = 6, 3
KEYS = np.array([3, -(2**62), 2**61, 0, 17, -1], np.int64)
# These move or decay rows that a step does not see, so each step sees all.
WHOLE = ("Adam", "AdamW", "Ftrl")
WAYS = ("eager", "eager", "function", "cond", "loop", "map", "nested")


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program."""
    kind = draw(st.sampled_from(["SGD", "Adagrad", *WHOLE]))
    options: dict[str, Any] = {"learning_rate": draw(st.sampled_from([0.01, 0.1, 0.5]))}
    if kind in ("Adam", "AdamW", "Adagrad"):
        options["epsilon"] = draw(st.sampled_from([1e-7, 1e-3]))
    if kind in ("Adam", "AdamW"):
        options["beta_2"] = draw(st.sampled_from([0.999, 0.9]))
    if kind == "Ftrl":
        options["l1_regularization_strength"] = draw(st.sampled_from([0.0, 0.01]))
    clip = draw(st.sampled_from(["", "", "clipnorm", "global_clipnorm", "clipvalue"]))
    if clip:
        options[clip] = 0.2
    count = draw(st.sampled_from([0, 0, 0, 2, 3]))
    if kind in ("Adam", "AdamW") and not count:
        options["weight_decay"] = draw(st.sampled_from([0.0, 0.1]))
    whole = kind in WHOLE or bool(options.get("weight_decay"))
    others = ["keep", "set", "save", "load", "reload", "clone"]
    # Moments of Adam decay in a step in which the table has no gradient, and Keras' rest: a warning
    # says so. With weight decay, as in AdamW, both rest.
    if kind != "Adam" or options.get("weight_decay"):
        others += ["left out"] * 2
    act = st.one_of(
        *[
            st.fixed_dictionaries(
                {
                    "act": st.just("step"),
                    "way": st.sampled_from(WAYS),
                    "seed": st.integers(0, 9999),
                    "size": st.integers(0, 8),
                    "training": st.booleans(),
                    "scale": st.sampled_from([1.0, 1e-3]),
                }
            )
        ]
        * 3,
        st.fixed_dictionaries({"act": st.sampled_from(others)}),
        st.fixed_dictionaries({"act": st.just("refused"), "seed": st.integers(0, 9999)}),
    )
    return {
        "kind": kind,
        "options": options,
        "filter": count,
        "whole": whole,
        "unique": bool(clip),
        "acts": draw(st.lists(act, min_size=1, max_size=10)),
    }


def option(count: int) -> de.EmbeddingVariableOption | None:
    """The admission of a layer."""
    if not count:
        return None
    return de.EmbeddingVariableOption(filter_option=de.CounterFilter(count))


def built(layer: Embedding) -> Embedding:
    """Build it, so that it has its table."""
    layer.build((None,))
    return layer


@functools.cache
def pooled(count: int, number: int) -> Embedding:
    """A layer that programs share: functions that are traced for it stay."""
    return built(Embedding(DIM, ev_option=option(count), name=f"twin_{count}_{number}"))


def losses(layer: Embedding, ids: Any, weights: Any, training: bool | None, way: str) -> Any:
    """The loss of one step, linear in the rows; `way` says where the lookup is."""

    def part(keys: Any, w: Any) -> Any:
        return tf.reduce_sum(layer(keys, training=training) * w)

    if way == "cond":
        return tf.cond(tf.size(ids) >= 0, lambda: part(ids, weights), lambda: 0.0)
    if way == "loop":

        def body(i: Any, total: Any) -> Any:
            return i + 1, total + part(ids[i : i + 1], weights[i : i + 1])

        return tf.while_loop(lambda i, _: i < tf.size(ids), body, (0, 0.0))[1]
    if way == "map":
        each = tf.map_fn(
            lambda x: part(x[0][None], x[1]), (ids, weights), fn_output_signature=tf.float32
        )
        return tf.reduce_sum(each)
    if way == "nested":
        half = tf.size(ids) // 2
        return losses(layer, ids[:half], weights[:half], training, "loop") + tf.cond(
            half > 1,
            lambda: losses(layer, ids[half:], weights[half:], training, "loop"),
            lambda: part(ids[half:], weights[half:]),
        )
    return part(ids, weights)


_functions: dict[Any, Any] = {}


def function(layer: Embedding, training: bool | None, way: str) -> Callable[..., Any]:
    """A traced function of (ids, weights) that gives the table's gradient."""
    key = (layer.name, training, way)
    if key not in _functions:

        def gradient(ids: Any, weights: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = losses(layer, ids, weights, training, way)
            return tape.gradient(loss, layer.trainable_variables[0])

        _functions[key] = tf.function(
            gradient,
            input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM])],
        )
    return _functions[key]


class Run:
    """One program, by both."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layer, self.other = (pooled(program["filter"], number) for number in range(2))
        self.pool = True
        self.made: list[Embedding] = []
        for layer in (self.layer, self.other):
            layer.table.clear()
            _optimizer_less(layer)
        start = self.layer.table.lookup(KEYS, insert=False).numpy()
        self.start = start
        self.dense, self.tower = tf.Variable(start), [tf.Variable([1.0]), tf.Variable([1.0])]
        self.seen: Counter[int] = Counter()
        self.rows: set[int] = set()
        self.mine = self.theirs = None
        self.new_optimizers()
        self.kept: Any = None
        self.saved: Any = None

    def new_optimizers(self) -> None:
        kind, options = self.program["kind"], self.program["options"]
        given = {**options, "weight_decay": options.get("weight_decay") or None}
        if kind == "AdamW":
            given["weight_decay"] = options.get("weight_decay", 0.0)
        make = getattr(keras.optimizers, kind)
        self.mine, self.theirs = de.DynamicEmbeddingOptimizer(make(**given)), make(**given)
        self.mine.build([self.anchor, self.other.trainable_variables[0], self.tower[0]])
        self.theirs.build([self.dense, self.tower[1]])

    @property
    def anchor(self) -> Any:
        return self.layer.trainable_variables[0]

    def batch(self, act: Program) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of ids, and the gradients of their rows."""
        draw = np.random.default_rng(act["seed"])
        size = act.get("size", 3)
        if self.program["whole"]:
            ids = draw.permutation(ROWS)
            if not self.program["unique"]:
                ids = np.concatenate([ids, draw.integers(0, ROWS, size)])
        else:
            ids = draw.permutation(ROWS)[:size]
            if not self.program["unique"]:
                ids = draw.integers(0, ROWS, size)
        scale = act.get("scale", 1.0)
        return ids, (scale * draw.normal(size=(len(ids), DIM))).astype(np.float32)

    def look(self, ids: np.ndarray) -> np.ndarray:
        """Count a training lookup; which rows there are."""
        count = self.program["filter"]
        for row in ids.tolist():
            self.seen[row] += 1
            if self.seen[row] >= max(count, 1):
                self.rows.add(row)
        there = np.zeros((ROWS, 1), np.float32)
        there[sorted(self.rows)] = 1.0
        return there

    def step(self, act: Program) -> None:
        ids, weights = self.batch(act)
        training = True if act["training"] else None
        way = act["way"] if self.pool else "eager"
        keys, given = tf.constant(KEYS[ids]), tf.constant(weights)
        if way == "eager":
            with tf.GradientTape() as tape:
                loss = losses(self.layer, keys, given, training, "plain")
            slices = tape.gradient(loss, self.anchor)
        else:
            slices = function(self.layer, training, way)(keys, given)
        there = self.look(ids)
        dense = np.zeros((ROWS, DIM), np.float32)
        np.add.at(dense, ids, weights)
        # What clipping sees is the whole gradient, also of keys that have no row yet.
        one = tf.ones([1])
        self.mine.apply([slices, one], [self.anchor, self.tower[0]])
        self.apply_dense(dense, there, one)

    def apply_dense(self, dense: np.ndarray, there: np.ndarray, one: Any) -> None:
        theirs = self.theirs
        slots = [v for v in theirs.variables if tuple(v.shape) == (ROWS, DIM)]
        before = [self.dense.numpy(), *(slot.numpy() for slot in slots)]
        theirs.apply([tf.constant(dense), one], [self.dense, self.tower[1]])
        for variable, old in zip([self.dense, *slots], before, strict=True):
            variable.assign(np.where(there > 0, variable.numpy(), old))

    def refused(self, act: Program) -> None:
        """A step with a gradient that is not finite: nothing of it happens."""
        ids, weights = self.batch(act)
        fine = tf.IndexedSlices(tf.constant(weights), tf.constant(KEYS[ids]))
        bad = tf.IndexedSlices(tf.constant([[np.nan] * DIM]), tf.constant(KEYS[:1]))
        variables = [self.anchor, self.other.trainable_variables[0], self.tower[0]]
        try:
            self.mine.apply([fine, bad, tf.ones([1])], variables)
        except tf.errors.InvalidArgumentError:
            return
        raise AssertionError("a gradient that is not finite was applied")

    def left_out(self) -> None:
        """A step in which the table has no gradient. Rows rest, and the step counts."""
        one = tf.ones([1])
        self.mine.apply([None, one], [self.anchor, self.tower[0]])
        self.theirs.apply([None, one], [self.dense, self.tower[1]])

    def forget_slots(self, gone: set[int]) -> None:
        """A row that is removed starts anew."""
        fresh = getattr(keras.optimizers, self.program["kind"])(**self.program["options"])
        blank = tf.Variable(self.start)
        fresh.build([blank, tf.Variable([1.0])])
        for mine, new in zip(self.theirs.variables, fresh.variables, strict=True):
            if tuple(mine.shape) == (ROWS, DIM):
                values = mine.numpy()
                values[sorted(gone)] = new.numpy()[sorted(gone)]
                mine.assign(values)

    def keep(self) -> None:
        self.kept = (self.layer.get_weights(), self.dense.numpy(), set(self.rows))

    def set(self) -> None:
        if self.kept is None:
            return
        weights, dense, rows = self.kept
        self.layer.set_weights(weights)
        gone = self.rows - rows
        self.dense.assign(dense)
        if gone:
            self.forget_slots(gone)
        for row in gone:
            del self.seen[row]  # a filter counts a row that went anew
        self.rows = set(rows)

    def save(self) -> None:
        files: list[dict[str, Any]] = [{}, {}, {}]
        self.layer.save_own_variables(files[0])
        self.mine.save_own_variables(files[1])
        self.theirs.save_own_variables(files[2])
        self.saved = (
            files,
            self.dense.numpy(),
            [tower.numpy() for tower in self.tower],
            set(self.rows),
            Counter(self.seen),
        )

    def load(self) -> None:
        if self.saved is None:
            return
        files, dense, towers, rows, seen = self.saved
        self.layer.load_own_variables(files[0])
        self.mine.load_own_variables(files[1])
        self.theirs.load_own_variables(files[2])
        self.dense.assign(dense)
        for tower, value in zip(self.tower, towers, strict=True):
            tower.assign(value)
        self.rows, self.seen = set(rows), Counter(seen)

    def replace(self) -> None:
        """The layer made again from its config, as clone_model and load_model do."""
        new = built(Embedding.from_config({**self.layer.get_config(), "name": "twin_clone"}))
        self.made.append(new)
        self.layer, self.pool = new, False

    def reload(self) -> None:
        """The whole state in another layer with new optimizers, as load_model does."""
        self.save()
        self.replace()
        self.layer.load_own_variables(self.saved[0][0])
        self.new_optimizers()
        self.load()

    def clone(self) -> None:
        """The weights in another layer, with new optimizers."""
        weights = self.layer.get_weights()
        self.replace()
        self.layer.set_weights(weights)
        self.kept = self.saved = None
        self.seen = Counter()  # a clone counts for itself
        self.new_optimizers()

    def compare(self) -> None:
        table = self.layer.table
        found = table.lookup(KEYS, insert=False).numpy()
        size = int(table.size())
        assert size == len(self.rows), f"{size} rows, not {len(self.rows)}"
        np.testing.assert_allclose(found, self.dense, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(self.tower[0], self.tower[1], rtol=1e-4, atol=1e-6)
        assert int(self.mine.iterations) == int(self.theirs.iterations)

    def close(self) -> None:
        for layer in self.made:
            layer.table.close()


def _optimizer_less(layer: Embedding) -> None:
    layer.table.stepped_by = None


def check(program: Program) -> None:
    """Run a program by both, and compare after each act."""
    run = Run(program)
    acts: dict[str, Callable[[], None]] = {
        "keep": run.keep, "set": run.set, "save": run.save, "load": run.load,
        "reload": run.reload, "clone": run.clone, "left out": run.left_out,
    }  # fmt: skip
    try:
        for act in program["acts"]:
            name = act["act"]
            if name == "step":
                run.step(act)
            elif name == "refused":
                run.refused(act)
            else:
                acts[name]()
            run.compare()
    finally:
        run.close()


# --- faults ---


@contextlib.contextmanager
def retraced(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    """With faults in what is traced: functions from before do not have them."""
    before = dict(_functions)
    _functions.clear()
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        _functions.clear()
        _functions.update(before)


def epsilon() -> AbstractContextManager[Any]:
    def adagrad(o: Any) -> dict[str, Any]:
        start = float(o.initial_accumulator_value)
        return {"kind": "adagrad", "eps": float(o.epsilon), "initial_accumulator": start}

    def moments(o: Any) -> dict[str, Any]:
        return {"beta1": float(o.beta_1), "beta2": float(o.beta_2), "eps": float(o.epsilon)}

    rules = {**_optimizer._KERAS_RULES, "Adagrad": adagrad}
    return retraced(
        mock.patch.object(_optimizer, "_moments", moments),
        mock.patch.object(_optimizer, "_KERAS_RULES", rules),
    )


def decay() -> AbstractContextManager[Any]:
    return mock.patch.object(_optimizer, "_decaying", lambda _o, _v, options: options)


def weights() -> AbstractContextManager[Any]:
    plain: Any = keras.Variable
    return retraced(
        mock.patch.object(_weights.Anchor, "numpy", plain.numpy),
        mock.patch.object(_weights.Anchor, "assign", plain.assign),
    )


def config() -> AbstractContextManager[Any]:
    whole = Embedding.get_config

    def short(self: Any) -> dict[str, Any]:
        return {**whole(self), "ev_option": None, "seed": self.seed}

    return mock.patch.object(Embedding, "get_config", short)


def uncounted() -> AbstractContextManager[Any]:
    return retraced(mock.patch.object(_gradients, "_filters", lambda _: False))


def half_steps() -> AbstractContextManager[Any]:
    return mock.patch.object(_optimizer, "_finite", lambda *_: [])


def uneven_clock() -> AbstractContextManager[Any]:
    whole = _variable.DynamicVariable.apply_gradients

    def some(self: Any, slices: Any, *, learning_rate: Any = -1.0, step: Any = -1) -> Any:
        del step  # the table counts for itself
        if slices.indices.shape[0] == 0:
            return None
        return whole(self, slices, learning_rate=learning_rate)

    return mock.patch.object(_variable.DynamicVariable, "apply_gradients", some)


def dense_in_branches() -> AbstractContextManager[Any]:
    return retraced(mock.patch.object(_gradients, "outside", lambda: None))


def no_reload() -> AbstractContextManager[Any]:
    whole = _stores.use_optimizer

    def old(store: Any, optimizer: Any) -> None:
        with mock.patch.object(type(store), "stats", lambda _: {"steps": 0}):
            whole(store, optimizer)

    return mock.patch.object(_stores, "use_optimizer", old)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "epsilon outside of where Keras has it": epsilon,
    "weight decay ignored": decay,
    "weights without rows": weights,
    "a clone without options": config,
    "model(ids) not counted by a filter": uncounted,
    "half of a refused step": half_steps,
    "a step without a gradient not counted": uneven_clock,
    "a dense gradient out of branches": dense_in_branches,
    "Adagrad cannot be reloaded": no_reload,
}

# What TensorFlow and the table say where the faults let it come so far.
ENDS = {
    "a dense gradient out of branches": "Tensors in list passed to 'inputs' of 'AddN'",
    "Adagrad cannot be reloaded": "it cannot go on with",
}

TWIN = Twin("keras", programs(), check, FAULTS, ENDS, programs_per_round=150)
