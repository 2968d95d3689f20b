"""What each operation costs: seconds, bytes of parameters, bytes kept for backward.

`measure` times each distinct operation on a device, on made-up inputs (see `synthetic`), and each
distinct block as a whole, to which its operations' times are fitted (see `pieces`); `estimate`
divides its arithmetic and its bytes by rates that are given, for a device that is not at hand. Both
need the model's shapes only, so the model may be on the meta device.

Backward has two parts: `input`, the gradients that the stage before waits for, and `weight`, those
of parameters, which zero-bubble schedules put off. Costs are taken at two numbers of rows and lie
on the line through them, so that the search may try other microbatches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.base.given import given
from evener.base.log import logger
from evener.pipeline import pieces
from evener.pipeline.capture import Captured
from evener.pipeline.operations import root_of
from evener.pipeline.put_back import quiet_random
from evener.pipeline.synthetic import Operation, differentiable

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Rates:
    """A device by its rates: floating-point operations and bytes per second, seconds per launch."""

    flops: float
    bandwidth: float
    launch: float = 5e-6


@dataclass(frozen=True)
class Times:
    """Seconds of one operation."""

    forward: float
    input: float
    weight: float


@dataclass
class Profile:
    """Costs of all operations of a captured model, in their order.

    `rows`: the numbers of rows that were taken. Arrays are of shape (len(rows), operations):
    `forward`, `input`, `weight` in seconds, `saved` in bytes kept per microbatch. `how`: "measured
    on cpu" and the like. `estimated`: names of operations whose time could not be measured.
    """

    rows: tuple[int, ...]
    forward: Floats
    input: Floats
    weight: Floats
    saved: Floats
    how: str
    estimated: tuple[str, ...]

    def at(self, rows: int) -> tuple[Floats, Floats, Floats, Floats]:
        """(forward, input, weight, saved) for microbatches of `rows` rows."""
        return tuple(  # type: ignore[return-value]
            self._line(array, rows) for array in (self.forward, self.input, self.weight, self.saved)
        )

    def _line(self, array: Floats, rows: int) -> Floats:
        if len(self.rows) == 1:
            return np.asarray(array[0] * (rows / self.rows[0]))
        low, high = self.rows[0], self.rows[-1]
        slope = (array[-1] - array[0]) / (high - low)
        return np.asarray(np.maximum(array[0] + slope * (rows - low), 0.0))


@given
def measure(captured: Captured, rows: Sequence[int], device: torch.device | str) -> Profile:
    """Time every distinct operation on `device` for microbatches of `rows` (one or two numbers)."""
    place = torch.device(device)
    base = _overhead(place)
    known: dict[Hashable, Times] = {}
    failed: list[str] = []

    def times(operation: Operation) -> Times:
        key = operation.key
        if key not in known:
            try:
                known[key] = _timed(operation, place, base)
            except Exception as error:  # noqa: BLE001 - an operation that made-up inputs do not suit
                logger.debug("%s was not timed: %s", operation.node.name, error)
                failed.append(operation.node.name)
                known[key] = _by_rates(operation, probe(place))
        return known[key]

    with quiet_random(place):
        found = _profile(captured, rows, times, f"measured on {place}", failed)
        for at, count in enumerate(found.rows):
            _correct(captured, found, at, count, place, base)
    return found


# A piece below this share of all time is not run as a whole.
_SHARE = 0.005
# Made-up values may lead through other code than real ones: no piece corrects by more.
_MOST = 4.0


def _correct(
    captured: Captured, found: Profile, at: int, rows: int, device: torch.device, base: float
) -> None:
    """Multiply the times of operations by what their pieces take over their sums."""
    seconds = found.forward[at] + found.input[at] + found.weight[at]

    def wanted(begin: int, end: int) -> bool:
        return bool(seconds[begin:end].sum() > _SHARE * seconds.sum())

    for piece in list(pieces.run(captured, rows, device, wanted)):
        part = slice(piece.begin, piece.end)
        for arrays, took in (((found.forward,), piece.forward),
                             ((found.input, found.weight), piece.backward - base)):  # fmt: skip
            alone = sum(float(array[at, part].sum()) for array in arrays)
            factor = min(max(took / alone, 1 / _MOST), _MOST) if alone > 0 and took > 0 else 1.0
            logger.debug("operations %d..%d take %.3f of their sum", piece.begin, piece.end, factor)
            for array in arrays:
                array[at, part] *= factor


@given
def estimate(captured: Captured, rows: Sequence[int], rates: Rates) -> Profile:
    """As `measure`, from rates and without running anything."""
    known: dict[Hashable, Times] = {}

    def times(operation: Operation) -> Times:
        key = operation.key
        if key not in known:
            known[key] = _by_rates(operation, rates)
        return known[key]

    how = f"estimated at {rates.flops / 1e12:g} Tflop/s and {rates.bandwidth / 1e9:g} GB/s"
    return _profile(captured, rows, times, how, [])


def _profile(
    captured: Captured,
    rows: Sequence[int],
    times: Callable[[Operation], Times],
    how: str,
    failed: list[str],
) -> Profile:
    sizes = tuple(sorted(set(rows)))
    shape = (len(sizes), len(captured.ops))
    forward, inner, weight, saved = (np.zeros(shape) for _ in range(4))
    keeps: dict[Hashable, Any] = {}
    for line, count in enumerate(sizes):
        counted: set[Any] = set()
        for at, node in enumerate(captured.ops):
            operation = Operation(captured, node, count)
            found = times(operation)
            forward[line, at] = found.forward
            inner[line, at], weight[line, at] = found.input, found.weight
            key = operation.key
            if key not in keeps:
                try:
                    keeps[key] = operation.saved()
                except Exception as error:  # noqa: BLE001 - no meta kernel: all of it is kept
                    logger.debug("%s: what it saves is taken as its inputs: %s", node.name, error)
                    keeps[key] = None
            kept = keeps[key]
            indices = range(len(operation.nodes)) if kept is None else kept.arguments
            total = 0 if kept is None else kept.own
            for one in [operation.nodes[i] for i in indices] + [node] * bool(
                kept is not None and kept.outputs
            ):
                root = root_of(one)
                if root.op in ("get_attr", "placeholder") or root in counted:
                    continue
                counted.add(root)
                total += max(captured.bytes(one, count), captured.bytes(root, count))
            saved[line, at] = total
    return Profile(sizes, forward, inner, weight, saved, how, tuple(failed))


def _timed(operation: Operation, device: torch.device, base: float) -> Times:
    """Seconds of forward, of the gradients of inputs, and of those of parameters.

    A gradient of a parameter is added to the one that is there.
    """
    tensors = operation.tensors(device)
    forward = _clock(lambda: operation.call(tensors, device), device)
    outs = differentiable(operation.call(tensors, device))
    rest = [t for t, s in zip(tensors, operation.slots, strict=True) if s.grad and not s.parameter]
    own = [t for t, s in zip(tensors, operation.slots, strict=True) if s.grad and s.parameter]
    if not outs or not (rest or own):
        return Times(forward, 0.0, 0.0)
    gradients = [torch.full_like(out, 0.5) for out in outs]

    def backward(wanted: list[torch.Tensor]) -> float:
        took = _clock(
            lambda: torch.autograd.grad(
                outs, wanted, gradients, retain_graph=True, allow_unused=True
            ),
            device,
        )
        return max(took - base, 1e-6)

    full = backward(rest + own)
    inner = 0.0 if not rest else full if not own else min(backward(rest), full)
    adding = 0.0
    for parameter in own:
        there, more = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adding += _clock(lambda a=there, b=more: a.add_(b), device)  # type: ignore[misc]
    return Times(forward, inner, full - inner + adding)


def _overhead(device: torch.device) -> float:
    """What a call of autograd costs by itself: a stage has it once, not per operation."""
    x = torch.zeros(1, device=device, requires_grad=True)
    y = x.view(1)
    one = torch.ones(1, device=device)
    return _clock(lambda: torch.autograd.grad(y, x, one, retain_graph=True), device)


def _clock(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the median of a few on a CPU, the mean of many in a row on a GPU."""
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls = 10
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls / 1e3
    # One thread's own time: what other programs of the machine take does not count.
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: list[float] = []
    deadline = time.perf_counter() + 0.02
    while len(found) < 3 or (time.perf_counter() < deadline and len(found) < 25):
        begin = now()
        function()
        found.append(now() - begin)
        if sum(found) > 1.0:
            break
    return statistics.median(found)


