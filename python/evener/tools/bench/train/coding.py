"""What encoding and decoding cost a step on a GPU: the time of Evener's own kernels.

After a run has been measured, a few more steps are taken under torch's profiler, on rank 0. Counted
are the kernels of `evener.comm.codecs.triton_*`, by name, and what clears memory on the streams on
which they ran. Where they run beside backward or a collective they share the GPU and take longer
than alone: the sum is an upper bound of what it costs the step.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

STEPS = 3
_CLEARS = ("FillFunctor", "Memset")


def kernels() -> frozenset[str]:
    """Names of the kernels that encode and decode: those of every form."""
    import triton

    from evener.comm import codecs

    found = [each.name for each in pkgutil.iter_modules(codecs.__path__)]
    return frozenset(
        name
        for module in found
        if module.startswith("triton_")
        for name, value in vars(import_module(f"{codecs.__name__}.{module}")).items()
        if isinstance(value, triton.runtime.JITFunction)
    )


def milliseconds(events: Iterable[tuple[str, int, float]], names: frozenset[str]) -> float:
    """Time of encoding and decoding, from events (kernel's name, stream, microseconds)."""
    ran = list(events)
    streams = {stream for name, stream, _ in ran if name in names}
    return 1e-3 * sum(
        took
        for name, stream, took in ran
        if name in names or (stream in streams and any(word in name for word in _CLEARS))
    )


def measure(step: Callable[[], Any], finish: Callable[[], Any], *, here: bool) -> float | None:
    """Milliseconds a step, over `STEPS` calls of `step`; None where `here` is not set.

    All ranks make the steps; the one with `here` looks.
    """
    import torch
    from torch._C._autograd import DeviceType

    def run() -> None:
        for _ in range(STEPS):
            step()
        finish()
        torch.cuda.synchronize()

    if not here:
        run()
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
    found = [
        (str(event.name), int(event.device_resource_id), float(event.time_range.elapsed_us()))
        for event in seen.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return milliseconds(found, kernels()) / STEPS
