"""What a lookup of one id costs in TensorFlow: the op, the call from Python, and TensorFlow's own.

    python benchmarks/tensorflow_lookup.py --json benchmarks/results/tensorflow-lookup.json

Each figure is the best of `--repeats` means over `--calls` calls, all in one process, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import evener.embedding.tensorflow as de
from evener.embedding.tensorflow import _library

GRAPH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    table = de.get_variable("one", dim=16)
    dense = tf.Variable(tf.random.normal([1000, 16]))
    matrix = tf.random.normal([1000, 16])
    ids = tf.constant([1], tf.int64)
    zeros = tf.zeros([16])
    ops, attributes = _library.ops(), table.parts[0].attributes
    array = np.array([1])

    @tf.function
    def graph(keys: Any) -> Any:
        return tf.add_n([table.lookup(keys) for _ in range(GRAPH)])

    @tf.function
    def graph_dense(keys: Any) -> Any:
        return tf.add_n([tf.nn.embedding_lookup(dense, keys) for _ in range(GRAPH)])

    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "the op": (lambda: ops.evener_embedding_lookup(ids, zeros, **attributes), 1),
        "embedding_lookup": (lambda: de.embedding_lookup(table, ids), 1),
        "embedding_lookup, in a graph": (lambda: graph(ids), GRAPH),
        "the store from numpy": (lambda: table.stores[0].lookup(array, 0), 1),
        "tf.gather, constant": (lambda: tf.gather(matrix, ids), 1),
        "tf.nn.embedding_lookup, variable": (lambda: tf.nn.embedding_lookup(dense, ids), 1),
        "tf.nn.embedding_lookup, in a graph": (lambda: graph_dense(ids), GRAPH),
    }
    best = dict.fromkeys(cases, float("inf"))
    for call, _ in cases.values():
        call()
    for _ in range(given.repeats):
        for name, (call, inside) in cases.items():
            calls = max(1, given.calls // inside)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            each = (time.perf_counter() - start) / calls / inside * 1e6
            best[name] = min(best[name], each)
    for name, microseconds in best.items():
        print(f"{name:36} {microseconds:7.1f} us")
    if given.json:
        given.json.write_text(
            json.dumps(
                {
                    "what": "a lookup of 1 id, microseconds, best of the repeats' means",
                    "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
                    "versions": {"tensorflow": tf.__version__, "python": platform.python_version()},
                    "calls": given.calls,
                    "repeats": given.repeats,
                    "microseconds": {name: round(value, 2) for name, value in best.items()},
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