@given
def probe(device: torch.device | str) -> Rates:
    """Rates of a device, measured: a matrix product and a copy."""
    place = torch.device(device)
    size = 4096 if place.type == "cuda" else 512
    a = torch.randn(size, size, device=place)
    product = _clock(lambda: a @ a, place)
    b = torch.empty(1 << (28 if place.type == "cuda" else 24), dtype=torch.uint8, device=place)
    c = torch.empty_like(b)
    copy = _clock(lambda: c.copy_(b), place)
    d = torch.zeros(1, device=place)
    return Rates(2 * size**3 / product, 2 * b.numel() / copy, _clock(lambda: d.add_(1), place))


def _by_rates(operation: Operation, rates: Rates) -> Times:
    """The longer of arithmetic and bytes, and a launch."""
    try:
        forward, full, weight, moved = operation.arithmetic()
    except Exception as error:  # noqa: BLE001 - no meta kernel: its bytes alone
        logger.debug("%s: counted by its bytes alone: %s", operation.node.name, error)
        forward = full = weight = 0
        moved = 2 * operation.bytes
    view = root_of(operation.node) is not operation.node
    took = rates.launch if view else max(forward / rates.flops, moved / rates.bandwidth)
    if not any(slot.grad for slot in operation.slots):
        return Times(max(took, rates.launch), 0.0, 0.0)
    back = rates.launch if view else max(full / rates.flops, 2 * moved / rates.bandwidth)
    own = any(slot.grad and slot.parameter for slot in operation.slots)
    rest = any(slot.grad and not slot.parameter for slot in operation.slots)
    share = (weight / full if full else 0.5) if own and rest else float(own)
    back = max(back, rates.launch)
    return Times(max(took, rates.launch), back * (1 - share), back * share)
