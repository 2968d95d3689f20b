"""The SSD tier beside fio on the same folder: rates, a step against its bound, the largest model.

    python benchmarks/zero_ssd.py FOLDER [--width 4096 --blocks 24] [--steps 4] [--json FILE]

1. Rates of the folder's disk: fio where it is installed (io_uring, O_DIRECT), else a loop of its
   own with pread and pwrite from as many threads as the queue is deep; the same block size and
   depth as the tier. Reads, writes, and both at once; beside them the tier's own figures.
2. A stack of blocks whose optimizer states are all in the file, trained for some steps: bytes per
   step against the plan, the rate while the optimizer works, and seconds per step against the bound
   backward + max(forward, bytes / rate of both at once). Forward and backward are timed alone.
3. The largest Llama shape that 24 GB of GPU and 64 GB of host memory hold, with and without a file:
   by plan. GB are 1e9 bytes.

The file takes 10 bytes per parameter: 8 x width^2 x blocks of them, and 2 GB more while rates are
measured. The default runs on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from zero_models import ran

from evener import zero
from evener.zero import ssd
from evener.zero.machines import imagine

GB = 1_000_000_000
BLOCK = 10 * ssd.BLOCK
"""Bytes that the tier moves at a time with float32 moments."""


class Block(nn.Module):
    """8 width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fio(folder: Path, size: int, seconds: float) -> dict[str, Any] | None:
    """Bytes/s by fio; None where it is not installed."""
    tool = shutil.which("fio")
    if tool is None:
        return None
    found: dict[str, Any] = {"by": "fio"}
    file = folder / ".evener-fio"
    try:
        for name, kind in (
            ("first", "write"),
            ("write", "write"),
            ("read", "read"),
            ("both", "rw"),
        ):
            run = subprocess.run(
                [
                    tool, "--name=evener", f"--filename={file}", f"--rw={kind}", f"--bs={BLOCK}",
                    f"--size={size // BLOCK * BLOCK}", f"--iodepth={ssd.BUFFERS}", "--direct=1",
                    "--ioengine=io_uring", f"--runtime={seconds}", "--output-format=json",
                    *(["--time_based"] if name != "first" else []),
                ],
                capture_output=True, text=True, check=True, timeout=120,
            )  # fmt: skip
            job = json.loads(run.stdout[run.stdout.index("{") :])["jobs"][0]
            if name != "first":
                found[name] = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
    finally:
        file.unlink(missing_ok=True)
    return found


