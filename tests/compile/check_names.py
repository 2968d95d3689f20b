"""Run by test_tensorflow.py: functions of one name, made in the order that the arguments say.

Each is called and compared with what it gives alone. An argument is FACTOR, or FACTOR:CODE, or
FACTOR:CODE:gone for one that is forgotten before the next is made.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from evener.compile import Options
from evener.compile.tensorflow import bucketed, keep


def make(factor: float, code: str) -> Callable[[Any], Any]:
    """A function named `step`, with a number of its own and a tensor of its own."""
    weight = tf.constant(np.full((4, 4), factor / 7), tf.float32)
    if code == "sigmoid":

        def step(x: Any) -> Any:
            return tf.sigmoid(x @ weight)

    elif code == "tensor":  # no number: the same code for all factors

        def step(x: Any) -> Any:
            return tf.tanh(x @ weight)

    elif code == "constant":  # as "tensor", but the tensor is in the program

        def step(x: Any) -> Any:
            return tf.tanh(x @ tf.constant(weight.numpy()))

    else:

        def step(x: Any) -> Any:
            return factor * tf.tanh(x)

    return step


def main() -> None:
    keep()
    quick = Options(plan_after=4, hits=1, judge=1000, most=1, background=False)
    x = tf.constant(np.random.default_rng(0).normal(size=(40, 4)), tf.float32)
    alive = []
    for argument in sys.argv[1:]:
        factor, code, gone, *_ = [*argument.split(":"), "", ""]
        function = make(float(factor), code)
        made = bucketed(function, name="step", options=quick)
        alive.append((argument, made, function))
        for size in (20, 33, 27, 40, 31, 22):
            np.testing.assert_allclose(made(x[:size]), function(x[:size]), atol=1e-6)
        said = made.report().values()
        assert sum(b["calls"] for each in said for b in each["buckets"]), (argument, said)
        if gone:
            alive.pop()
            del made, function
            gc.collect()
    for argument, made, function in alive:  # again, with all of them there
        np.testing.assert_allclose(made(x[:31]), function(x[:31]), atol=1e-6, err_msg=argument)
    print("all right")


if __name__ == "__main__":
    main()
