"""60 training steps with 58 batch sizes: compiled per size, by shape buckets, or not at all.

    python benchmarks/compile_buckets.py [--framework tensorflow|torch] [--steps 60] [--json FILE]

For each framework and each way a process of its own: `plain` (tf.function with
reduce_retracing; torch without a compiler), `compiled` (a form per size: jit_compile=True;
torch.compile(dynamic=False)), `dynamic` (what the framework has for that: jit_compile with
reduce_retracing; torch.compile(dynamic=True)), `buckets`, and `buckets again` (a second process,
with the records and caches of the first). With --json a run that was stopped goes on where it was.

Reported: seconds in all, forms that were compiled, seconds that compiling took, padding.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

WAYS = ("plain", "compiled", "dynamic", "buckets", "buckets again")
WIDTH, LAYERS = 256, 4


def sizes(steps: int) -> list[int]:
    """Batch sizes: 58 different ones where there are 60 steps."""
    chosen = random.Random(7).sample(range(40, 129), max(steps - 2, 1))
    return (chosen + chosen[:2])[:steps]


def in_tensorflow(way: str, steps: int) -> dict[str, Any]:
    """One process: a training step of a small tower, optimizer included."""
    import tensorflow as tf

    from evener.compile import Options
    from evener.compile.tensorflow import bucketed, keep

    if way.startswith("buckets"):
        keep()
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(WIDTH, "gelu") for _ in range(LAYERS)]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])
    model.build((None, WIDTH))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    traces = 0

    def step(x: Any, y: Any, weights: Any = None) -> Any:
        nonlocal traces
        traces += 1
        with tf.GradientTape() as tape:
            each = tf.reduce_mean(tf.square(model(x) - y), 1)
            weights = tf.ones_like(each) if weights is None else weights
            loss = tf.reduce_sum(each * weights) / tf.reduce_sum(weights)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    if way.startswith("buckets"):
        run: Any = bucketed(step, mask="weights", name="step", options=Options())
    else:
        jit = True if way != "plain" else None
        run = tf.function(step, jit_compile=jit, reduce_retracing=way != "compiled")
    seconds, loss = timed(lambda size: run(tf.ones([size, WIDTH]), tf.ones([size, 1])), steps)
    found = {"seconds": seconds, "loss": loss, "traces": traces}
    if way in ("compiled", "dynamic"):
        found["forms"] = len(set(sizes(steps)))  # XLA compiles a module per size
    return described(found, run if way.startswith("buckets") else None)


def in_torch(way: str, steps: int) -> dict[str, Any]:
    """One process: forward and backward pass of a small tower, and the optimizer's step."""
    import torch
    from torch import nn
    from torch._dynamo.utils import counters

    from evener.compile.torch import bucketed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    forward: Any = model
    if way == "compiled":
        torch._dynamo.config.recompile_limit = 1000
        forward = torch.compile(model, dynamic=False)
    if way == "dynamic":
        forward = torch.compile(model, dynamic=True)
    if way.startswith("buckets"):
        bucketed(model, name="tower")

    def step(size: int) -> Any:
        optimizer.zero_grad()
        loss = (forward(torch.ones(size, WIDTH)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    seconds, loss = timed(step, steps)
    found = {"seconds": seconds, "loss": loss, "forms": counters["stats"]["unique_graphs"]}
    return described(found, model.forward if way.startswith("buckets") else None)


def timed(step: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Seconds of all steps, and the last loss."""
    begun = time.perf_counter()
    loss = 0.0
    for size in sizes(steps):
        loss = float(step(size))
    return time.perf_counter() - begun, loss


def described(found: dict[str, Any], function: Any) -> dict[str, Any]:
    """With what the buckets did."""
    if function is None:
        return found
    begun = time.perf_counter()
    function.wait()
    found["waited"] = time.perf_counter() - begun
    function.save()
    (said,) = function.report().values()
    buckets = said["buckets"]
    made = [b for b in buckets if b["status"] == "ready" or b["calls"]]
    calls = [b for b in buckets if b["calls"]]
    rows = sum(b["rows"] for b in calls)
    found["forms"] = len(made)
    found["compile_seconds"] = sum(b["compile_seconds"] for b in made)
    found["compiled_calls"] = sum(b["calls"] for b in calls)
    found["padding"] = sum(b["edge"] * b["calls"] for b in calls) / rows - 1 if rows else 0.0
    found["off"] = said["off"]
    found["buckets"] = buckets
    return found


def process(framework: str, way: str, steps: int, folder: Path) -> dict[str, Any]:
    """Measure in a new process."""
    mine = folder if way.startswith("buckets") else folder / way
    environment = {
        "EVENER_COMPILE_DIR": str(mine),
        "TORCHINDUCTOR_CACHE_DIR": str(mine / "inductor"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    words = ("--one", framework, way, "--steps", str(steps))
    job = harness.again(*words, env=environment, limit=900)
    if not job.said:
        sys.exit(f"error: {framework}, {way} gave no result: {job.failed}")
    return job.row


def main() -> None:
    """Run all, print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--framework", choices=["tensorflow", "torch"], action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cache", type=Path, help="a folder for records and caches")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure = {"tensorflow": in_tensorflow, "torch": in_torch}[given.one[0]]
        found = measure(given.one[1], given.steps)
        # Of the whole process, with its imports: other work on the machine disturbs it little.
        harness.say(**found, cpu_seconds=time.process_time())
        return
    kept = harness.Kept(given, ["tensorflow_cpu"])
    with tempfile.TemporaryDirectory(prefix="compile-buckets-") as scratch:
        for framework in given.framework or ["tensorflow", "torch"]:
            folder = (given.cache or Path(scratch)) / framework
            for way in given.way or WAYS:
                name = f"{framework}, {way}"
                told = (framework, way, given.steps, folder)
                run = kept.get(name, lambda told=told: process(*told))
                print(name, {k: v for k, v in run.items() if k != "buckets"}, flush=True)
    keys = ("seconds", "forms", "compile_seconds", "padding")
    rows = ([name, *(run.get(key) for key in keys)] for name, run in kept.rows.items())
    print(harness.show(["", "seconds", "forms", "of that compiling", "padding"], rows))


if __name__ == "__main__":
    main()
