"""What this machine does, measured in about two seconds: copies in each direction, the fused CPU
optimizer alone and while copies go on, matrix products. Nothing is assumed from a data sheet."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evener.base import optimizers as _optimizers
from evener.zero.budget import resident_now
from evener.zero.chunk import Chunk, Run
from evener.zero.device import CudaDevice, Device, SimulatedDevice
from evener.zero.host import HostMemory, pages
from evener.zero.lanes import Lanes, Update, measure, threads_for
from evener.zero.planner import Machine
from evener.zero.rules import AdamW
from evener.zero.states import States
from evener.zero.units import Group

MODULES = 256 << 20
"""Accelerator memory of kernels that are loaded after the probe."""

LIBRARIES = 750_000_000
"""Host memory of what a first step loads: the pages of libraries whose kernels it calls, autograd's
threads. 0.55 to 0.60 GB with Evener's own model (benchmarks/results/zero_gpu.json), 0.68 to 0.96
with models of transformers (benchmarks/results/zero_zoo.json)."""

STEP = 350_000_000
"""What is left of that once units have run (`rehearsal`): 0.19 to 0.39 GB on a H200."""

COLLECTIVES = 360_000_000
"""Host memory that NCCL takes in a first step besides, where there are several ranks: measured on
each of four GPUs, benchmarks/results/zero_x4.json."""


@dataclass(frozen=True)
class Probe:
    """Figures by name: bytes/s, parameters/s, FLOP/s."""

    machine: Machine
    host_adam_alone: float
    device: str
    threads: int
    instructions: str

    def lines(self) -> list[str]:
        """For people."""
        m = self.machine
        busy = m.host_adam / self.host_adam_alone
        return [
            f"accelerator      {self.device}, {m.flops / 1e12:.2f} TFLOP/s in matrix products",
            f"host to device   {m.h2d / 1e9:.1f} GB/s",
            f"device to host   {m.d2h / 1e9:.1f} GB/s",
            f"host optimizer   {self.host_adam_alone / 1e9:.2f} G parameters/s on {self.threads} "
            f"threads ({self.instructions}), {busy:.0%} of it while copies go on",
            f"an operation     {m.launch * 1e6:.0f} us at least, {m.launch_beside * 1e6:.0f} us "
            "while the host's optimizer works",
            *(
                [f"and streaming    {m.balanced / 1e9:.2f} G parameters/s with the accelerator"]
                if m.balanced
                else []
            ),
        ]


def _median(call: Callable[[], None], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def probe(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    moments: torch.dtype = torch.float32,
    elements: int = 0,
    threads: int = 0,
    meet: Callable[[], None] = lambda: None,
) -> Probe:
    """Measure. On the CPU the simulated device is measured: its copies are copies in memory.
    `meet`: called before each figure that ranks of one host share; with a barrier of those ranks
    each gets its part and not the whole."""
    found = _probe(device, dtype, moments, elements, threads, meet)
    if device.type != "cuda":
        return found
    torch.cuda.empty_cache()
    several = dist.is_initialized() and dist.get_world_size() > 1
    reserve = resident_now() + LIBRARIES + (COLLECTIVES if several else 0)
    machine = dataclasses.replace(found.machine, host_reserve=reserve)
    return dataclasses.replace(found, machine=machine)


def _probe(
    device: torch.device,
    dtype: torch.dtype,
    moments: torch.dtype,
    elements: int,
    threads: int,
    meet: Callable[[], None],
) -> Probe:
    cuda = device.type == "cuda"
    # On the CPU a second must do, and bf16 products there are emulated: float32 instead.
    elements = elements or (96 << 20 if cuda else 2 << 20)
    dtype = dtype if cuda else torch.float32

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    accelerator: Device = CudaDevice(device.index) if cuda else SimulatedDevice()
    n = elements
    sizes = (2, 2, 2, moments.itemsize, moments.itemsize)
    host = HostMemory(sum(pages(n, size) for size in sizes), pin=cuda)
    weights, lower = host.tensor(n, torch.bfloat16), host.tensor(n, torch.int16)
    first, second = host.tensor(n, moments), host.tensor(n, moments)
    gradient = host.tensor(n, torch.bfloat16)
    few = min(n, 32 << 20)  # on the accelerator: a probe must not need more than a small budget
    there = torch.zeros(few, dtype=torch.bfloat16, device=device)
    window = gradient[:few]

    def copy_in() -> None:
        there.copy_(window, non_blocking=True)
        sync()

    def copy_out() -> None:
        window.copy_(there, non_blocking=True)
        sync()

    rule = AdamW()
    states = States(weights, lower, None, first, second)
    flat = torch.empty(0, dtype=torch.bfloat16, device=device)
    group = Group("probe", 0)

    def rates(streaming: bool, meet: Callable[[], None] = meet) -> tuple[float, float]:
        lanes = Lanes(rule, accelerator, streaming=streaming, slice_numel=n // 32)
        if threads:
            lanes.threads = threads
        chunk = Chunk(0, group, states, gradient, flat, False, False, flat)
        meet()
        try:
            return measure(lanes, [Update(chunk, rule.values, 1.0, [Run(0, n, 1)])])
        finally:
            lanes.close()

    there_states = States(
        there.clone(),
        torch.zeros(few, dtype=torch.int16, device=device),
        None,
        torch.zeros(few, dtype=moments, device=device),
        torch.zeros(few, dtype=moments, device=device),
    )
    hyper = rule.values

    def on_device() -> None:
        rule.on_device(there_states, there, hyper, 1, 1.0)
        sync()

    size = 4096 if cuda else 384
    a = torch.randn(size, size, device=device, dtype=dtype)

    def product() -> None:
        for _ in range(4):
            torch.mm(a, a)
        sync()

    meet()
    h2d, d2h = few * 2 / _median(copy_in), few * 2 / _median(copy_out)
    alone, _ = rates(False)
    cores, streamed = rates(True) if cuda else (0.0, 0.0)
    stop = threading.Event()

    def copies() -> None:
        accelerator.attach()
        # Weights come in while the optimizer runs: PCIe takes its part of the host's memory too.
        with accelerator.on("h2d"):
            other = torch.zeros(few, dtype=torch.bfloat16, device=device)
            while not stop.is_set():
                other.copy_(weights[:few], non_blocking=True)
                accelerator.record("h2d").synchronize()
                if not cuda:
                    stop.wait(0.01)

    beside = threading.Thread(target=copies, daemon=True)
    beside.start()
    try:
        together, _ = rates(False)
    finally:
        stop.set()
        beside.join()
    wide = torch.zeros(few // 4, dtype=torch.float32, device=device)
    small = torch.zeros(8, device=device)

    def stream() -> None:
        for _ in range(8):
            wide.add_(1.0)
        sync()

    def launches() -> None:
        for _ in range(500):
            small.add_(1.0)
        accelerator.record("compute").synchronize()  # not what the optimizer has on its streams

    bandwidth = 8 * 2 * wide.nbytes / _median(stream)
    launch = _median(launches, 3) / 500
    done = threading.Event()

    def optimizer() -> None:
        accelerator.attach()
        while not done.is_set():
            rates(cuda, meet=lambda: None)

    busy = threading.Thread(target=optimizer, daemon=True)
    busy.start()
    try:
        time.sleep(0.02)  # until the cores are at work
        launch_beside = _median(launches, 15) / 500
    finally:
        done.set()
        busy.join()
    flops = 4 * 2 * size**3 / _median(product)
    device_adam = few / _median(on_device)
    context = 0
    if cuda:
        free, total = torch.cuda.mem_get_info(device)
        # What the driver counts and the allocator does not: the context and its kernels, some of
        # which are loaded later. Other processes on this GPU are in it too, so it is bounded.
        context = min(total - free - torch.cuda.memory_reserved(device), 2 << 30) + MODULES
    # Model code reaches a part of what large square products do.
    machine = Machine(
        flops=0.75 * flops,
        h2d=h2d,
        d2h=d2h,
        host_adam=min(alone, together),
        device_adam=device_adam,
        reserve=context,
        balanced=cores + streamed,
        streamed=streamed,
        slack=0.12 if cuda else 0.0,
        # Operations of models are smaller, read what is strided, and go through autograd.
        bandwidth=0.7 * bandwidth,
        launch=2 * launch,
        launch_beside=2 * max(launch, launch_beside),
    )
    return Probe(
        machine,
        alone,
        torch.cuda.get_device_name(device) if cuda else "simulated in host memory",
        threads or threads_for(_optimizers.threads()),
        _optimizers.instruction_sets()[0],
    )
