"""A gradient use by use: what a lookup and what a layer add to it, each when it is known.

autograd adds up a parameter's gradient over all its uses before anybody sees it. An embedding whose
weight is the output layer's too is complete with the very last operation of backward, although the
layer's part, all of it but few rows, was there first; and a lookup's part is zero but for the rows
that were looked up.

So, while one of the modules that are watched runs, its `weight` is an alias of the parameter: the
output of `_Use`, whose backward is given the gradient of this one use. Whoever watches either takes
it, and autograd is told that there is none, or leaves it, and all is as ever. The alias is in the
module's `__dict__`, where attributes are found before parameters; `parameters()` and `state_dict()`
do not look there.

Uses of another kind (`F.linear(x, embedding.weight)`) reach the parameter as ever. Whoever watches
is told that there may be one: the modules' `_parameters` are dicts that say when an attribute is
read from them (`_Parameters`), and a module that runs with another weight (torch.func) says so too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn


class Lookup:
    """The rows that one call of an embedding looked up."""

    def __init__(self, indices: torch.Tensor) -> None:
        """`indices`: integers of any shape. On a GPU the host does not wait."""
        flat = indices.detach().reshape(-1)
        self._counted: tuple[torch.Tensor, torch.cuda.Event] | None = None
        if not flat.is_cuda or not flat.numel():
            self._rows: torch.Tensor = torch.unique(flat)
            return
        ordered = flat.sort().values
        first = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[1:], ordered[:-1], out=first[1:])
        place = first.cumsum(0) - 1
        self._rows = torch.empty_like(ordered).scatter_(0, place, ordered)
        count = torch.empty((), dtype=torch.int64, pin_memory=True)
        count.copy_(place[-1] + 1, non_blocking=True)
        self._counted = count, torch.cuda.current_stream(flat.device).record_event()

    def rows(self) -> torch.Tensor:
        """int64 [n], ascending, each once. The host waits until the device has come to the call."""
        if self._counted is not None:
            count, event = self._counted
            event.synchronize()
            self._rows, self._counted = self._rows[: int(count)], None
        return self._rows


class Watcher(Protocol):
    """Who is told."""

    def watches(self, index: int) -> bool:
        """Whether uses of this parameter are to be told apart now."""

    def used(self, index: int, lookup: Lookup | None) -> None:
        """Forward uses it: by a lookup, or in a layer (None)."""

    def elsewhere(self, index: int) -> None:
        """Forward may use it in a way of which nothing else is told."""

    def came(self, index: int, lookup: Lookup | None, gradient: torch.Tensor) -> bool:
        """Backward has this use's `gradient`, of the parameter's shape. True: it is taken."""


class _Use(torch.autograd.Function):
    """The parameter itself; see the module."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, take: Callable[[torch.Tensor], bool]) -> Any:
        ctx.take = take
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gone = _accumulates(ctx.next_functions[0][0]) and ctx.take(gradient)
        return None if gone else gradient, None


def _accumulates(leaf: Any) -> bool:
    """Whether this backward will add to the parameter's `grad`; `autograd.grad` asks otherwise."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad(..., [this parameter])
        return False


def in_backward() -> bool:
    """Whether a forward runs within a backward: checkpointed activations are computed again."""
    return int(torch._C._current_graph_task_id()) != -1


def by_rows(module: nn.Module) -> bool:
    """Whether it is an embedding the gradient of which is a sum over what was looked up."""
    return (
        type(module) is nn.Embedding
        and not module.sparse
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def compiled_in_place(module: nn.Module) -> bool:
    """Whether the user has called its `compile()`."""
    return module.__dict__.get("_compiled_call_impl") is not None


def compiled(model: nn.Module) -> str | None:
    """The name of a module that TorchScript or torch.compile runs, out of Python's sight."""
    for name, module in model.named_modules():
        if (
            type(module).__name__ == "OptimizedModule"
            or compiled_in_place(module)
            or isinstance(module, torch.jit.ScriptModule)
        ):
            return str(name)
    return None


