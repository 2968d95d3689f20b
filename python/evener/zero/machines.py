"""Machines that are not here, for `evener plan-memory --on`: by name from a table, or by numbers.

The table has what data sheets say of peak rates, and the memory that a CUDA program sees. What a
model gets of a peak is known from the probe of one H200 with PCIe 5
(benchmarks/results/zero_zoo.json): those shares are taken for all. They are assumptions and are
printed as such; on the machine itself `evener plan-memory` measures.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from evener.base.units import parse_size
from evener.errors import UsageError
from evener.zero.planner import Machine

MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. tflops: of dense bf16 products. hbm: GB/s. cores: multiprocessors. pcie: the
    generation, 16 lanes."""

    memory: int
    tflops: float
    hbm: float
    cores: int
    pcie: int


GPUS = {
    # NVIDIA's data sheets: A100 (2021), H100 and H200 (2024), A10, L4, L40S (2023), and the
    # white papers of GA102 and AD102 for the GeForce cards. Memory: as torch names it in public bug
    # reports ("GPU 0 has a total capacity of 23.52 GiB"), the least where drivers differ.
    # nvidia-smi shows 1 to 2% more, which the driver keeps: 24,564 MiB on an RTX 4090.
    "a100-40gb": Gpu(40335 * MIB, 312, 1555, 108, 4),
    "a100-80gb": Gpu(81049 * MIB, 312, 2039, 108, 4),
    "h100-80gb": Gpu(80998 * MIB, 989, 3350, 132, 5),
    "h100-pcie": Gpu(80998 * MIB, 756, 2000, 114, 5),
    "h200": Gpu(143073 * MIB, 989, 4800, 132, 5),
    "a10": Gpu(22507 * MIB, 125, 600, 72, 4),
    "l4": Gpu(22558 * MIB, 121, 300, 58, 4),
    "l40s": Gpu(45455 * MIB, 362, 864, 142, 4),
    "rtx3090": Gpu(24258 * MIB, 71, 936, 82, 4),
    "rtx4090": Gpu(24084 * MIB, 165, 1008, 128, 4),
}
PCIE = {3: 15.75, 4: 31.5, 5: 63.0}
"""GB/s each way of 16 lanes (PCI-SIG), by generation."""
DRAM = {"ddr4": 25.6, "ddr5": 38.4}
"""GB/s of a channel: DDR4-3200, DDR5-4800 (JEDEC)."""
DEFAULT = "a100-40gb,pcie4,ddr4-8ch"

# What the probe of an H200 found of its data sheet.
FLOPS, HBM, LINK, LAUNCH = 0.58, 0.66, 0.86, 1.4e-5
DEVICE_ADAM = 62.0
"""Bytes of the GPU's memory for a parameter that is updated there."""
HOST = 0.5
"""Share of the peak of all channels that an optimizer with copies beside it reaches; assumed."""
HOST_ADAM = 26.0
"""Bytes of host memory for a parameter that the cores update (docs/benchmarks/memory.md)."""
SSD = 3.0
"""GB/s that an NVMe disk with PCIe 4 reads and writes at once, without end; assumed."""
CONTEXT = 1_000_000_000
"""Bytes that CUDA and its kernels take: 0.92 to 0.99 GB on an H200."""
PROCESS = 1_500_000_000
"""Bytes of host memory that a training process takes without the model."""


@dataclass(frozen=True)
class Imagined:
    """A machine, the GPU's memory in bytes, and in words what was assumed."""

    machine: Machine
    memory: int
    words: list[str]


