"""Functions that TensorFlow runs padded and compiled, beside the same functions as they are.

A program is a function made of operations on rows and across rows, and calls of it with sizes as a
data loader gives them: often a full batch first. Each call gives what the function gives alone.
XLA is left out here: what is compared is padding, cutting and the check, not a compiler.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("EVENER_COMPILE_DIR", tempfile.mkdtemp(prefix="evener-twin-"))
os.environ.setdefault("EVENER_LOG", "error")

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from evener.compile import Options, branches, independence
from evener.compile import tensorflow as bucketing
from tests.twins.harness import Program, Twin

DIM = 3
_function = tf.function
WEIGHT = tf.constant(np.random.default_rng(0).normal(size=(DIM, DIM)), tf.float32)
# Of rows one by one, or of those before.
ROWS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: x @ WEIGHT,
    "relu": tf.nn.relu,
    "softmax of a row": lambda x: tf.nn.softmax(x, 1),
    "norm of a row": lambda x: x / (1 + tf.norm(x, axis=1, keepdims=True)),
    "from the start": lambda x: tf.cumsum(x, 0) / 100,
    "branch of a row": lambda x: tf.where(x > 0, tf.sqrt(tf.abs(x)), 2 * x),
}
# Of rows together, or of how many there are.
MIXED: dict[str, Callable[[Any], Any]] = {
    "less the mean": lambda x: x - tf.reduce_mean(x, 0),
    "batch norm": lambda x: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1),
    "softmax of the batch": lambda x: 50 * tf.nn.softmax(x, 0),
    "from the end": lambda x: tf.cumsum(x, 0, reverse=True) / 100,
    "by the number": lambda x: x * 100 / tf.cast(tf.shape(x)[0], tf.float32),
    "by the number in Python": lambda x: x * (100 / int(x.shape[0])),
    "by the largest": lambda x: x / (1 + tf.reduce_max(tf.abs(x))),
    "far rows count": lambda x: x - tf.reduce_mean(tf.where(tf.abs(x) > 8, x, 0.0), 0),
    "the next row": lambda x: x + tf.roll(x, -1, 0),
    "backwards": lambda x: tf.reverse(x, [0]),
    "sorted": lambda x: tf.sort(x, 0),
    "gram": lambda x: x @ tf.tanh(tf.transpose(x) @ x) / 10,
    "branch of the first row": lambda x: tf.cond(
        x[0, 0] > -0.5, lambda: 2 * x, lambda: x - tf.reduce_mean(x, 0)
    ),
    "branch of a far first row": lambda x: tf.cond(
        x[0, 0] < 8.0, lambda: x, lambda: x - tf.reduce_mean(x, 0)
    ),
    "any below": lambda x: tf.cond(tf.reduce_any(x < -50.0), lambda: -x, lambda: x),
    "random": lambda x: x + 0 * tf.random.normal([1]) - tf.reduce_mean(x, 0),
}
OPERATIONS = {**ROWS, **MIXED}


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program."""
    names = draw(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=2))
    if draw(st.integers(0, 2)):
        at = draw(st.integers(0, len(names)))
        names.insert(at, draw(st.sampled_from(sorted(MIXED))))
    full = draw(st.sampled_from([16, 48, 200, 512]))
    # Most of what a data loader gives is alike; then something far off comes.
    far = draw(st.sampled_from([0.0, 20.0]))
    return {
        "function": names,
        "full": full,
        "far": far,
        "first": draw(st.integers(2, 5)),
        "then": draw(st.lists(st.integers(1, full), min_size=2, max_size=6)),
        "seed": draw(st.integers(0, 9999)),
        "shift": draw(st.sampled_from([0.0, 3.0])),
        "outputs": draw(st.sampled_from(["rows", "rows and sum", "dict"])),
        "tape": draw(st.integers(0, 3)) == 0,
    }


def _without_xla(*arguments: Any, jit_compile: Any = None, **options: Any) -> Any:
    return _function(*arguments, **options)


def check(program: Program) -> None:
    """Call the function both ways, and compare what it gives and its gradients."""

    def function(x: Any) -> Any:
        for name in program["function"]:
            x = OPERATIONS[name](x)
        if program["outputs"] == "rows and sum":
            return x, tf.reduce_sum(WEIGHT)
        return {"rows": x} if program["outputs"] == "dict" else x

    options = Options(plan_after=2, hits=1, judge=10_000, most=2, background=False)
    with mock.patch.object(tf, "function", _without_xla):
        made = bucketing.bucketed(function, name="twin", options=options, record=False)
    draw = np.random.default_rng(program["seed"])
    sizes = [program["full"]] * program["first"] + program["then"]
    for call, size in enumerate(sizes):
        rows = draw.normal(size=(size, DIM)) + program["shift"]
        if call >= program["first"]:
            rows[[0, -1]] += program["far"]
        x = tf.constant(rows, tf.float32)
        results = []
        for each in (function, made):
            with tf.GradientTape() as tape:
                if program["tape"]:
                    tape.watch(x)
                found = tf.nest.flatten(each(x))
                loss = tf.reduce_sum(tf.sin(found[0]))
            gradient = [tape.gradient(loss, x)] if program["tape"] else []
            results.append([*found, *gradient])
        for right, padded in zip(*results, strict=True):
            assert right.shape == padded.shape, f"call {call}: {padded.shape}, not {right.shape}"
            np.testing.assert_allclose(
                padded, right, rtol=2e-3, atol=2e-3 * (1 + float(tf.reduce_max(tf.abs(right)))) / 10
            )


def nearly_full() -> AbstractContextManager[Any]:
    """One row of padding and one filling, as the check once was."""
    last = lambda size, more, _: [independence.Filling("last", (size - 1,) * more)]  # noqa: E731
    return mock.patch.multiple(
        independence, samples=lambda size, edge: [range(min(size, edge - 1))], fillings=last
    )


def one_filling() -> AbstractContextManager[Any]:
    """The last row alone as padding: what looks at the smallest and largest is not seen."""
    last = lambda size, more, _: [independence.Filling("last", (size - 1,) * more)]  # noqa: E731
    return mock.patch.object(independence, "fillings", last)


def random_trusted() -> AbstractContextManager[Any]:
    """Functions that draw random numbers are compiled, and not compared."""
    whole = bucketing.Function._prepare

    def trusting(self: Any, call: Any, size: int, edge: int, known: Any) -> Any:
        self._quiet(call, size, edge)
        if self._kind != "random":
            return whole(self, call, size, edge, known)
        count = len(tf.nest.flatten(self._plain(call)))
        cut = [True] + [False] * (count - 1)
        self._cut[call.key, edge] = cut
        return {"code": "", "cut": cut, "proof": independence.PROOF}

    return mock.patch.object(bucketing.Function, "_prepare", trusting)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one row of padding in the check": nearly_full,
    "one kind of padding in the check": one_filling,
    "random numbers not compared": random_trusted,
    "branches on values not looked for": lambda: mock.patch.object(
        branches, "on_values", lambda *_: ""
    ),
}

TWIN = Twin("compile_tensorflow", programs(), check, FAULTS, programs_per_round=80)