def _weight(module: nn.Module) -> torch.Tensor | None:
    script = isinstance(module, torch.jit.ScriptModule)  # its parameters are kept in another way
    return None if script else module._parameters.get("weight")


def candidates(model: nn.Module, places: Mapping[int, int]) -> dict[int, bool]:
    """Parameters that are looked up: index to whether a layer (nn.Linear) uses it too.

    `places`: id of a parameter to its index. Not those of which any embedding is of another kind
    than `by_rows` knows, or that any other module has too.
    """
    lookups: dict[int, bool] = {}
    layers = set()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its parameters are kept in another way
        for name, parameter in module._parameters.items():
            index = places.get(id(parameter))
            if index is None:
                continue
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                lookups[index] = lookups.get(index, True) and by_rows(module)
            elif type(module) is nn.Linear and name == "weight":
                layers.add(index)
            else:
                lookups[index] = False
    return {index: index in layers for index, plain in lookups.items() if plain}


class _Hook:
    """Around a module's forward; dies with the watcher, and a copy of the model does not have it.

    The first half (`ends` False) puts the alias in, the second takes it out, also after an error.
    """

    def __init__(self, owner: Watcher | None, parameter: Any, index: int, ends: bool) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._parameter: Callable[[], Any] = (
            (lambda: None) if parameter is None else weakref.ref(parameter)
        )
        self.index, self.ends = index, ends

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if torch.compiler.is_compiling():  # what is compiled is not looked into
            return
        if self.ends:
            module.__dict__.pop("weight", None)
            return
        owner, weight = self._owner(), module._parameters.get("weight")
        if owner is None or not torch.is_grad_enabled() or not owner.watches(self.index):
            return
        if weight is None or weight is not self._parameter():
            owner.elsewhere(self.index)
            return
        if not weight.requires_grad:
            return
        lookup = None
        if type(module) is nn.Embedding:
            lookup = Lookup(args[0] if args else kwargs["input"])
        take = partial(owner.came, self.index, lookup)
        module.__dict__["weight"] = _Use.apply(weight, take)
        owner.used(self.index, lookup)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None, None, self.index, self.ends)

    def __reduce__(self) -> Any:
        return _Hook, (None, None, self.index, self.ends)


class _Parameters(dict[str, Any]):
    """A module's `_parameters`, of which reading `module.weight` tells the watcher.

    `parameters()`, `state_dict()` and hooks read items, and tell nobody. A copy is a plain dict.
    """

    def __init__(self, found: dict[str, Any], owner: Watcher, index: int) -> None:
        super().__init__(found)
        self._owner, self._index = weakref.ref(owner), index

    def __getitem__(self, name: str) -> Any:
        if name == "weight" and torch.is_grad_enabled():
            owner = self._owner()
            if owner is not None and owner.watches(self._index):
                owner.elsewhere(self._index)
        return super().__getitem__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Watched:
    """A module's parameters are watched, until `remove`."""

    def __init__(self, module: nn.Module, owner: Watcher, index: int) -> None:
        self._module = weakref.ref(module)
        module.__dict__["_parameters"] = _Parameters(module._parameters, owner, index)

    def remove(self) -> None:
        module = self._module()
        if module is not None and type(module._parameters) is _Parameters:
            module.__dict__["_parameters"] = dict(module._parameters)


class Handle(Protocol):
    """What takes a part of the watching back."""

    def remove(self) -> None:
        """Leave the module as it was."""


def hook(
    model: nn.Module, owner: Watcher, parameters: Mapping[int, torch.Tensor]
) -> Iterable[Handle]:
    """Tell `owner` of the uses of `parameters`, by index, in embeddings and linear layers."""
    places = {id(p): index for index, p in parameters.items()}
    handles: list[Handle] = []
    for module in model.modules():
        weight = _weight(module)
        index = places.get(id(weight))
        if index is None or not (by_rows(module) or type(module) is nn.Linear):
            continue
        before, after = (_Hook(owner, weight, index, ends) for ends in (False, True))
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        handles.append(_Watched(module, owner, index))
    return handles
