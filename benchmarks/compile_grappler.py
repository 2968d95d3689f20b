"""TensorFlow's graph rewriter (Grappler) on a step with sparse features: each option by itself.

    python benchmarks/compile_grappler.py [--turns 5] [--steps 30] [--json FILE]

A click model on the CPU: 26 features, each with 1 to 4 keys per row that are made unique, looked
up in a variable and averaged per row; a small tower; SGD whose sparse part is `scatter_sub`. One
tf.function per way, in one process. `default` is as TensorFlow comes. `all off` leaves the
rewriter out. Each other way changes one option against the default.

Reported: seconds of this process's CPU per step, the least and the median of the turns in which the
ways follow each other, and both over the default's; CPU seconds of the first call (trace and
rewrite). TensorFlow has one thread, so that is what a step costs where nothing else runs, and other
work on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FEATURES, ROWS, WIDTH, BATCH = 26, 20_000, 16, 256
# Name of a way > the options that it sets. True is the default of those that are set to False.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "all off": {"disable_meta_optimizer": True},
    **{
        f"{name} off": {name: False}
        for name in (
            "constant_folding",
            "shape_optimization",
            "remapping",
            "arithmetic_optimization",
            "dependency_optimization",
            "loop_optimization",
            "function_optimization",
            "layout_optimizer",
            "implementation_selector",
        )
    },
    "no model pruning": {"disable_model_pruning": True},
    "scoped_allocator_optimization": {"scoped_allocator_optimization": True},
    "pin_to_host_optimization": {"pin_to_host_optimization": True},
    "debug_stripper": {"debug_stripper": True},
}


def stepper(tf: Any) -> Any:
    """A new training step over new variables."""
    tables = [tf.Variable(tf.random.normal([ROWS, WIDTH], stddev=0.1)) for _ in range(FEATURES)]
    kernels = [
        tf.Variable(tf.random.normal(shape, stddev=0.05))
        for shape in ([FEATURES * WIDTH, 64], [64, 1])
    ]

    @tf.function
    def step(keys: Any, rows: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            found, uniques = [], []
            for table, each, row in zip(tables, keys, rows, strict=True):
                unique, index = tf.unique(each)
                looked = tf.gather(table, unique)
                tape.watch(looked)
                uniques.append((table, unique, looked))
                sums = tf.math.unsorted_segment_mean(tf.gather(looked, index), row, BATCH)
                found.append(sums)
            hidden = tf.nn.relu(tf.concat(found, 1) @ kernels[0])
            logits = tf.squeeze(hidden @ kernels[1], 1)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        sources = [*kernels, *[looked for _, _, looked in uniques]]
        gradients = tape.gradient(loss, sources)
        for kernel, gradient in zip(kernels, gradients, strict=False):
            kernel.assign_sub(0.05 * gradient)
        for (table, unique, _), gradient in zip(uniques, gradients[len(kernels) :], strict=True):
            table.scatter_sub(tf.IndexedSlices(0.05 * tf.convert_to_tensor(gradient), unique))
        return loss

    return step


def batch(tf: Any, seed: int) -> tuple[Any, Any, Any]:
    """Keys and their rows per feature, and labels."""
    import numpy as np

    random = np.random.default_rng(seed)
    keys, rows = [], []
    for _ in range(FEATURES):
        counts = random.integers(1, 5, BATCH)
        rows.append(tf.constant(np.repeat(np.arange(BATCH), counts)))
        keys.append(tf.constant(random.zipf(1.3, counts.sum()) % ROWS))
    return keys, rows, tf.constant(random.integers(0, 2, BATCH), tf.float32)


def main() -> None:
    """Measure all ways in turns, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    data = batch(tf, 0)
    steps, first = {}, {}
    for way, changed in WAYS.items():
        usual = {
            name: not value if isinstance(value, bool) else value for name, value in changed.items()
        }
        tf.config.optimizer.set_experimental_options(changed)
        tf.random.set_seed(0)
        steps[way] = stepper(tf)
        begun = time.process_time()
        loss = float(steps[way](*data))
        first[way] = time.process_time() - begun
        print(f"{way}: first call {first[way]:.2f} s, loss {loss:.4f}", flush=True)
        tf.config.optimizer.set_experimental_options(usual)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way, step in steps.items():
            float(step(*data))
            begun = time.process_time()
            for _ in range(options.steps):
                float(step(*data))
            times[way].append((time.process_time() - begun) / options.steps)
    least = {way: min(found) for way, found in times.items()}
    median = {way: statistics.median(found) for way, found in times.items()}
    print("\n| way | CPU ms per step, least | over default | medians | first call, CPU s |")
    print("|---|---:|---:|---:|---:|")
    for way in WAYS:
        print(
            f"| {way} | {1e3 * least[way]:.2f} | {least[way] / least['default']:.2f} | "
            f"{median[way] / median['default']:.2f} | {first[way]:.2f} |"
        )
    if options.json:
        document = {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "load": os.getloadavg()[0],
            "first": first,
            "times": times,
        }
        options.json.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
