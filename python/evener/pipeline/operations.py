"""What one operation of a captured graph does: what it runs under, what it writes, whose memory its
result shares, and whether it draws by chance."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Under:
    """An operation of a region under autocast, no_grad or enable_grad, run under it."""

    def __init__(
        self,
        target: Callable[..., Any],
        autocast: tuple[str, torch.dtype | None, bool] | None = None,
        grad: bool | None = None,
    ) -> None:
        self.target, self.autocast, self.grad = target, autocast, grad
        self.__name__ = str(getattr(target, "__name__", target)).replace(".", "_")
        self.__module__ = __name__

    def __str__(self) -> str:
        autocast = f" under autocast{self.autocast}" if self.autocast else ""
        return f"{self.target}{autocast}" + ("" if self.grad is None else f" grad={self.grad}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if self.autocast is not None:
                device, dtype, enabled = self.autocast
                # Without the cache: it would hold a cast across operations that other stages run.
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            if self.grad is False or (self.grad and torch.is_grad_enabled()):
                stack.enter_context(torch.set_grad_enabled(self.grad))
            return self.target(*args, **kwargs)


def target_of(node: fx.Node) -> Any:
    """The operation that a node runs, whatever it runs under."""
    found: Any = node.target
    while isinstance(found, Under):
        found = found.target
    return found


def without_grad(node: fx.Node) -> bool:
    """Whether an operation runs under no_grad."""
    found: Any = node.target
    while isinstance(found, Under):
        if found.grad is not None:
            return not found.grad
        found = found.target
    return False


def is_op(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to in place."""
    target = target_of(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    found = []
    for at, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        found += [x for x in pytree.tree_leaves(value) if isinstance(x, fx.Node)]
    return found


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shares: through views, and through writes in place."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            inner = node.args[0]
            if not isinstance(inner, fx.Node) or not is_view(inner):
                return node
            node = inner
            continue
        if not is_view(node) or not node.all_input_nodes:
            return node
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    target = target_of(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    return any(one.alias_info is not None for one in schema.returns) or target in (
        torch.ops.aten.reshape.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.to.dtype,
        torch.ops.aten.to.dtype_layout,
        torch.ops.aten.flatten.using_ints,
    )


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers (dropout, attention with dropout)."""
    target = target_of(node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name
    if name in ("aten::dropout", "aten::dropout_", "aten::feature_dropout", "aten::alpha_dropout"):
        return bool(node.args[1]) and bool(node.args[2])
    if name == "aten::scaled_dot_product_attention":
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(given)
    return torch.Tag.nondeterministic_seeded in target.tags
