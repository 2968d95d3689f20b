"""What torch's out-of-memory error says under the engine: the budget, what was planned, what others
hold, and what to do. The script's own loss, or a second model, can run out of memory too, and
nothing else would name the budget then."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import torch

from evener.zero.device import Device
from evener.zero.planner import Plan

SAID = "evener: "
"""What the line begins with; an error has it once."""


def asked(error: BaseException) -> int:
    """The bytes that an allocation asked for, by torch's message; 0 where it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) ([KMGT]?i?B|bytes)", str(error))
    if found is None:
        return 0
    units = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    return int(float(found[1]) * units.get(found[2], 1))


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def account(plan: Plan, device: Device, wanted: int, own: int | None = None) -> tuple[str, str]:
    """(what the budget is and who has it, what to do), of an allocation of `wanted` bytes that
    failed. `own`: bytes that the engine has there now; where it is not known, what was planned at
    most."""
    known = own is not None
    used, outside = device.used()
    own = plan.gpu_bytes - plan.gpu_reserve - plan.gpu_held if own is None else own
    others = max(0, used - own)
    outside = max(0, outside - plan.gpu_reserve)
    budget = plan.budget.gpu + plan.budget.spare
    problem = (
        f"evener.budget.gpu is {_gb(budget)}, the plan is of {_gb(plan.gpu_bytes)}, and "
        f"{_gb(used)} of tensors are there: {'' if known else 'at least '}{_gb(others)} are not "
        f"the engine's ({_gb(plan.gpu_held)} when it was planned)"
    )
    if outside >= 1 << 28:
        problem += f", and other processes have about {_gb(outside)}"
    # What came since the plan, and what did not fit.
    more = max(0, others - plan.gpu_held) + wanted
    if known:  # by the engine, which has made all the room that it could
        enough = max(budget, plan.gpu_bytes) + more
        way = f'give evener.budget.gpu = "{_whole_gb(enough)}GB" where the GPU has it'
    else:  # by the script: the engine would fill a larger budget
        spare = plan.budget.spare + more
        way = f'give evener.budget.spare = "{_whole_gb(spare)}GB", which is left to the script'
    return problem, (
        f"{way}, fewer rows, or make what is beside the engine before zero.initialize, which then "
        "plans with it"
    )


def _whole_gb(size: float) -> int:
    return max(1, math.ceil(size / 1e9))


@contextlib.contextmanager
def explained(plan: Plan | None, device: Device) -> Iterator[None]:
    """Inside, an error of the allocator gets a line more."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if plan is not None and SAID not in str(error):
            problem, fix = account(plan, device, asked(error))
            # `add_note` is of Python 3.11, and not in what loggers print.
            error.args = (f"{error}\n{SAID}{problem}\n  fix: {fix}",)
        raise
