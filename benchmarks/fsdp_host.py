"""What the host of Evener's FSDP2 door takes per unit, by stage, without a network and a GPU.

A part of `fsdp_launches.py`, which runs it in a process of its own. One rank of two, whose peer is
made up, goes through the stages of a step for four units again and again. Triton's launcher does
all that it does before it calls the driver.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fsdp_launches
import harness
import torch
import torch.distributed as dist
from torch import nn

UNITS, REPEATS, WIDTH = 4, 25, 32


class _Clock:
    """Seconds of this thread by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            found = function(*args, **kwargs)
            self.spent[name] += time.thread_time() - began
            return found

        return timed


def without_a_driver() -> None:
    """Triton launches as it does on a Hopper, up to the driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: device,
        )
    )

    def compiled(kernel: Any, key: Any, *_: Any) -> Any:
        made = SimpleNamespace(
            launch_metadata=lambda *_: None, run=lambda *_: None, function=None,
            packed_metadata=None,
        )  # fmt: skip
        kernel.device_caches[0][0][key] = made
        return made

    JITFunction._do_compile = compiled


def _unit(index: int) -> Any:
    """A block of a transformer, as `evener.fsdp` describes it."""
    from evener.comm.replicas import Piece, Unit
    from evener.tools.bench.train.transformers import Block, Shape

    pieces, offset = [], 0
    for name, parameter in Block(
        Shape(1, 4, WIDTH, 61, 16), causal=True, pre_norm=True
    ).named_parameters():
        size = parameter.numel() // 2
        shape = (size,) if parameter.dim() == 1 else (size // WIDTH, WIDTH)
        pieces.append(Piece(name, offset, size, nn.Parameter(torch.empty(shape))))
        offset += size
    return Unit(index, f"unit {index}", pieces, offset, torch.bfloat16)


def tell(form: str, turns: int) -> None:
    """Say the microseconds per unit of each stage: medians of `turns`."""
    from evener.comm import ahead, mirrors, shards
    from evener.comm.codecs import rice

    torch.set_num_threads(1)
    clock = _Clock()
    without_a_driver()
    fsdp_launches.as_on_a_gpu()
    fsdp_launches.stages(clock)
    units = [_unit(index) for index in range(UNITS)]
    n = units[0].numel

    def gather(every: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        """What both ranks say: as many words, and nothing wrong."""
        del mine, group
        every.view(2, -1, 3).copy_(torch.tensor([rice.tiles(n) + 50, 7, 0]))

    mirrors.dist = SimpleNamespace(all_gather_into_tensor=gather)
    outer = SimpleNamespace(size=2, rank=0, all_gather=lambda *_: None)
    levels = SimpleNamespace(uneven=False, two_level=False, sizes=(1, 1))
    route = SimpleNamespace(outer=outer, gather=None, scatter=None, levels=levels)
    own = SimpleNamespace(
        rank=0, size=2, route=route, control=SimpleNamespace(handle=None), hosts=["a", "b"],
        device=torch.device("cpu"),
    )  # fmt: skip
    spread: Any = mirrors.Spread(own)  # type: ignore[arg-type]
    looked = [mirrors.Mirror(unit.name, spread, mirrors.Traffic(), host=False) for unit in units]
    way: Any = SimpleNamespace(
        wait=lambda: None, all_to_all=lambda sent: (torch.empty_like(sent), None)
    )
    group: Any = SimpleNamespace(size=lambda: 2)
    scatters: list[Any] = []
    if form != "exact":
        scatters = [shards.FormedReduceScatter(unit, form, own, way, None) for unit in units]  # type: ignore[arg-type]
    weights = torch.randn(n).bfloat16()
    output = torch.zeros(2 * n, dtype=torch.bfloat16)
    reduced, gradients = torch.zeros(n).bfloat16(), torch.randn(2 * n).bfloat16()
    taken: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 2):
        clock.spent.clear()
        for _ in range(REPEATS):
            found = [(mirror, mirror.look(weights)) for mirror in looked]
            ahead.announce(found)
            for mirror, each in found:
                mirror.send(each, mirror.write(each))
                mirror.apply(each)
            for mirror in looked * 2:
                mirror.copy(output, output[:n])
            for scatter in scatters:
                scatter(reduced, gradients, group, dist.ReduceOp.SUM)
                scatter.finish(reduced)
        if turn >= 2:
            for stage, seconds in clock.spent.items():
                taken[stage].append(1e6 * seconds / REPEATS / UNITS)
    harness.say(**{stage: statistics.median(values) for stage, values in taken.items()})
