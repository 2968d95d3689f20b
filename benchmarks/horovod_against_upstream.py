"""How long a small all-reduce takes with upstream's Horovod and with Evener's, on one CPU machine.

    python benchmarks/horovod_against_upstream.py UPSTREAM_PYTHON --json out.json

UPSTREAM_PYTHON: as for scripts/differential_horovod.py. Two ranks, Gloo. A job of each library
runs the same calls, and the jobs take turns, so that a noisy machine is noisy for all; the figures
are medians of the turns' medians. Upstream sleeps HOROVOD_CYCLE_TIME between its cycles: it runs
with its own value, and with 0, where it does not sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (1, 1024, 65536)  # float32 values
BURST = 32
WARM = 100


def work(out: Path, calls: int) -> None:
    """One rank: microseconds a call, of the middle one."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()

    def one(size: int) -> Any:
        tensor = torch.zeros(size)
        return lambda _number: hvd.allreduce_(tensor, op=hvd.Sum, name=f"one {size}")

    def many(size: int) -> Any:
        """More names in turn than a schedule of Evener's may have: every call is negotiated."""
        tensor = torch.zeros(size)
        return lambda number: hvd.allreduce_(tensor, op=hvd.Sum, name=f"many {number % 97}")

    def burst(size: int) -> Any:
        tensors = [torch.zeros(size) for _ in range(BURST)]

        def call(_number: int) -> None:
            handles = [
                hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"burst {size} {index}")
                for index, tensor in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        return call

    cases = {f"one of {size}": one(size) for size in SIZES}
    cases["negotiated, one of 1"] = many(1)
    cases[f"{BURST} of 1024 at once"] = burst(1024)
    found = {}
    for name, call in cases.items():
        times = []
        for number in range(calls + WARM):
            began = time.perf_counter()
            call(number)
            times.append(time.perf_counter() - began)
        found[name] = statistics.median(times[WARM:]) * 1e6
    if hvd.rank() == 0:
        out.write_text(json.dumps(found))
    hvd.barrier()
    hvd.shutdown()


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", type=Path, help="of the environment with upstream's horovod")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=400, help="of each kind, in each turn")
    options = parser.parse_args()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = str(options.python.absolute())
    upstream = [str(options.python.parent / "horovodrun"), "-np", "2", "--gloo", python]
    launch = [sys.executable, "-m", "evener", "launch", "--horovod", "-np", "2", sys.executable]
    jobs: dict[str, tuple[list[str], dict[str, str]]] = {
        "evener": (launch, dict(os.environ)),
        "upstream": (upstream, plain),
        "upstream, cycle time 0": (upstream, {**plain, "HOROVOD_CYCLE_TIME": "0"}),
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        for _ in range(options.turns):
            for name, (command, env) in jobs.items():
                arguments = ["--work", str(out), str(options.calls)]
                words = [*command, str(Path(__file__).resolve()), *arguments]
                done = subprocess.run(words, env=env, cwd=scratch, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"error: {name}: status {done.returncode}\n{done.stderr[-3000:]}")
                turns[name].append(json.loads(out.read_text()))
    cases = list(turns["evener"][0])
    medians = {
        name: {case: round(statistics.median(turn[case] for turn in rows), 1) for case in cases}
        for name, rows in turns.items()
    }
    print(f"{'microseconds':24}" + "".join(f"{name:>26}" for name in jobs))
    for case in cases:
        print(f"{case:24}" + "".join(f"{medians[name][case]:>26.1f}" for name in jobs))
    if options.json:
        document = {
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "load": os.getloadavg()[0],
            "turns": options.turns,
            "calls": options.calls,
            "microseconds": medians,
            "all_turns": turns,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
