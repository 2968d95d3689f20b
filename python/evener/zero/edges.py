"""Where the graph of a call begins and ends, whatever is written to its inputs and outputs.

A hook on a tensor is on the node that made its value, and stays there when something is written to
the tensor: the write's node comes behind it. With a view it is not so. The write's node then comes
behind the node of the view's base, a new one makes the view, and no backward pass meets the view's
old node any more. A linear layer with a bias returns a view where its input has three dimensions.
So a hook at the end of a call is on the bases of its outputs, too, and a hook at its beginning on
the nodes that there were before the call ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    saved_tensors_hooks,
)
from torch.utils._pytree import tree_leaves

from evener.errors import UsageError


class WrittenError(UsageError):
    """A block cannot run again: something was written in place to what it was given."""

    def __init__(self, which: str) -> None:
        super().__init__(
            f"the input of {which} was written to in place, and the block was to run again with it "
            "in the backward pass",
            "write `x = x + y` instead of `x += y`, or give evener.checkpointing = false",
        )


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in it, once each."""
    found = {id(x): x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}
    return list(found.values())


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def versioned(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What a block is given, and which version of it."""
    with torch._C.DisableTorchFunctionSubclass():
        return x, _version(x)


def unchanged(x: torch.Tensor, version: int) -> torch.Tensor:
    """`x`; raises WrittenError where something was written to it since then."""
    if versioned(x)[1] != version:
        raise WrittenError("a block")
    return x


def kept() -> saved_tensors_hooks:
    """While a block that is recomputed is entered: what it is given must be unchanged then."""
    return saved_tensors_hooks(versioned, lambda saved: unchanged(*saved))


def _base(x: torch.Tensor) -> torch.Tensor | None:
    """What a tensor of a graph is a view of, if that is in the graph and no leaf: a view of a leaf
    cannot be written to."""
    base = x._base if x._is_view() else None
    return base if base is not None and base.grad_fn is not None else None


class Edges:
    """The edges of one call, made from its arguments before it runs. `inputs`: the arguments
    that need a gradient."""

    def __init__(self, arguments: Any) -> None:
        # Lazy logits, and weights that are away, ask nobody here.
        with torch._C.DisableTorchFunctionSubclass():
            self._given = [(x, _version(x)) for x in _tensors(arguments)]
            self.inputs = [x for x, _ in self._given if x.requires_grad]
            bases = [base for x in self.inputs if (base := _base(x)) is not None]
            self._before = {id(x): (x, x.grad_fn) for x in (*self.inputs, *bases)}

    def written(self) -> list[torch.Tensor]:
        """The arguments to which something was written since then."""
        with torch._C.DisableTorchFunctionSubclass():
            return [x for x, version in self._given if _version(x) != version]

    def ends(self, results: Any) -> list[torch.Tensor]:
        """What a backward pass reaches first of the call: one of these, whatever is written to them
        from now on. What was written to is a result as well."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [x for x in _tensors([results, self.written()]) if x.requires_grad]
            for base in [base for x in found if (base := _base(x)) is not None]:
                _, before = self._before.get(id(base), (base, None))
                if base.grad_fn is not before:  # not what the call was given
                    found.append(base)
        return found

    def on_begin(self, call: Callable[[], None]) -> list[Any]:
        """`call` runs when a backward pass has come to all inputs, as they were before the call, of
        which it computes a gradient. Handles of the hooks."""
        if not self.written():
            return [register_multi_grad_hook(self.inputs, lambda *_: call())]
        leaves = [x for x in self.inputs if self._before[id(x)][1] is None]
        nodes = [node for _, node in self._before.values() if node is not None]
        nodes += [get_gradient_edge(x).node for x in leaves]
        left: dict[int, int] = {}

        def passed(*_: Any) -> None:
            task = torch._C._current_graph_task_id()
            if task not in left:
                left[task] = sum(map(torch._C._will_engine_execute_node, nodes))
            left[task] -= 1
            if left[task] == 0:
                call()

        return [node.register_prehook(passed) for node in nodes]
