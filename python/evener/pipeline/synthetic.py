"""One operation at a time, on inputs made up in its shapes.

What an operation costs does not depend on the model around it, so it is run alone: on the meta
device to learn what it saves for backward and how many operations of arithmetic it is, on a real
device to be timed. No more than one operation's tensors are in memory, so a model that does not fit
is profiled like any other, and equal operations (the same block many times) are run once.

Integers are indices in most operations: they are drawn where a table's length is known, spread
evenly where they say where groups end, and zero elsewhere, which is an index into anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from evener.pipeline.capture import Captured
from evener.pipeline.operations import is_random, root_of, written_by


@dataclass(frozen=True)
class Slot:
    """A tensor argument: `grad` says whether a gradient is wanted, `parameter` whose."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    parameter: bool
    written: bool

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for one in self.shape:
            size *= one
        return size


@dataclass(frozen=True)
class Saved:
    """What an operation keeps for backward: arguments by index, outputs, and bytes of its own."""

    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    own: int


class Operation:
    """A node of the graph with everything that is needed to run it alone, for `rows` rows."""

    def __init__(self, captured: Captured, node: fx.Node, rows: int) -> None:
        self.node = node
        self.target: Callable[..., Any] = node.target  # type: ignore[assignment]
        self.nodes: list[fx.Node] = []
        self.slots: list[Slot] = []
        written = set(written_by(node))
        trained = {n for n, p in captured.module.named_parameters(remove_duplicate=False)
                   if p.requires_grad}  # fmt: skip

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.device):
                return _Device()
            if not isinstance(value, fx.Node):
                return value
            meta = value.meta.get("val")
            if value.op == "get_attr":
                held = _attribute(captured.module, str(value.target))
                if isinstance(held, nn.Module):
                    return held
                meta = held
            if isinstance(meta, torch.SymInt):
                return captured.size(meta, rows)
            if not isinstance(meta, torch.Tensor):
                return _tuple(meta, captured, rows)
            parameter = value.op == "get_attr" and str(value.target) in trained
            grad = meta.is_floating_point() and (
                parameter or (value not in captured.free and value.op != "get_attr")
            )
            shape = captured.shape(meta, rows)
            stride = tuple(captured.size(one, rows) for one in meta.stride())
            self.nodes.append(value)
            self.slots.append(Slot(shape, stride, meta.dtype, grad, parameter, value in written))
            return _Hole(len(self.slots) - 1)

        self.args = fx.node.map_aggregate(node.args, leaf)
        self.kwargs = fx.node.map_aggregate(node.kwargs, leaf)
        self.random = is_random(node)

    @property
    def key(self) -> Hashable:
        """Equal for operations that cost the same."""
        return str(self.target), tuple(self.slots), repr(self.args), repr(self.kwargs)

    @property
    def bytes(self) -> int:
        return sum(slot.bytes for slot in self.slots)

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Made-up inputs. Those that want a gradient are leaves."""
        return [self._make(slot, device, at) for at, slot in enumerate(self.slots)]

    def _make(self, slot: Slot, device: torch.device, at: int) -> torch.Tensor:
        dense = all(s > 0 or n <= 1 for s, n in zip(slot.stride, slot.shape, strict=True))
        if dense:
            made = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=device)
        else:
            made = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        if device.type != "meta":
            if slot.dtype.is_floating_point:
                made.uniform_(0.1, 1.0)
            elif slot.dtype is torch.bool:
                made.fill_(True)
            else:
                self._integers(made, at)
        return made.requires_grad_(slot.grad)

    def _integers(self, made: torch.Tensor, at: int) -> None:
        name = str(self.target)
        if "embedding" in name and at > 0:
            made.random_(0, max(self.slots[0].shape[0], 1))
        elif "grouped_mm" in name and made.dim() == 1:
            total = self.slots[0].shape[0]
            ends = torch.arange(1, made.numel() + 1, device=made.device) * total // made.numel()
            made.copy_(ends)
        else:
            made.zero_()

    def call(self, tensors: list[torch.Tensor], device: torch.device) -> Any:
        """Run it. What it writes to is given to it as a copy, so that it can be run again."""
        given = [
            tensor.clone() if slot.written else tensor
            for tensor, slot in zip(tensors, self.slots, strict=True)
        ]

        def fill(value: Any) -> Any:
            if isinstance(value, _Hole):
                return given[value.at]
            return device if isinstance(value, _Device) else value

        args = pytree.tree_map(fill, self.args, is_leaf=_special)
        kwargs = pytree.tree_map(fill, self.kwargs, is_leaf=_special)
        return self.target(*args, **kwargs)

    def saved(self) -> Saved:
        """What it saves for backward, from a run on the meta device."""
        device = torch.device("meta")
        tensors = self.tensors(device)
        where = {tensor.untyped_storage()._cdata: at for at, tensor in enumerate(tensors)}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.call(tensors, device)
        outputs = {
            tensor.untyped_storage()._cdata: at
            for at, tensor in enumerate(pytree.tree_leaves(out))
            if isinstance(tensor, torch.Tensor)
        }
        arguments, of_output, own = [], [], 0
        for storage, tensor in kept.items():
            if storage in where:
                arguments.append(where[storage])
            elif storage in outputs:
                of_output.append(outputs[storage])
            else:
                own += tensor.untyped_storage().nbytes()
        return Saved(tuple(arguments), tuple(of_output), own)

    def arithmetic(self) -> tuple[int, int, int, int]:
        """Floating-point operations of forward, backward and of its part for parameters; bytes that
        forward reads and writes."""
        device = torch.device("meta")
        tensors = self.tensors(device)
        with FlopCounterMode(display=False) as counter:
            out = self.call(tensors, device)
        forward = counter.get_total_flops()
        moved = self.bytes + sum(
            t.numel() * t.element_size()
            for t in pytree.tree_leaves(out)
            if isinstance(t, torch.Tensor) and root_of(self.node) is self.node
        )
        outs = differentiable(out)
        full = inner = 0
        wanted = [t for t in tensors if t.requires_grad]
        if outs and wanted:
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(outs, wanted, [torch.empty_like(o) for o in outs],
                                    allow_unused=True, retain_graph=True)  # fmt: skip
            full = counter.get_total_flops()
            own = [t for t, s in zip(tensors, self.slots, strict=True) if s.grad and s.parameter]
            rest = [t for t, s in zip(tensors, self.slots, strict=True)
                    if s.grad and not s.parameter]  # fmt: skip
            inner = full
            if own:
                inner = 0
                if rest:
                    with FlopCounterMode(display=False) as counter:
                        torch.autograd.grad(outs, rest, [torch.empty_like(o) for o in outs],
                                            allow_unused=True)  # fmt: skip
                    inner = counter.get_total_flops()
        return forward, full, full - inner, moved


def differentiable(out: Any) -> list[torch.Tensor]:
    """The tensors of a result through which a gradient goes."""
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]


@dataclass(frozen=True)
class _Hole:
    at: int


@dataclass(frozen=True)
class _Device:
    pass


def _special(value: Any) -> bool:
    return isinstance(value, _Hole | _Device)


def _tuple(meta: Any, captured: Captured, rows: int) -> Any:
    """A value of several tensors, for getitem: on the meta device, as it is only taken apart."""
    if isinstance(meta, tuple | list):
        return tuple(
            torch.empty(captured.shape(m, rows), dtype=m.dtype, device="meta")
            if isinstance(m, torch.Tensor) else m
            for m in meta
        )  # fmt: skip
    return meta


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