def imagine(text: str) -> Imagined:
    """From `a100-40gb,pcie4,ddr4-8ch` (the last two may be left out), or from numbers:
    `gpu=40GB,tflops=312,hbm=1555,pcie=31.5,dram=205,ssd=3` (GB/s of the peaks; of the SSD what it
    reads and writes at once). Names and numbers may be mixed: a number wins. Raises UsageError."""
    gpu: Gpu | None = None
    link = dram = 0.0
    numbers: dict[str, str] = {}
    for part in (p.strip().lower() for p in text.split(",")):
        if "=" in part:
            key, _, value = part.partition("=")
            numbers[key] = value
        elif part in GPUS:
            gpu = GPUS[part]
        elif part.startswith("pcie") and part[4:].isdigit() and int(part[4:]) in PCIE:
            link = PCIE[int(part[4:])]
        elif (channels := _channels(part)) > 0:
            dram = channels
        else:
            known = [*GPUS, *(f"pcie{n}" for n in PCIE), "ddr4-8ch", "ddr5-8ch"]
            near = difflib.get_close_matches(part, known, n=1)
            fix = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"machine {part!r} is not known",
                f"{fix}known: {', '.join(known)}; or gpu=40GB,tflops=312,hbm=1555",
            )
    if unknown := set(numbers) - {"gpu", "tflops", "hbm", "pcie", "dram", "ssd"}:
        raise UsageError(
            f"machine {', '.join(sorted(unknown))} is not known",
            "give gpu=40GB, tflops=, hbm=, pcie=, dram=, ssd= (GB/s)",
        )
    gpu = _given(gpu, numbers, text)
    link = _number(numbers, "pcie", link or PCIE[gpu.pcie])
    dram = _number(numbers, "dram", dram or 8 * DRAM["ddr5" if gpu.pcie == 5 else "ddr4"])
    return _made(gpu, link, dram, _number(numbers, "ssd", SSD))


def _channels(part: str) -> float:
    """GB/s of `ddr4-8ch`; 0 where it is none."""
    kind, _, count = part.partition("-")
    if kind in DRAM and count.endswith("ch") and count[:-2].isdigit():
        return DRAM[kind] * int(count[:-2])
    return 0.0


def _number(numbers: dict[str, str], key: str, default: float) -> float:
    try:
        value = float(numbers.get(key, default))
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UsageError(f"machine {key}={numbers[key]} is not a number", "give one above 0")
    return value


def _given(gpu: Gpu | None, numbers: dict[str, str], text: str) -> Gpu:
    if gpu is None:
        lacks = [key for key in ("gpu", "tflops", "hbm") if key not in numbers]
        if lacks:
            raise UsageError(
                f"machine {text!r} names no GPU", f"name one, or give {', '.join(lacks)} too"
            )
        gpu = Gpu(0, 0.0, 0.0, 108, 4)
    memory = gpu.memory
    if "gpu" in numbers:
        try:
            memory = parse_size(numbers["gpu"].upper())
        except ValueError:
            raise UsageError(f"machine gpu={numbers['gpu']} is not a size", "gpu=40GB") from None
    return dataclasses.replace(
        gpu,
        memory=memory,
        tflops=_number(numbers, "tflops", gpu.tflops),
        hbm=_number(numbers, "hbm", gpu.hbm),
    )


def _made(gpu: Gpu, link: float, dram: float, ssd: float) -> Imagined:
    machine = Machine(
        flops=FLOPS * gpu.tflops * 1e12,
        h2d=LINK * link * 1e9,
        d2h=LINK * link * 1e9,
        host_adam=HOST * dram * 1e9 / HOST_ADAM,
        device_adam=gpu.hbm * 1e9 / DEVICE_ADAM,
        reserve=CONTEXT,
        slack=0.12,
        host_reserve=PROCESS,
        bandwidth=HBM * gpu.hbm * 1e9,
        launch=LAUNCH,
        cores=gpu.cores,
        ssd=ssd * 1e9,
    )
    words = [
        f"GPU {gpu.memory / 1e9:.1f} GB, {gpu.tflops:g} TFLOP/s bf16, {gpu.hbm:g} GB/s: "
        f"{FLOPS:.0%} and {HBM:.0%} of these are reached",
        f"PCIe {link:g} GB/s each way: {LINK:.0%} is reached",
        f"host memory {dram:.0f} GB/s: {HOST:.0%} is reached, so the cores update "
        f"{machine.host_adam / 1e9:.2f} G parameters/s",
        "shares are those of one H200 with PCIe 5; nothing was measured here",
    ]
    return Imagined(machine, gpu.memory, words)
