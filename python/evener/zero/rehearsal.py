"""Units of the model run on the accelerator before anything is planned: what a block really takes.

A trace counts arithmetic and bytes. It does not see what launching a block's operations takes the
host, nor kernels that reach less of the accelerator than large products do. A model of many small
operations is as slow as these. So one unit of each kind (class, shapes, inputs) runs with drawn
weights and inputs of the traced shapes: forward, and forward with backward, plain and recomputed,
its gradients put together as `gradients` does it. One unit with all its activations is in every
plan's working set, so this needs no room that a step would not need; it gets no more than the
budget all the same. `Rehearsed` is what a plan takes from it (`planner`).

What runs is a copy of the unit: hooks of the user do not see it, and what it keeps on itself is
gone with it. A kind that cannot run so is planned from its trace, and one line says it. On several
ranks it runs only where `evener.rehearse` is true: a unit may hold collectives, and ranks that run
out of time at different units would wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from evener.zero import heads
from evener.zero.meter import Ledger, Meter
from evener.zero.profile import Rehearsed, Work
from evener.zero.sequence import Part
from evener.zero.units import Unit

logger = logging.getLogger("evener.zero")

REPEATS = 4
"""Units that run one after another without waiting: what they launch fits CUDA's queue."""
SECONDS = 6.0
"""For all kinds together; those that are left over are planned from their trace."""


@dataclass(frozen=True)
class Spec:
    """An input tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    strides: tuple[int, ...]
    """Kernels are chosen by them. Empty: as a new tensor has them."""


Call = tuple[tuple[Any, ...], dict[str, Any]]


def specs(args: Any, kwargs: Any) -> Call:
    """A unit's arguments with a Spec in the place of each tensor."""

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        strides = value.stride() if value.layout == torch.strided else ()
        return Spec(tuple(value.shape), value.dtype, value.requires_grad, strides)

    found: Call = tree_map(spec, (tuple(args), dict(kwargs)))
    return found


def _made(call: Call, device: torch.device) -> Call:
    """Inputs by their specs: noise, and zeros where they choose something."""

    def make(value: Any) -> Any:
        if not isinstance(value, Spec):
            return value
        if value.dtype == torch.bool:
            return torch.ones(value.shape, dtype=value.dtype, device=device)
        if not value.dtype.is_floating_point:
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        if not value.strides:
            made = torch.randn(value.shape, dtype=value.dtype, device=device)
        else:
            # What was expanded is drawn once.
            shape = [n if s else 1 for n, s in zip(value.shape, value.strides, strict=True)]
            made = torch.empty_strided(shape, value.strides, dtype=value.dtype, device=device)
            made = made.normal_().expand(value.shape)
        return made.requires_grad_(value.gradient)

    found: Call = tree_map(make, call)
    return found


def _kind(module: nn.Module, call: Call) -> tuple[Any, ...]:
    """Units that are equal in this take the same time."""
    leaves = [
        leaf if isinstance(leaf, Spec | bool | int | float | str | None) else type(leaf)
        for leaf in tree_leaves(call)
    ]
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
    return type(module), shapes, tuple(leaves)


