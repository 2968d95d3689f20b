"""60 training steps with 58 batch sizes: compiled per size, by shape buckets, or not at all.

    python benchmarks/compile_buckets.py [--framework tensorflow|torch] [--steps 60] [--json FILE]

For each framework and each way a process of its own: `plain` (tf.function with
reduce_retracing; torch without a compiler), `compiled` (a form per size: jit_compile=True;
torch.compile(dynamic=False)), `dynamic` (what the framework has for that: jit_compile with
reduce_retracing; torch.compile(dynamic=True)), `buckets`, and `buckets again` (a second process,
with the records and caches of the first). With --json a run that was stopped goes on where it was.
--part 1/2 and 2/2 measure a long way (`compiled`) in two processes, whose times add up.

Reported: seconds in all, forms that were compiled, seconds that compiling took, padding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("plain", "compiled", "dynamic", "buckets", "buckets again")
WIDTH, LAYERS = 256, 4
PART = "COMPILE_BUCKETS_PART"  # for the processes that this starts


def sizes(steps: int) -> list[int]:
    """Batch sizes: 58 different ones where there are 60 steps."""
    chosen = random.Random(7).sample(range(40, 129), max(steps - 2, 1))
    part, parts = map(int, os.environ.get(PART, "1/1").split("/"))
    return (chosen + chosen[:2])[:steps][part - 1 :: parts]


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
    seconds, loss = timed(
        lambda size: run(tf.ones([size, WIDTH]), tf.ones([size, 1])), steps, lambda out: float(out)
    )
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

    seconds, loss = timed(step, steps, lambda out: float(out))
    found = {"seconds": seconds, "loss": loss, "forms": counters["stats"]["unique_graphs"]}
    return described(found, model.forward if way.startswith("buckets") else None)


def timed(
    step: Callable[[int], Any], steps: int, number: Callable[[Any], float]
) -> tuple[float, float]:
    """Seconds of all steps, and the last loss."""
    begun = time.perf_counter()
    loss = 0.0
    for size in sizes(steps):
        loss = number(step(size))
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


def process(framework: str, way: str, steps: int, folder: Path, part: str) -> dict[str, Any]:
    """Measure in a new process."""
    mine = folder if way.startswith("buckets") else folder / way
    environment = {
        **os.environ,
        "EVENER_COMPILE_DIR": str(mine),
        "TORCHINDUCTOR_CACHE_DIR": str(mine / "inductor"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        PART: part,
    }
    command = [sys.executable, __file__, "--one", framework, way, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    sys.exit(f"error: {framework}, {way} gave no result\n{done.stderr[-2000:]}")


def versions() -> dict[str, str]:
    """What the results depend on, without importing it."""
    from importlib import metadata

    names = ("evener", "torch", "tensorflow_cpu")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


def main() -> None:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=["tensorflow", "torch"], action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--part", default="1/1", help="I/N: every Nth step, from the Ith")
    parser.add_argument("--cache", type=Path, help="a folder for records and caches")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure = {"tensorflow": in_tensorflow, "torch": in_torch}[options.one[0]]
        found = measure(options.one[1], options.steps)
        # Of the whole process, with its imports: other work on the machine disturbs it little.
        found["cpu_seconds"] = time.process_time()
        print("RESULT", json.dumps(found), flush=True)
        return
    document: dict[str, Any] = {**versions(), "steps": options.steps, "runs": {}}
    if options.json and options.json.exists():
        document = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="compile-buckets-") as scratch:
        for framework in options.framework or ["tensorflow", "torch"]:
            folder = (options.cache or Path(scratch)) / framework
            for way in options.way or WAYS:
                name = f"{framework}, {way}"
                name += "" if options.part == "1/1" else f", part {options.part}"
                if name not in document["runs"]:
                    document["runs"][name] = process(
                        framework, way, options.steps, folder, options.part
                    )
                    if options.json:
                        options.json.write_text(json.dumps(document, indent=1) + "\n")
                print(name, {k: v for k, v in document["runs"][name].items() if k != "buckets"})
    print("\n| | seconds | forms | of that compiling | padding |\n|---|---:|---:|---:|---:|")
    for name, run in document["runs"].items():
        took, padding = run.get("compile_seconds"), run.get("padding")
        print(
            f"| {name} | {run['seconds']:.1f} | {run.get('forms', 0)} | "
            f"{'' if took is None else f'{took:.1f}'} | "
            f"{'' if padding is None else f'{padding:.0%}'} |"
        )


if __name__ == "__main__":
    main()
