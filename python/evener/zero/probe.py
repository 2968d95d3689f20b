"""What this machine does, measured in about two seconds: copies in each direction, the fused CPU
optimizer alone and while copies go on, matrix products. Nothing is assumed from a data sheet."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evener.base import optimizers as _optimizers
from evener.base.budget import resident_now
from evener.base.given import given
from evener.zero.chunk import Chunk, Run
from evener.zero.device import CudaDevice, Device, SimulatedDevice
from evener.zero.host import HostMemory
from evener.zero.lanes import Lanes, Update, measure, threads_for
from evener.zero.planner import Machine
from evener.zero.rules import AdamW
from evener.zero.states import BLOCK, stride
from evener.zero.store import PLACES, SMALL, Formats, states_of
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


@given
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
    bench = _Bench(device, dtype, moments, elements, threads)
    meet()
    h2d, d2h = bench.copies()
    alone, _ = bench.rates(False, meet)
    cores, streamed = bench.rates(True, meet) if cuda else (0.0, 0.0)
    with bench.copying():
        together, _ = bench.rates(False, meet)
    bandwidth, launch = bench.bandwidth(), bench.launch(3)
    with bench.optimizing():
        launch_beside = bench.launch(15)
    flops, device_adam = bench.flops(), bench.on_device()
    # Model code reaches a part of what large square products do.
    machine = Machine(
        flops=0.75 * flops,
        h2d=h2d,
        d2h=d2h,
        host_adam=min(alone, together),
        device_adam=device_adam,
        reserve=bench.context() if cuda else 0,
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


class _Bench:
    """The memory that a probe measures with, and a method for each figure. Rates are per second."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        moments: torch.dtype,
        elements: int,
        threads: int,
    ) -> None:
        self.device, self.threads = device, threads
        self.cuda = device.type == "cuda"
        self.accelerator: Device = CudaDevice(device.index) if self.cuda else SimulatedDevice()
        self.rule = AdamW()
        self.group = Group("probe", 0, rule=self.rule)
        # On the CPU a second must do, and bf16 products there are emulated: float32 instead.
        n = elements or (96 << 20 if self.cuda else 2 << 20)
        self.elements = n = -(-n // BLOCK) * BLOCK
        formats = Formats(torch.bfloat16, moments, torch.bfloat16)
        size = sum(formats.pages(n, True, PLACES))
        host = HostMemory(size, pin=self.cuda)

        def make(name: str, dtype: torch.dtype) -> torch.Tensor:
            count = n // stride(name)
            small = count * dtype.itemsize < SMALL
            return torch.zeros(count, dtype=dtype) if small else host.tensor(count, dtype)

        self.states, gradient = states_of(self.group, formats, make)
        assert gradient is not None
        self.weights, self.gradient = self.states.weights, gradient
        # On the accelerator few: a probe must not need more than a small budget.
        self.few = min(n, 32 << 20)
        self.there = torch.zeros(self.few, dtype=torch.bfloat16, device=device)
        self.states_there, _ = states_of(
            self.group,
            formats,
            lambda name, dtype: torch.zeros(self.few // stride(name), dtype=dtype, device=device),
        )
        self.size = 4096 if self.cuda else 384
        kind = dtype if self.cuda else torch.float32
        self.square = torch.randn(self.size, self.size, device=device, dtype=kind)

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def copies(self) -> tuple[float, float]:
        """Bytes to the accelerator, and back."""
        window = self.gradient[: self.few]

        def copy_in() -> None:
            self.there.copy_(window, non_blocking=True)
            self._sync()

        def copy_out() -> None:
            window.copy_(self.there, non_blocking=True)
            self._sync()

        return self.few * 2 / _median(copy_in), self.few * 2 / _median(copy_out)

    def rates(
        self, streaming: bool, meet: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """Parameters that the optimizer updates: on the host's cores, and by the streaming lane."""
        lanes = Lanes(self.accelerator, streaming=streaming, slice_numel=self.elements // 32)
        if self.threads:
            lanes.threads = self.threads
        flat = torch.empty(0, dtype=torch.bfloat16, device=self.device)
        chunk = Chunk(0, self.group, self.states, self.gradient, flat, False, False, flat)
        meet()
        try:
            run = [Run(0, self.elements, 1)]
            return measure(lanes, [Update(chunk, self.rule.values, 1.0, run)])
        finally:
            lanes.close()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, weights come in while the optimizer runs: PCIe takes its part of the host's
        memory too."""
        stop = threading.Event()

        def copies() -> None:
            self.accelerator.attach()
            with self.accelerator.on("h2d"):
                other = torch.zeros(self.few, dtype=torch.bfloat16, device=self.device)
                while not stop.is_set():
                    other.copy_(self.weights[: self.few], non_blocking=True)
                    self.accelerator.record("h2d").synchronize()
                    if not self.cuda:
                        stop.wait(0.01)

        with _beside(copies, stop):
            yield

    @contextlib.contextmanager
    def optimizing(self) -> Iterator[None]:
        """Inside, the optimizer runs."""
        done = threading.Event()

        def optimizer() -> None:
            self.accelerator.attach()
            while not done.is_set():
                self.rates(self.cuda)

        with _beside(optimizer, done):
            time.sleep(0.02)  # until the cores are at work
            yield

    def bandwidth(self) -> float:
        """Bytes of the accelerator's memory that are read or written."""
        wide = torch.zeros(self.few // 4, dtype=torch.float32, device=self.device)

        def stream() -> None:
            for _ in range(8):
                wide.add_(1.0)
            self._sync()

        return 8 * 2 * wide.nbytes / _median(stream)

    def launch(self, repeats: int) -> float:
        """Seconds that an operation takes at least."""
        small = torch.zeros(8, device=self.device)

        def launches() -> None:
            for _ in range(500):
                small.add_(1.0)
            # Not what the optimizer has on its streams.
            self.accelerator.record("compute").synchronize()

        return _median(launches, repeats) / 500

    def flops(self) -> float:
        """Operations of a square product."""

        def product() -> None:
            for _ in range(4):
                torch.mm(self.square, self.square)
            self._sync()

        return 4 * 2 * self.size**3 / _median(product)

    def on_device(self) -> float:
        """Parameters that the optimizer updates on the accelerator."""

        def update() -> None:
            self.rule.on_device(self.states_there, self.there, self.rule.values, 1, 1.0)
            self._sync()

        return self.few / _median(update)

    def context(self) -> int:
        """Bytes that the driver counts and the allocator does not: the context and its kernels,
        some of which are loaded later. Other processes on this GPU are in it too, so it is
        bounded."""
        free, total = torch.cuda.mem_get_info(self.device)
        return min(total - free - torch.cuda.memory_reserved(self.device), 2 << 30) + MODULES


@contextlib.contextmanager
def _beside(work: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    """Inside, `work` runs in a thread, until `stop` is set."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
