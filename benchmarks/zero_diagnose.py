"""What a step really takes on the GPU, operation by operation, beside what its trace expects.

For `zero_zoo.py --diagnose`: a step runs without the limit, under a dispatch mode that sees every
operation of both passes (the backward pass in the calling thread). Per operation it reads the
allocator before, at the most, and after: what a kernel takes inside itself and gives back before it
returns shows as `hidden`. What lives at the step's peak is listed, and what lives at the trace's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from evener import zero
from evener.zero import api
from evener.zero import trace as tracing
from evener.zero.meter import Ledger, Meter
from evener.zero.spans import summary

MB = 1e6


def _label(func: Any, tensor: torch.Tensor) -> str:
    return f"{func} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"


class Log(Meter):
    """A meter that remembers what was made by which operation, and when it died."""

    def __init__(self, ledger: Ledger, *, count_work: bool = False, cores: int = 0) -> None:
        super().__init__(ledger, count_work=count_work, cores=cores)
        self.events: list[tuple[int, int, str]] = []
        self._func: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._func = func
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _book(self, tensor: torch.Tensor, given: set[int]) -> bool:
        if not super()._book(tensor, given):
            return False
        storage = tensor.untyped_storage()
        size, label, key = storage.nbytes(), _label(self._func, tensor), len(self.events)
        self.events.append((key, size, label))
        events = self.events
        weakref.finalize(storage, lambda: events.append((key, -size, label)))
        return True

    def live_at(self, end: int | None = None) -> tuple[int, list[str]]:
        """Bytes and the largest kinds that lived after event `end`, or at the most of all."""
        if end is None:
            now = most = end = 0
            for number, (_, size, _) in enumerate(self.events, 1):
                now += size
                if now > most:
                    most, end = now, number
        live: dict[int, tuple[int, str]] = {}
        for key, size, label in self.events[:end]:
            if size > 0:
                live[key] = size, label
            else:
                live.pop(key, None)
        kinds: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for size, label in live.values():
            kinds[label] += size
            counts[label] += 1
        top = [f"{b / MB:9.1f} MB  {counts[k]:4} x {k}" for k, b in kinds.most_common(16)]
        return sum(size for size, _ in live.values()), top


class Watch(Log):
    """The same beside CUDA's allocator."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__(Ledger())
        self.hidden: Counter[str] = Counter()
        self.most: tuple[int, int, str] = 0, 0, ""
        self._where = where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        inside = peak - max(before, after)
        if inside > 4 << 20:
            first = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)][:3]
            name = f"{func} of {[tuple(x.shape) for x in first]}"
            self.hidden[name] = max(self.hidden[name], inside)
        if peak > self.most[0]:
            at = f"{func} in {self._where()}, {inside / MB:.1f} MB inside"
            self.most = peak, len(self.events), at
        return out


@contextlib.contextmanager
def traced() -> Iterator[dict[str, Any]]:
    """Inside, `zero.initialize` leaves its profile and what its two traces made here."""
    found: dict[str, Any] = {"logs": []}
    cut = vars(api)["cut_and_trace"]

    def log(ledger: Ledger, **given: Any) -> Log:
        made = Log(ledger, **given)
        found["logs"].append(made)
        return made

    def keep(*args: Any) -> Any:
        found["logs"].clear()
        units, profile = cut(*args)
        found["profile"] = profile
        return units, profile

    rehearsed = vars(api)["_rehearsed"]

    def measured(*args: Any) -> Any:
        found["profile"] = profile = rehearsed(*args)
        return profile

    setattr(tracing, "Meter", log)  # noqa: B010
    setattr(api, "cut_and_trace", keep)  # noqa: B010
    setattr(api, "_rehearsed", measured)  # noqa: B010
    try:
        yield found
    finally:
        setattr(tracing, "Meter", Meter)  # noqa: B010
        setattr(api, "cut_and_trace", cut)  # noqa: B010
        setattr(api, "_rehearsed", rehearsed)  # noqa: B010