def _copied(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module with drawn weights, buffers of its own and no hooks; other attributes are the
    original's, of which containers are copied. Raises TypeError for a forward pass that an instance
    brought: it is bound to the original."""
    tensors: dict[int, torch.Tensor] = {}

    def weight(old: nn.Parameter) -> torch.Tensor:
        if id(old) not in tensors:
            drawn = torch.randn(old.shape, dtype=dtype, device=device).mul_(0.02)
            tensors[id(old)] = nn.Parameter(drawn, old.requires_grad)
        return tensors[id(old)]

    def buffer(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in tensors:
            empty = old.is_meta
            tensors[id(old)] = (
                torch.zeros(old.shape, dtype=old.dtype, device=device)
                if empty
                else old.detach().to(device, copy=True)
            )
        return tensors[id(old)]

    def copy(old: nn.Module) -> nn.Module:
        brought = vars(old).get("forward")
        part: Part | heads.Block | None = getattr(brought, "part", None)
        bound = getattr(brought, "__func__", None) is type(old).forward
        if brought is not None and part is None and not bound:
            raise TypeError("its forward pass is an attribute of the instance")
        made = type(old).__new__(type(old))
        for name, value in vars(old).items():
            if name == "forward":
                continue
            if name.endswith(("_hooks", "_hooks_with_kwargs")) and isinstance(value, dict):
                value = type(value)()
            elif type(value) in (dict, list, set):
                value = type(value)(value)
            vars(made)[name] = value
        vars(made)["_parameters"] = {
            name: None if p is None else weight(p) for name, p in old._parameters.items()
        }
        vars(made)["_buffers"] = {
            name: None if b is None else buffer(b) for name, b in old._buffers.items()
        }
        vars(made)["_modules"] = {
            name: None if m is None else copy(m) for name, m in old._modules.items()
        }
        if part is not None:
            part.like(made).begin()
        return made

    return copy(module)


class _Rehearsal:
    """One unit, ready to run."""

    def __init__(
        self, module: nn.Module, call: Call, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.args, self.kwargs = _made(call, device)
        self.module = _copied(module, device, dtype)
        self.weights = [p for p in self.module.parameters() if p.requires_grad]
        self.flat = torch.zeros(
            sum(w.numel() for w in self.weights), dtype=dtype, device=device
        )  # fmt: skip

    def forward(self, recompute: bool) -> Any:
        """As the engine runs it."""
        if not recompute:
            return self.module(*self.args, **self.kwargs)
        return checkpoint(
            heads.recomputed(self.module), *self.args, use_reentrant=False, **self.kwargs
        )

    def backward(self, out: Any) -> None:
        """Its backward pass, and the gradients in one flat tensor with their norms."""
        outs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
        with torch.no_grad():
            given = [w for w in self.weights if w.grad is not None]
            views = list(
                self.flat[: sum(w.numel() for w in given)].split([w.numel() for w in given])
            )
            if given:
                found = [w.grad.reshape(-1) for w in given if w.grad is not None]
                torch._foreach_copy_(views, found)
                torch.stack(list(torch._foreach_norm(views, 2, dtype=torch.float32)))
            for weight in given:
                weight.grad = None
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None

    def both(self, recompute: bool) -> None:
        """A forward and a backward pass."""
        self.backward(self.forward(recompute))


def _timed(call: Callable[[], Any], sync: Callable[[], None]) -> tuple[float, float]:
    """Seconds of one call, and of the host until the next may begin."""
    call()
    sync()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call()
        launched = time.perf_counter()
        sync()
        times.append((time.perf_counter() - begin, launched - begin))
    return (
        statistics.median(t for t, _ in times) / REPEATS,
        statistics.median(t for _, t in times) / REPEATS,
    )


def _work(call: Callable[[], Any]) -> tuple[Work, Any]:
    meter = Meter(Ledger(), count_work=True)
    with torch.autograd.set_multithreading_enabled(False), meter:
        out = call()
    assert meter.work is not None
    return tuple((flops, moved, n) for (flops, moved), n in meter.work.items()), out


def _measure(one: _Rehearsal, repeated: bool, sync: Callable[[], None]) -> Rehearsed:
    ways = (False, True) if repeated else (False,)
    backward: list[float] = []
    works: list[Work] = []
    forward = launch = 0.0
    forward_work: Work = ()
    for recompute in ways:
        forward_work, out = _work(lambda way=recompute: one.forward(way))  # type: ignore[misc]
        works.append(_work(lambda made=out: one.backward(made))[0])  # type: ignore[misc]
        del out
        forward, launch = _timed(lambda way=recompute: one.forward(way), sync)  # type: ignore[misc]
        whole, _ = _timed(lambda way=recompute: one.both(way), sync)  # type: ignore[misc]
        # Where other programs run too, the difference of two times may be anything. A backward
        # pass that recomputes takes a forward pass at least.
        backward.append(max(forward if recompute else 0.0, whole - forward))
    return Rehearsed(
        count=1,
        forward=forward,
        launch=launch,
        backward=backward[0],
        backward_recomputed=backward[-1],
        forward_work=forward_work,
        backward_work=works[0],
        backward_recomputed_work=works[-1],
    )


def rehearse(
    units: Sequence[Unit],
    calls: Mapping[int, Call],
    device: torch.device,
    dtype: torch.dtype,
    skip: nn.Module | None = None,
    limit: int = 0,
) -> tuple[Rehearsed, ...]:
    """What one unit of each kind takes. `calls`: each unit's arguments as `specs` gives them, by
    its number. `skip`: the layer whose logits are lazy. Embeddings are left out: their time
    depends on what is looked up. `limit`: bytes that torch's allocator may hold on a GPU meanwhile;
    0: as many as before. Random bits, weights, buffers and modules are as before."""
    try:
        with _limited(device, limit):
            return _rehearse(units, calls, device, dtype, skip)
    except Exception as error:  # noqa: BLE001  # the traces do for the plan
        logger.warning("no unit was run before the plan: %s: %s", type(error).__name__, error)
        return ()


@contextlib.contextmanager
def _limited(device: torch.device, limit: int) -> Iterator[None]:
    if device.type != "cuda" or not limit:
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _rehearse(
    units: Sequence[Unit],
    calls: Mapping[int, Call],
    device: torch.device,
    dtype: torch.dtype,
    skip: nn.Module | None,
) -> tuple[Rehearsed, ...]:
    cuda = device.type == "cuda"

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, unit in enumerate(units):
        module = unit.module
        if module is None or number not in calls or module is skip:
            continue
        if not isinstance(module, nn.Embedding):
            kinds.setdefault(_kind(module, calls[number]), []).append(number)
    found: list[Rehearsed] = []
    left: list[str] = []
    begun = time.perf_counter()
    for numbers in sorted(kinds.values(), key=len, reverse=True):
        unit = units[numbers[0]]
        assert unit.module is not None
        if time.perf_counter() - begun > SECONDS:
            left += [units[n].name for n in numbers]
            continue
        devices = [device] if cuda else []
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                one = _Rehearsal(unit.module, calls[numbers[0]], device, dtype)
                made = _measure(one, unit.repeated, sync)
            found.append(made.times(len(numbers)))
        except Exception as error:  # noqa: BLE001  # its trace does for the plan
            said = str(error).strip().splitlines() or [""]
            logger.debug("%s: %s: %s", unit.name, type(error).__name__, said[0])
            left += [units[n].name for n in numbers]
        finally:
            one = None  # type: ignore[assignment]
            if cuda:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    logger.info(
        "%d kinds of units ran once in %.1f s%s",
        len(found),
        time.perf_counter() - begun,
        f"; planned from the trace: {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}"
        if left
        else "",
    )
    return tuple(found)
