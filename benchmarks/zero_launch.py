"""What it costs to launch a small operation while the optimizer works on the host.

    python benchmarks/zero_launch.py [--seconds 1] [--json FILE]

A model of many small operations (T5, Whisper, ViT) is as fast as one thread can launch them. In the
forward pass that thread shares cores, memory and Python's lock with the optimizer's lanes. Each row
is one setting of the lanes: microseconds per operation of a loop of one small addition, and of the
forward pass of a small transformer block with autograd, each x what it is on an idle machine; and
what the optimizer still reaches meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.base import optimizers as _optimizers
from evener.zero.chunk import Chunk, Run
from evener.zero.device import CudaDevice, SimulatedDevice
from evener.zero.host import HostMemory, pages
from evener.zero.lanes import Lanes, Update, threads_for
from evener.zero.rules import AdamW
from evener.zero.states import States
from evener.zero.units import Group

OPERATIONS = 200


class Work:
    """An optimizer's step that is begun again and again, until it is stopped."""

    def __init__(self, numel: int, streaming: bool, threads: int, sleeps: bool) -> None:
        cuda = torch.cuda.is_available()
        device = CudaDevice(sleeps=sleeps) if cuda else SimulatedDevice()
        host = HostMemory(sum(pages(numel, size) for size in (2, 2, 2, 4, 4)), pin=cuda)
        kinds = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
        weights, lower, first, second, gradient = (host.tensor(numel, kind) for kind in kinds)
        states = States(weights, lower, None, first, second)
        flat = torch.empty(0, dtype=torch.bfloat16, device=device.device)
        chunk = Chunk(0, Group("all", 0), states, gradient, flat, False, False, flat)
        self._update = Update(chunk, AdamW().values, 1.0, [Run(0, numel, 1)])
        self._lanes = Lanes(AdamW(), device, streaming=streaming)
        self._lanes.threads = threads
        self._numel, self._stop, self.rates = numel, threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._update.chunk.updated.clear()
            begun = time.perf_counter()
            self._lanes.put([self._update])
            self._lanes.wait()
            self.rates.append(self._numel / (time.perf_counter() - begun))

    def close(self) -> float:
        """Stop; parameters/s that it reached."""
        self._stop.set()
        self._thread.join()
        self._lanes.close()
        return statistics.median(self.rates)


def measure(seconds: float) -> tuple[float, float]:
    """Microseconds per operation: of the loop, and of the block."""
    cuda = torch.cuda.is_available()
    where = "cuda" if cuda else "cpu"
    small = torch.zeros(8, device=where)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=where)
    x = torch.randn(2, 16, 64, device=where)

    def loop() -> None:
        for _ in range(OPERATIONS):
            small.add_(1.0)

    def forward() -> None:
        for _ in range(8):
            block(x)

    found = []
    for call, count in ((loop, OPERATIONS), (forward, 8 * 30)):
        call()
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 5:
            begun = time.perf_counter()
            call()
            if cuda:
                torch.cuda.current_stream().synchronize()  # not the lanes' streams
            times.append((time.perf_counter() - begun) / count)
        found.append(1e6 * statistics.mean(times))
    return found[0], found[1]


def yield_cores() -> None:
    """The optimizer's threads run only where nobody else wants the core."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("evener-cpu"):
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    cpus, usual = _optimizers.threads(), threads_for(_optimizers.threads())
    numel = 96 << 20 if cuda else 4 << 20
    idle = measure(given.seconds)
    rows: list[dict[str, Any]] = [{"lanes": "idle", "loop_us": idle[0], "block_us": idle[1]}]
    usual_switch = sys.getswitchinterval()
    settings = [(False, usual, usual_switch), (cuda, usual, usual_switch), (cuda, usual, 2e-4)]
    settings += [(cuda, count, usual_switch) for count in (cpus - 4, cpus // 2) if count > 0]
    rounds = [(*setting, False, False) for setting in dict.fromkeys(settings)]
    if cuda:
        rounds.append((cuda, usual, usual_switch, True, False))
        rounds.append((cuda, max(1, cpus - 4), usual_switch, True, False))
    # The last one: who is not root cannot take it back.
    rounds.append((cuda, usual, usual_switch, False, True))
    for streaming, threads, switch, sleeps, nice in rounds:
        sys.setswitchinterval(switch)
        work = Work(numel, streaming, threads, sleeps)
        if nice:
            yield_cores()
        loop, block = measure(given.seconds)
        rate = work.close()
        sys.setswitchinterval(usual_switch)
        name = f"{threads} threads{', streaming lane' if streaming else ''}"
        name += f", switch {1e3 * switch:g} ms{', nice' if nice else ''}"
        name += ", lanes sleep" if sleeps else ""
        rows.append({"lanes": name, "loop_us": loop, "block_us": block, "rate": rate})
    print(f"{cpus} cores; {'CUDA' if cuda else 'CPU'}")
    for row in rows:
        rate = f"{row['rate'] / 1e9:6.2f} G parameters/s" if "rate" in row else ""
        print(
            f"{row['lanes']:44} loop {row['loop_us']:7.1f} us ({row['loop_us'] / idle[0]:5.2f} x), "
            f"block {row['block_us']:7.1f} us ({row['block_us'] / idle[1]:5.2f} x)  {rate}"
        )
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
