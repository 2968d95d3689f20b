"""What one all-reduce costs in `horovod.tensorflow` beside `horovod.torch`: two ranks, loopback.

    python benchmarks/horovod_tensorflow.py [--repeats 3] [--json FILE]

For each size: the median time of a waiting all-reduce (eager), the doors in turns, several times,
and the ratio of the medians of all turns. For TensorFlow the same in a tf.function too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIZES = (4, 4096, 262144, 4 << 20)
CALLS = {4: 600, 4096: 600, 262144: 150, 4 << 20: 25}


def rank(door: str) -> None:
    """One rank: prints seconds by size."""
    found: dict[str, float] = {}
    if door == "torch":
        import torch

        import evener.horovod.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        for size in SIZES:
            call = functools.partial(hvd.allreduce, torch.ones(size // 4), name="x", op=hvd.Sum)
            found[str(size)] = timed(call, CALLS[size])
    else:
        import tensorflow as tf

        import evener.horovod.tensorflow as hvd

        hvd.init()
        for size in SIZES:
            data = tf.ones([size // 4])
            graph = tf.function(functools.partial(hvd.allreduce, op=hvd.Sum, name="y"))
            eager = functools.partial(hvd.allreduce, data, op=hvd.Sum)
            found[str(size)] = timed(eager, CALLS[size])
            found[f"{size} graph"] = timed(functools.partial(graph, data), CALLS[size])
    if hvd.rank() == 0:
        print("RESULT", json.dumps(found), flush=True)
    hvd.shutdown()


def timed(call: object, calls: int) -> float:
    """The median seconds of a call."""
    times = []
    for number in range(calls + 20):
        begun = time.perf_counter()
        call()  # type: ignore[operator]
        if number >= 20:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def world(door: str) -> dict[str, float]:
    """Two ranks of a door."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(2):
        environment = {
            **os.environ,
            "HOROVOD_RANK": str(number),
            "HOROVOD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        command = [sys.executable, __file__, "--rank", door]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    texts = [process.communicate(timeout=120)[0] for process in processes]
    line = next(line for line in texts[0].splitlines() if line.startswith("RESULT"))
    return dict(json.loads(line.removeprefix("RESULT ")))


def main() -> None:
    """Run both in turns, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return
    runs: dict[str, list[dict[str, float]]] = {"torch": [], "tensorflow": []}
    for _ in range(options.repeats):
        for door, found in runs.items():
            found.append(world(door))
    print(
        "| bytes | torch, us | TensorFlow, us | in a function, us | ratio |\n|---|---|---|---|---|"
    )
    for size in map(str, SIZES):

        def median(door: str, key: str) -> float:
            return 1e6 * statistics.median(run[key] for run in runs[door])

        torch, eager = median("torch", size), median("tensorflow", size)
        graph = median("tensorflow", f"{size} graph")
        print(f"| {size} | {torch:.0f} | {eager:.0f} | {graph:.0f} | {eager / torch:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