def loop(folder: Path, size: int, seconds: float) -> dict[str, Any]:
    """The same by threads that call pread and pwrite on their own part of a file."""
    threads = ssd.BUFFERS
    count = max(1, size // BLOCK // threads)
    file = folder / ".evener-loop"
    flags = os.O_RDWR | os.O_CREAT
    try:
        handle = os.open(file, flags | os.O_DIRECT)
    except OSError:
        handle = os.open(file, flags)
    os.posix_fallocate(handle, 0, threads * count * BLOCK)
    moved = [0] * threads

    def work(number: int, write: Any, end: float) -> None:
        memory = mmap.mmap(-1, BLOCK)
        turn = 0
        while time.perf_counter() < end or turn < (count if end == 0 else 1):
            place = (number + threads * (turn % count)) * BLOCK
            if write(turn):
                moved[number] += os.pwrite(handle, memory, place)
            else:
                moved[number] += os.preadv(handle, [memory], place)
            turn += 1
            if end == 0 and turn == count:
                return

    found: dict[str, Any] = {"by": "a loop with pread and pwrite (fio is not installed)"}
    try:
        phases = {
            "first": lambda _: True,
            "write": lambda _: True,
            "read": lambda _: False,
            "both": lambda turn: turn % 2,
        }
        for name, write in phases.items():
            moved[:] = [0] * threads
            begun = time.perf_counter()
            end = 0.0 if name == "first" else begun + seconds
            pool = [threading.Thread(target=work, args=(n, write, end)) for n in range(threads)]
            for thread in pool:
                thread.start()
            for thread in pool:
                thread.join()
            found[name] = sum(moved) / (time.perf_counter() - begun)
    finally:
        os.close(handle)
        file.unlink()
    return found


def value_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Initial values, drawn where the model computes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if parameter.dim() < 2:
        return (torch.ones if name.endswith("weight") else torch.zeros)(
            parameter.shape, device=device
        )
    generator = torch.Generator(device).manual_seed(sum(name.encode()))
    return torch.randn(parameter.shape, device=device, generator=generator).mul_(0.01)


def train(folder: Path, width: int, blocks: int, steps: int, away: bool) -> dict[str, Any]:
    """Seconds per step, and what was moved."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with zero.empty_weights():
        model = Stack(width, blocks)
    numel = sum(p.numel() for p in model.parameters())
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "evener": {"device": device, "budget": {"ssd": f"{folder}:{12 * numel}B"}},
    }
    begun = time.perf_counter()
    engine, *_ = zero.initialize(
        model=model, config=config, weights=value_of, resident=set(),
        away={f"layers.{n}/0" for n in range(blocks)} if away else set(),
    )  # fmt: skip
    prepared = time.perf_counter() - begun
    x = torch.randn(1, 16 if device == "cpu" else 1024, width, device=device)

    def idle() -> None:
        engine.drain()
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(call: Any) -> float:
        idle()
        begun = time.perf_counter()
        call()
        idle()
        return time.perf_counter() - begun

    def pass_() -> None:
        loss = engine(x).float().square().mean()
        engine.backward(loss)

    def step() -> None:
        pass_()
        engine.step()

    def forward() -> None:
        engine(x)

    step()
    step()
    alone, both = [], []
    for _ in range(3):
        alone.append(timed(forward))
        both.append(timed(pass_))
        engine.zero_grad()
        engine.micro_steps = 0
    before = engine.memory()
    idle()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    idle()
    seconds = (time.perf_counter() - begun) / steps
    after = engine.memory()
    pass_()
    idle()
    begun = time.perf_counter()
    engine.step()
    engine.drain()
    optimizer = time.perf_counter() - begun
    found = {
        "parameters": numel,
        "prepared_s": prepared,
        "seconds": seconds,
        "forward": statistics.median(alone),
        "backward": max(0.0, statistics.median(both) - statistics.median(alone)),
        "optimizer": optimizer,
        "read_per_step": (after["ssd read"] - before["ssd read"]) / steps,
        "written_per_step": (after["ssd written"] - before["ssd written"]) / steps,
        "file": engine.store.ssd.size if engine.store.ssd else 0,
        "way": engine.store.ssd.way if engine.store.ssd else "",
    }
    engine.close()
    return found


def largest(with_ssd: bool, room: int) -> float:
    """Parameters of the largest Llama shape that fits 24 GB and 64 GB, by plan."""
    machine = imagine("a100-40gb,pcie4,ddr4-8ch").machine
    best = 0.0
    for layers in range(8, 400, 4):
        shape = {
            "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": layers,
            "num_attention_heads": 40, "vocab_size": 32000,
        }  # fmt: skip
        budget: dict[str, str | int] = {"gpu": "24GB", "host": "64GB"}
        if with_ssd:
            budget["ssd"] = f"/:{room}B"
        made = zero.plan(
            shape,
            config={"bf16": {"enabled": True}, "evener": {"checkpointing": "auto"}},
            budget=budget, batch=(1, 1024), machine=machine,
        )  # fmt: skip
        if not made.fits:
            break
        best = float(sum(place.numel for place in made.places))
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=float, default=2.0, help="GB of the file for the rates")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each rate")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.folder.is_dir():
        sys.exit(f"error: {given.folder} is no folder\n  fix: give one on the SSD")
    size = int(given.size * GB)
    record = ran()
    disk = fio(given.folder, size, given.seconds) or loop(given.folder, size, given.seconds)
    rates = ssd.measure(given.folder, size, given.seconds)
    record["disk"], record["tier"] = disk, vars(rates)
    print(f"disk by {disk['by']}; tier by {rates.way}; blocks of {BLOCK / 1e6:.1f} MB, depth "
          f"{ssd.BUFFERS}")  # fmt: skip
    for name in ("read", "write", "both"):
        mine = getattr(rates, name)
        print(f"  {name:6} {disk[name] / GB:6.2f} GB/s, tier {mine / GB:6.2f}: "
              f"{mine / disk[name]:.2f} x")  # fmt: skip
    row = train(given.folder, given.width, given.blocks, given.steps, True)
    moved = row["read_per_step"] + row["written_per_step"]
    row["rate"] = moved / row["optimizer"]
    for by, rate in (("disk", disk["both"]), ("tier", rates.both)):
        row[f"bound by the {by}"] = row["backward"] + max(row["forward"], moved / rate)
    record["training"] = row
    print(
        f"{row['parameters'] / 1e9:.2f} B parameters, file {row['file'] / GB:.2f} GB, per step "
        f"{row['read_per_step'] / GB:.3f} GB read and {row['written_per_step'] / GB:.3f} written "
        f"(plan {row['file'] / GB:.3f} each)\n"
        f"  optimizer {row['optimizer']:.2f} s at {row['rate'] / GB:.2f} GB/s: "
        f"{row['rate'] / disk['both']:.2f} x the disk's rate of both\n"
        f"  step {row['seconds']:.2f} s (forward {row['forward']:.2f}, backward "
        f"{row['backward']:.2f}); bound {row['bound by the disk']:.2f} s: "
        f"{row['seconds'] / row['bound by the disk']:.2f} x; by the tier's own rate "
        f"{row['bound by the tier']:.2f} s: {row['seconds'] / row['bound by the tier']:.2f} x"
    )
    small, large = largest(False, 0), largest(True, 4000 * GB)
    record["largest"] = {"without": small, "with": large}
    print(f"largest at 24 GB + 64 GB: {small / 1e9:.1f} B; with an SSD {large / 1e9:.1f} B: "
          f"{large / small:.2f} x")  # fmt: skip
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
