"""Keras tables that are spread over ranks, beside the same tables whole in one process.

A program picks an optimizer and what the ranks do with gradients, and trains: in eager mode and in
a function, with ranks that have no ids, steps that are refused for one rank's sake, weights that
are kept and set again, checkpoints, also into the other world. Worlds of two and three processes
run it over Evener's own collectives. The reference looks the ids of all ranks up in one process,
adds gradients up in numpy, and steps by the same optimizer; `keras.py` holds that to Keras' own.

Rows, slots, frequencies and versions are compared, and who has which row. Gradients are numbers
whose sums are exact in any order, so only divisions round: values are equal within 1e-6.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
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
import evener.horovod.tensorflow as hvd
from evener.embedding import parts
from evener.embedding.tensorflow import _checkpoint, _sharded
from evener.embedding.tensorflow.keras import Embedding, EmbeddingCollection
from evener.horovod.tensorflow.gradients import Reduction
from tests.twins import _horovod
from tests.twins.harness import Program, Twin, often

KEYS = np.array([3, -(2**62), 2**61, 0, 17, -1, 10**15, 77], np.int64)
# Of each table: dim, combiner, from which lookup on a key has a row. Of each feature: table, ids
# of a sample, whether they are sparse.
TABLES = [(3, "sum", 1), (2, "mean", 2), (4, None, 1)]
FEATURES = {"a": (0, 2, False), "b": (0, 2, True), "c": (1, 4, False), "d": (2, 1, False)}
WORLDS = (2, 3)
WHOLE = ("Adam", "AdamW", "Ftrl")


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program."""
    kind = draw(st.sampled_from(["SGD", "Adagrad", *WHOLE]))
    options: dict[str, Any] = {"learning_rate": draw(st.sampled_from([0.125, 0.5]))}
    if kind == "AdamW":
        options["weight_decay"] = draw(st.sampled_from([0.0, 0.1]))
    clip = draw(st.sampled_from(["", "", "clipvalue"]))
    if clip:
        options[clip] = 0.25
    step = st.fixed_dictionaries(
        {
            "act": st.just("step"),
            "way": st.sampled_from(["eager", "function"]),
            "seed": st.integers(0, 9999),
            "training": st.sampled_from([True, True, False]),
        }
    )
    other = st.fixed_dictionaries(
        {
            "act": st.sampled_from(
                ["infer", "refused", "save", "load", "keep", "set", "move", "move", "broadcast"]
            ),
            "seed": st.integers(0, 9999),
        }
    )
    return {
        "kind": kind,
        "options": options,
        "op": draw(st.sampled_from(["Average", "Average", "Sum"])),
        "size": draw(st.sampled_from(WORLDS)),
        "acts": draw(st.lists(often(step, step, other), min_size=1, max_size=8)),
    }