def memory(
    engine: zero.Engine, step: Callable[[], Any], found: dict[str, Any], limit: int
) -> dict[str, Any]:
    """Three steps without the limit, the last one watched; the limit is then as it was."""
    plan = engine.plan
    assert plan is not None
    device, room = engine.device, engine.room
    device.unlimit()
    held = room.held()
    said: dict[str, Any] = {"states held": held, "reserve": plan.gpu_reserve}
    said["allocated before"] = torch.cuda.memory_allocated()
    if found.get("profile") is not None:
        said["forecast"] = room.forecast(found["profile"])
        said["rehearsed"] = [
            {
                field.name: value
                for field in dataclasses.fields(kind)
                if isinstance(value := getattr(kind, field.name), int | float)
            }
            for kind in found["profile"].rehearsed
        ]
    step()
    engine.drain()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    engine.drain()
    torch.cuda.synchronize()
    said["allocated"] = torch.cuda.max_memory_allocated()
    said["reserved"] = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    said["driver beside the allocator"] = total - free - torch.cuda.memory_reserved()
    place = [""]
    enter = engine._loading.enter

    def entered(unit: int) -> None:
        place[0] = engine.store.units[unit][0].name
        enter(unit)

    engine._loading.enter = entered  # type: ignore[method-assign]
    watch = Watch(lambda: place[0])
    try:
        with torch.autograd.set_multithreading_enabled(False), watch:
            step()
        engine.drain()
        torch.cuda.synchronize()
    finally:
        engine._loading.enter = enter  # type: ignore[method-assign]
    most, end, at = watch.most
    lives, top = watch.live_at(end)
    said |= {"watched most": most, "at": at, "made in the step and live": lives, "of it": top}
    said["hidden"] = [f"{b / MB:9.1f} MB  {k}" for k, b in watch.hidden.most_common(12)]
    logs = found["logs"]
    chosen = logs[-1] if plan.recomputed else logs[0]
    said["trace's most"], said["of the trace"] = chosen.live_at()
    logs.clear()
    device.limit(limit - plan.gpu_reserve)
    return said


def timing(engine: zero.Engine, step: Callable[[], Any], steps: int = 3) -> dict[str, Any]:
    """Where the time of some steps goes, each one's seconds, and each kind of unit's: of the GPU's
    stream, and of the host between having the weights and being done with them."""
    engine.record()
    host: dict[str, list[float]] = {}
    took = []
    with _watched(engine, host):
        for _ in range(steps):
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - begun)
    spans = engine.recorded()
    device: dict[str, list[float]] = {}
    for span in spans:
        if span.kind == "compute":
            device.setdefault(_kind(span.name), []).append(span.end - span.begin)
    units = {
        name: {
            "units": len(times) // steps,
            "GPU ms of each": 1e3 * sum(times) / len(times),
            "host ms of each": 1e3 * sum(host.get(name, [])) / max(1, len(host.get(name, []))),
        }
        for name, times in sorted(device.items(), key=lambda item: -sum(item[1]))[:12]
    }
    return {**summary(spans), "each": took, "updated": engine.updated, "units": units}


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


@contextlib.contextmanager
def _watched(engine: zero.Engine, host: dict[str, list[float]]) -> Iterator[None]:
    """Inside, `host` gets the host's seconds between each unit's `enter` and `leave`."""
    loading, begun = engine._loading, dict[int, float]()
    enter, leave = loading.enter, loading.leave

    def entered(unit: int) -> None:
        enter(unit)
        begun[unit] = time.perf_counter()

    def left(unit: int) -> None:
        way = "backward" if engine._passes._live[unit].handles else "forward"
        if unit in begun:
            name = _kind(f"{way} {engine.store.units[unit][0].name}")
            host.setdefault(name, []).append(time.perf_counter() - begun.pop(unit))
        leave(unit)

    loading.enter, loading.leave = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        loading.enter, loading.leave = enter, leave  # type: ignore[method-assign]
