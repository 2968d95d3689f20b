"""Pieces of a model run as a whole: what their operations take together.

An operation that is timed alone finds its tensors in the cache, on a device that is still cool, and
nobody's code around it. In a step it does not. So each distinct block, and what lies between
blocks, is run as a stage would run it, forward and backward, on made-up values, and the times of
its operations are multiplied by what it takes over their sum. Equal blocks are run once, and one at
a time is in memory. A piece that made-up values do not suit, or that does not fit, keeps the times
of its operations.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evener.base.log import logger
from evener.pipeline.capture import Captured
from evener.pipeline.split import Draw, Split, StageModule
from evener.pipeline.synthetic import Operation

# Operations of a piece where the model has no blocks.
_LONGEST = 256
# Seconds of passes of one piece: on a GPU enough to be warm and at the clock that it keeps.
_SECONDS = {"cuda": 0.3, "cpu": 0.15}


@dataclass(frozen=True)
class Piece:
    """Operations begin..end, and the seconds of their forward and backward together."""

    begin: int
    end: int
    forward: float
    backward: float


def run(
    captured: Captured, rows: int, device: torch.device, wanted: Callable[[int, int], bool]
) -> Iterator[Piece]:
    """The pieces that `wanted(begin, end)`, each with its times for microbatches of `rows`."""
    known: dict[Hashable, tuple[float, float] | None] = {}
    for begin, end in segments(captured):
        if not wanted(begin, end):
            continue
        key = tuple(Operation(captured, node, rows).key for node in captured.ops[begin:end])
        if key not in known:
            try:
                known[key] = _timed(captured, begin, end, rows, device)
            except Exception as error:  # noqa: BLE001 - then by its operations, one by one
                logger.debug("operations %d..%d were not timed together: %s", begin, end, error)
                known[key] = None
        took = known[key]
        if took is not None:
            yield Piece(begin, end, *took)


def segments(captured: Captured) -> list[tuple[int, int]]:
    """The model's blocks and what lies between them, as positions where a cut may be."""
    count = len(captured.ops)
    edges, due = [0], False
    for k in range(1, count):
        due = due or captured.blocks[k] != captured.blocks[k - 1] or k - edges[-1] >= _LONGEST
        if due and not captured.glued[k]:  # what is glued stays with the piece before
            edges.append(k)
            due = False
    edges.append(count)
    return list(itertools.pairwise(edges))


def _timed(
    captured: Captured, begin: int, end: int, rows: int, device: torch.device
) -> tuple[float, float]:
    count = len(captured.ops)
    split = Split(captured, [cut for cut in (begin, end) if 0 < cut < count])
    module = split.module(int(begin > 0), device, Draw(), place=_placer(device))
    came = []
    for edge in split.edge(begin):
        meta = edge.node.meta["val"]
        value = _made(captured.shape(meta, rows), meta.dtype, device)
        came.append(split.laid(edge, value, rows).requires_grad_(edge.differentiable))
    nodes = {node.name: node for node in captured.inputs}
    inputs = {name: _input(captured, nodes[name], rows, device) for name in module.needs}
    return _passes(module, came, inputs, device)


def _passes(
    module: StageModule, came: list[torch.Tensor], inputs: dict[str, Any], device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and of backward: of a pass after the first ones."""
    cuda = device.type == "cuda"
    one_thread = not cuda and torch.get_num_threads() == 1
    now = time.thread_time if one_thread else time.perf_counter
    gradients: list[torch.Tensor] = []

    def mark() -> Any:
        if not cuda:
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def once() -> tuple[Any, Any, Any]:
        for tensor in came:
            tensor.grad = None
        first = mark()
        sent = [out for out in module(*came, **inputs) if out.requires_grad]
        middle = mark()
        if sent:
            if not gradients:
                gradients.extend(torch.full_like(out, 1e-3) for out in sent)
            torch.autograd.backward(sent, gradients)
        return first, middle, mark()

    once()
    once()
    found: list[tuple[Any, Any, Any]] = []
    if cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - begin < _SECONDS[device.type]
                             and len(found) < 200):  # fmt: skip
        found.append(once())
        if cuda and len(found) % 8 == 0:
            found[-8][2].synchronize()  # the host stays a few passes ahead, not all of them
        if time.perf_counter() - begin > 2.0 and len(found) >= 2:
            break
    if not cuda:
        return (statistics.median(b - a for a, b, _ in found),
                statistics.median(c - b for _, b, c in found))  # fmt: skip
    torch.cuda.synchronize(device)
    late = found[len(found) // 2 :]
    return (statistics.median(a.elapsed_time(b) for a, b, _ in late) / 1e3,
            statistics.median(b.elapsed_time(c) for _, b, c in late) / 1e3)  # fmt: skip


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values as activations have them; integers are an index into anything."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device, dtype=dtype)
    if dtype is torch.bool:
        return torch.ones(shape, device=device, dtype=dtype)
    return torch.zeros(shape, device=device, dtype=dtype)


def _input(captured: Captured, node: Any, rows: int, device: torch.device) -> Any:
    meta = node.meta.get("val")
    if not isinstance(meta, torch.Tensor):
        return meta
    return _made(captured.shape(meta, rows), meta.dtype, device)


def _placer(device: torch.device) -> Callable[[str, torch.Tensor, bool], torch.Tensor]:
    def place(_name: str, held: torch.Tensor, parameter: bool) -> torch.Tensor:
        if not parameter and not held.is_meta:
            return held.to(device, copy=True)
        if held.dtype.is_floating_point and held.dim() > 1:
            return torch.randn(held.shape, device=device, dtype=held.dtype).mul_(0.02)
        if held.dtype.is_floating_point:
            return torch.ones(held.shape, device=device, dtype=held.dtype)
        return torch.zeros(held.shape, device=device, dtype=held.dtype)

    return place