def batch(seed: int, rank: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Of a rank: numbers of keys [n, k] of each feature, and the gradients of what comes of them.

    Some ranks have no samples. Gradients are eighths, so that their sums are exact.
    """
    draw = np.random.default_rng(100 * seed + rank)
    n = int(draw.integers(0, 4))
    ids = {f: draw.integers(0, len(KEYS), (n, k)) for f, (_, k, _) in FEATURES.items()}
    weights = {}
    for feature, (t, k, _) in FEATURES.items():
        dim, combiner, _ = TABLES[t]
        shape = (n, k, dim) if combiner is None else (n, dim)
        weights[feature] = draw.integers(-16, 17, shape).astype(np.float32) / 8
    return ids, weights


def optimizer_of(program: Program) -> Any:
    """The program's optimizer, which trains tables."""
    given = {**program["options"], "weight_decay": program["options"].get("weight_decay") or None}
    if program["kind"] == "AdamW":
        given["weight_decay"] = program["options"].get("weight_decay", 0.0)
    return de.DynamicEmbeddingOptimizer(getattr(keras.optimizers, program["kind"])(**given))


class Model(keras.Model):
    """The tables and one dense weight."""

    def __init__(self, shard: bool) -> None:
        super().__init__(name="keras_ranks")
        layers = []
        for i, (dim, combiner, count) in enumerate(TABLES):
            option = de.EmbeddingVariableOption(filter_option=de.CounterFilter(count))
            layers.append(
                Embedding(dim, combiner=combiner, ev_option=option, name=f"ranked_{i}", shard=shard)
            )
        of = {feature: layers[t] for feature, (t, _, _) in FEATURES.items()}
        self.embeddings, self.features = layers, EmbeddingCollection(of, name="features")
        self.tower = self.add_weight(shape=(1,), initializer="ones", name="tower")
        for layer in layers:
            layer.build(None)
        self.features.build(None)
        self.built = True

    @property
    def tables(self) -> list[Any]:
        return [layer.table for layer in self.embeddings]

    def anew(self, optimizer: Any) -> Any:
        """Without rows, with a new optimizer."""
        for table in self.tables:
            table.clear()
            table.stepped_by = None
        self.tower.assign([1.0])
        optimizer.build(self.sources)
        self.compile(optimizer, "mse")
        return optimizer

    @property
    def sources(self) -> list[Any]:
        return [*(layer.trainable_variables[0] for layer in self.embeddings), self.tower]


def rows_of(table: Any) -> dict[str, Any]:
    """Key > [values and slots, frequency, version]."""
    return {
        str(key): [row.tolist(), int(frequency), int(version)]
        for chunk in table.stores[0].export_rows()
        for key, row, frequency, version in zip(*chunk, strict=True)
    }


# --- a rank --------------------------------------------------------------------------------------


class Rank:
    """What each process of a world is."""

    def __init__(self) -> None:
        hvd.init()
        self.model = Model(shard=True)
        self.functions: dict[bool, Any] = {}
        self.kept: Any = None

    def answer(self, part: Program) -> list[Any]:
        """Run acts of a program; what was seen after each."""
        fault = part["fault"]
        with FAULTS[fault]() if fault else contextlib.nullcontext():
            if fault:
                self.functions = {}
            try:
                return self.acts(part)
            finally:
                if fault:
                    self.functions = {}

    def acts(self, part: Program) -> list[Any]:
        program = part["program"]
        self.optimizer = hvd.DistributedOptimizer(
            optimizer_of(program), op=getattr(hvd, program["op"])
        )
        self.model.anew(self.optimizer)
        self.kept = None
        if part["load"]:
            de.load(self.model, part["folder"])
        seen = []
        for act in part["acts"]:
            values = getattr(self, act["act"])(act, part["folder"])
            seen.append(
                {
                    "values": values,
                    "rows": [rows_of(table) for table in self.model.tables],
                    "tower": float(self.model.tower[0]),
                    "iterations": int(self.optimizer.iterations),
                }
            )
        return seen

    def given(self, ids: dict[str, np.ndarray]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for feature, (_, k, sparse) in FEATURES.items():
            keys = tf.constant(KEYS[ids[feature]].reshape(-1, k))
            found[feature] = tf.sparse.from_dense(keys + 1) if sparse else keys
            if sparse:  # a key of 0 is an id as any
                places = tf.where(tf.ones_like(keys, tf.bool))
                found[feature] = tf.SparseTensor(
                    places, tf.reshape(keys, [-1]), tf.shape(keys, tf.int64)
                )
        return found

    def gradients(self, ids: Any, weights: Any, training: bool) -> Any:
        with tf.GradientTape() as tape:
            found = self.model.features(ids, training=training)
            loss = tf.add_n([tf.reduce_sum(found[f] * weights[f]) for f in FEATURES])
            loss += tf.reduce_sum(self.model.tower * (hvd.rank() + 1.0))
        return found, tape.gradient(loss, self.model.sources)

    def step(self, act: Program, folder: str) -> Any:
        ids, weights = batch(act["seed"], hvd.rank())
        given = (self.given(ids), {f: tf.constant(w) for f, w in weights.items()})
        training = act["training"]
        if act["way"] == "function":
            if training not in self.functions:
                kinds = tf.nest.map_structure(
                    lambda x: (
                        tf.SparseTensorSpec([None, x.shape[1]], x.dtype)
                        if isinstance(x, tf.SparseTensor)
                        else tf.TensorSpec([None, *x.shape[1:]], x.dtype)
                    ),
                    given,
                )
                self.functions[training] = tf.function(
                    lambda i, w: self.gradients(i, w, training), input_signature=kinds
                )
            found, slices = self.functions[training](*given)
        else:
            found, slices = self.gradients(*given, training)
        self.optimizer.apply(slices, self.model.sources)
        return {feature: found[feature].numpy().tolist() for feature in FEATURES}

    def infer(self, act: Program, folder: str) -> Any:
        ids, _ = batch(act["seed"], hvd.rank())
        found = self.model.features(self.given(ids), training=False)
        return {feature: found[feature].numpy().tolist() for feature in FEATURES}

    def refused(self, act: Program, folder: str) -> str:
        """One rank has a gradient that is not finite, and nobody steps."""
        bad = act["seed"] % hvd.size() == hvd.rank()
        slices = []
        for t, table in enumerate(self.model.tables):
            own = KEYS[parts.hashes(KEYS) % hvd.size() == hvd.rank()][:1]
            values = np.full((len(own), table.dim), np.nan if bad and not t else 1.0, np.float32)
            slices.append(tf.IndexedSlices(tf.constant(values), tf.constant(own)))
        if bad and not len(slices[0].indices):  # it owns none of the keys
            nan = tf.constant(np.full((1, TABLES[0][0]), np.nan, np.float32))
            slices[0] = tf.IndexedSlices(nan, tf.constant([1 << 40], tf.int64))
        try:
            self.optimizer.apply([*slices, tf.ones([1])], self.model.sources)
        except tf.errors.InvalidArgumentError:
            return "refused"
        return "stepped"

    def save(self, act: Program, folder: str) -> None:
        de.save(self.model, folder)

    move = save

    def load(self, act: Program, folder: str) -> None:
        if any(Path(folder).glob("step-*/manifest.json")):
            de.load(self.model, folder)

    def keep(self, act: Program, folder: str) -> None:
        self.kept = [layer.get_weights() for layer in self.model.embeddings]

    def set(self, act: Program, folder: str) -> None:
        for layer, weights in zip(self.model.embeddings, self.kept or [], strict=False):
            layer.set_weights(weights)

    def broadcast(self, act: Program, folder: str) -> None:
        hvd.broadcast_variables(self.model.sources, 0)


# --- the reference -------------------------------------------------------------------------------


class Reference:
    """All rows in one process."""

    model: Model | None = None

    def __init__(self, program: Program) -> None:
        cls = type(self)
        if cls.model is None:
            cls.model = Model(shard=False)
        self.now = cls.model
        self.program, self.size = program, program["size"]
        self.optimizer = self.now.anew(optimizer_of(program))
        self.kept = self.saved = None

    def look(self, seed: int, adds: bool) -> list[dict[str, np.ndarray]]:
        """What each rank's features give."""
        used: list[list[np.ndarray]] = [[] for _ in TABLES]
        for rank in range(self.size):
            ids, _ = batch(seed, rank)
            for feature, (t, _, _) in FEATURES.items():
                used[t].append(ids[feature].reshape(-1))
        rows = []
        for table, numbers in zip(self.now.tables, used, strict=True):
            keys = np.unique(np.concatenate(numbers))
            found = np.zeros((len(KEYS), table.dim), np.float32)
            found[keys] = table.lookup(KEYS[keys], insert=adds).numpy()
            rows.append(found)
        values = []
        for rank in range(self.size):
            ids, _ = batch(seed, rank)
            mine = {}
            for feature, (t, _, _) in FEATURES.items():
                each, combiner = rows[t][ids[feature]], TABLES[t][1]
                mine[feature] = (
                    each if combiner is None else each.sum(1) if combiner == "sum" else each.mean(1)
                )
            values.append(mine)
        return values

    def step(self, act: Program) -> list[dict[str, np.ndarray]]:
        values = self.look(act["seed"], act["training"])
        share = 1 / self.size if self.program["op"] == "Average" else 1.0
        slices: list[Any] = []
        for t, (dim, combiner, count) in enumerate(TABLES):
            total, seen = np.zeros((len(KEYS), dim), np.float32), np.zeros(len(KEYS), bool)
            for rank in range(self.size):
                ids, weights = batch(act["seed"], rank)
                for feature, (of, k, _) in FEATURES.items():
                    if of != t:
                        continue
                    each = weights[feature]
                    if combiner is not None:
                        each = np.repeat(each[:, None] / (k if combiner == "mean" else 1), k, 1)
                    np.add.at(total, ids[feature].reshape(-1), each.reshape(-1, dim))
                    seen[ids[feature].reshape(-1)] = True
            keys = tf.constant(KEYS[seen])
            if not act["training"] and count > 1:  # the backward pass counts
                self.now.tables[t].lookup(keys, insert=True)
            slices.append(tf.IndexedSlices(tf.constant(total[seen] * np.float32(share)), keys))
        tower = sum(range(1, self.size + 1)) * share
        self.optimizer.apply([*slices, tf.constant([tower], tf.float32)], self.now.sources)
        return values

    def infer(self, act: Program) -> list[dict[str, np.ndarray]]:
        return self.look(act["seed"], False)

    def refused(self, act: Program) -> list[str]:
        return ["refused"] * self.size

    def _state(self) -> Any:
        return (
            [table.parts[0]._serialize_to_tensors() for table in self.now.tables],
            [v.numpy() for v in (self.now.tower, *self.optimizer.variables)],
        )

    def save(self, act: Program) -> None:
        self.saved = self._state()

    def move(self, act: Program) -> None:
        """In the other world all goes on but weights that were kept."""
        self.save(act)
        self.load(act)
        self.size, self.kept = sum(WORLDS) - self.size, None

    def load(self, act: Program) -> None:
        if self.saved is None:
            return
        tables, dense = self.saved
        for table, state in zip(self.now.tables, tables, strict=True):
            table.parts[0]._restore_from_tensors(state)
        for variable, value in zip((self.now.tower, *self.optimizer.variables), dense, strict=True):
            variable.assign(value)

    def keep(self, act: Program) -> None:
        self.kept = [layer.get_weights() for layer in self.now.embeddings]

    def set(self, act: Program) -> None:
        for layer, weights in zip(self.now.embeddings, self.kept or [], strict=False):
            layer.set_weights(weights)

    def broadcast(self, act: Program) -> None:
        """Rows stay where they are."""

    def compare(self, act: Program, seen: list[Any], before: int, values: Any) -> None:
        """`seen` by each rank after an act, in a world of `before` ranks."""
        if values is not None:
            for rank, (mine, right) in enumerate(zip(seen, values, strict=True)):
                if isinstance(right, str):
                    assert mine["values"] == right, f"rank {rank}: {mine['values']}"
                    continue
                for feature, wanted in right.items():
                    found = np.array(mine["values"][feature], np.float32).reshape(wanted.shape)
                    np.testing.assert_allclose(found, wanted, 1e-6, 1e-7, err_msg=feature)
        for t, table in enumerate(self.now.tables):
            right, found = rows_of(table), {}
            for rank, mine in enumerate(seen):
                for key, row in mine["rows"][t].items():
                    owner = int(parts.hashes(np.array([int(key)]))[0] % before)
                    assert owner == rank, f"table {t}: rank {rank} has key {key}"
                    found[key] = row
            assert found.keys() == right.keys(), f"table {t}: rows {found.keys()}, {right.keys()}"
            for key, (row, *counts) in right.items():
                assert found[key][1:] == counts, f"table {t}, key {key}: {found[key]}, {counts}"
                np.testing.assert_allclose(found[key][0], row, 1e-6, 1e-7, err_msg=f"{t}: {key}")
        for mine in seen:
            np.testing.assert_allclose(mine["tower"], float(self.now.tower[0]), 1e-6)
            assert mine["iterations"] == int(self.optimizer.iterations)


_worlds = {size: _horovod.World(size, "tests.twins.keras_ranks") for size in WORLDS}
_fault = ""


def check(program: Program) -> None:
    """Run a program on ranks, then by the reference, and compare after each act."""
    cuts = [i + 1 for i, act in enumerate(program["acts"]) if act["act"] == "move"]
    size, seen, start = program["size"], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for end in [*cuts, len(program["acts"])]:
            part = {
                "program": program,
                "acts": program["acts"][start:end],
                "folder": folder,
                "load": start > 0,
                "fault": _fault,
            }
            seen += list(zip(*_worlds[size].run(part), strict=True))
            size, start = sum(WORLDS) - size, end
    reference = Reference(program)
    for act, each in zip(program["acts"], seen, strict=True):
        before = reference.size
        values = getattr(reference, act["act"])(act)
        reference.compare(act, list(each), before, values)


# --- faults --------------------------------------------------------------------------------------


def _patched(where: Any, name: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(where, name, by)


def _by_number(self: Any, keys: Any) -> Any:
    return tf.convert_to_tensor(keys, tf.int64) % self.size


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "rows come back in the order of their owners": _patched(
        tf.math, "invert_permutation", lambda x: tf.range(tf.size(x))
    ),
    "a key counts once for each time that it comes": _patched(
        tf, "unique", lambda x: (x, tf.range(tf.size(x)))
    ),
    "gradients are sums where a mean is asked for": _patched(
        Reduction, "_owned", lambda _self, _table, gradient: gradient
    ),
    "each rank decides alone what is finite": _patched(
        _sharded.Ranks, "agree", lambda _self, fine: fine
    ),
    "owners are others than torch's": _patched(_sharded.Ranks, "owner", _by_number),
    "ranks keep rows of other owners": _patched(parts, "keep_own", lambda *_: None),
    "a checkpoint has no dense variables": _patched(_checkpoint, "_dense", lambda _: []),
}


def _switch(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """The fault is put in by the ranks themselves."""

    @contextlib.contextmanager
    def put() -> Any:
        global _fault
        _fault = name
        try:
            yield
        finally:
            _fault = ""

    return put


TWIN = Twin(
    "keras_ranks",
    programs(),
    check,
    {name: _switch(name) for name in FAULTS},
    programs_per_round=40,
)

if __name__ == "__main__":
    _horovod.serve(Rank().answer)
