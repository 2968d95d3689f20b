"""A training step of a VGG-like model in `horovod.tensorflow` over a slow network.

    python benchmarks/horovod_tensorflow_vgg.py [--spec 2x2@300mbit] [--steps 6] [--json FILE]

Four ranks on two simulated hosts (`evener lab`, as root). Each way is measured in the same
processes, one after the other: hvd ends, the LIGHT_* variables are set, and hvd begins again.

    alone        no exchange: what computing costs
    flat         as it is: a ring over all ranks
    2-D          LIGHT_2D_ALLREDUCE=1
    2-D + top-k  and LIGHT_TOPK_ALLREDUCE=1, 1% of the entries

Beside the time of a step: the least time in which the bytes of a ring all-reduce (2 (n - 1) / n of
the gradients, what Gloo sends too) pass the link between the nodes, and what share of that a step
reaches. Then, in torch and a lab of the same sort, how long Gloo takes to all-reduce as many bytes
as one tensor. Made data; SGD; `DistributedGradientTape` in a tf.function.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evener.tools.lab import Spec

WAYS: dict[str, dict[str, str]] = {
    "alone": {},
    "flat": {},
    "2-D": {"LIGHT_2D_ALLREDUCE": "1"},
    "2-D + top-k": {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_TOPK_ALLREDUCE": "1"},
}
BATCH = 4


def rank(steps: int) -> None:
    """One rank of the lab: prints seconds per step by way."""
    import tensorflow as tf

    import evener.horovod.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers: list[Any] = []
    for filters in (16, 32, 64):  # three blocks of convolutions, and most weights behind them
        layers += [tf.keras.layers.Conv2D(filters, 3, padding="same", activation="relu")]
        layers += [tf.keras.layers.MaxPooling2D()]
    layers += [tf.keras.layers.Flatten(), tf.keras.layers.Dense(4096, "relu")]
    layers += [tf.keras.layers.Dense(2048, "relu"), tf.keras.layers.Dense(1000)]
    model = tf.keras.Sequential(layers)
    model.build((None, 32, 32, 3))
    found: dict[str, Any] = {"bytes": 4 * model.count_params(), "ways": {}}
    x, y = tf.random.normal([BATCH, 32, 32, 3]), tf.zeros([BATCH], tf.int32)
    for way, variables in WAYS.items():
        os.environ.update(variables)
        hvd.init()
        step = stepper(tf, hvd, model, way != "alone")
        times = []
        for number in range(steps + 2):
            hvd.allreduce(tf.zeros(1))  # all begin together
            begun = time.perf_counter()
            float(step(x, y))
            if number >= 2:
                times.append(time.perf_counter() - begun)
        found["ways"][way] = times
        found["size"] = hvd.size()
        mine = hvd.rank()
        hvd.shutdown()
    if mine == 0:
        print("RESULT", json.dumps(found), flush=True)


def gloo(count: int, steps: int) -> None:
    """One rank of another lab: prints seconds per all-reduce of `count` bytes by torch's Gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, times = torch.zeros(count // 4), []
    for number in range(steps + 1):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(data)
        if number:
            times.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(times), flush=True)
    dist.destroy_process_group()


def stepper(tf: Any, hvd: Any, model: Any, reduced: bool) -> Any:
    """A training step, traced anew for each way."""
    variables = model.trainable_variables

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_mean(each)
        if reduced:
            tape = hvd.DistributedGradientTape(tape)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(1e-4 * gradient)
        return loss

    return step


def lab(spec: str, *arguments: str) -> Any:
    """What rank 0 of this script gives in a lab."""
    command = [sys.executable, "-m", "evener", "lab", "run", "--spec", spec, "--no-prefix"]
    command += ["--timeout", "540"]
    for name, value in {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "EVENER_LOG": "warning",
        "EVENER_GUARD_RESIDUAL": "100",  # SGD's: here is no optimizer that the guard could find
    }.items():
        command += ["--env", f"{name}={value}"]
    command += [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"error: the lab ended with {done.returncode} and gave no result\n{done.stdout}")
    return json.loads(line.removeprefix("RESULT "))


def main() -> None:
    """Run the labs, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--spec", default="2x2@300mbit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rank:
        rank(options.steps)
        return
    if options.gloo:
        gloo(options.gloo, options.steps)
        return
    rate = Spec.parse(options.spec).link_rate
    if rate is None:
        parser.error(f"--spec {options.spec} names no rate: give 2x2@300mbit")
    steps = ("--steps", str(options.steps))
    found = lab(options.spec, "--rank", *steps)
    beside = lab(options.spec, "--gloo", str(found["bytes"]), *steps)
    size = found["size"]
    bound = 2 * (size - 1) / size * found["bytes"] * 8 / rate
    median = {way: statistics.median(times) for way, times in found["ways"].items()}
    print(f"{found['bytes'] / 1e6:.1f} MB of gradients, {size} ranks, {options.spec}")
    print(f"the bytes of a ring take {bound:.2f} s at least")
    print(f"torch's Gloo, the all-reduce alone: {statistics.median(beside):.2f} s\n")
    print("| way | seconds per step | of the ring's bound | times flat |\n|---|---:|---:|---:|")
    for way, seconds in median.items():
        share = "" if way == "alone" else f"{bound / seconds:.2f}"
        print(f"| {way} | {seconds:.2f} | {share} | {median['flat'] / seconds:.2f} |")
    if options.json:
        from importlib import metadata

        document = {
            "spec": options.spec,
            "batch": BATCH,
            "bound_seconds": bound,
            "python": platform.python_version(),
            "evener": metadata.version("evener"),
            "load": os.getloadavg()[0],
            "gloo": beside,
            **found,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
