"""What a pass that does not count leaves as it was: random numbers, and what modules keep on
themselves.

A model that runs on fake tensors (`trace`), or a second time (`boundary`, `passes`), may put a
tensor into a cache, count a call, or draw by chance. None of that may stay for the step that
follows: a counter would be ahead, a cache would hold no values, and a seeded job would draw other
numbers than without the engine.

Hooks are put on by a pass, too: transformers has some that collect hidden states, and an attribute
that says that they are there. Without the one, the other would be put on twice.

A forward pass may also keep tensors of its graph as attributes (an auxiliary loss). `kept_graphs`
finds them: for the caller they are outputs.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_FOREIGN = ("torch", "numpy", "builtins", "typing", "collections", "functools")
# What every module has: registries and hooks.
_MODULES = frozenset(vars(nn.Module()))
_SCALARS = frozenset({bool, int, float, str, type(None)})
_DEEPEST = 4


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Inside, numbers may be drawn: torch's, Python's and numpy's states are put back after it."""
    here = torch.get_rng_state()
    there = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    plain = random.getstate()
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(here)
        if there:
            torch.cuda.set_rng_state_all(there)
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(legacy)


class Attributes:
    """Attributes of modules as they are now, with what lists, dicts, sets and plain
    objects among them hold, and which hooks they have. `values`: of tensors that a pass may write
    in place, too; what is a buffer or in a graph is not looked at."""

    def __init__(self, modules: Iterable[nn.Module], values: bool = False) -> None:
        self._held: list[tuple[Any, Any]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks: list[tuple[dict[int, Any], tuple[int, ...]]] = []
        seen: set[int] = set()
        for module in modules:
            attributes = vars(module)
            self._held.append((attributes, attributes.copy()))
            for registry in (module._forward_hooks, module._forward_pre_hooks):
                self._hooks.append((registry, tuple(registry)))
            for name, value in attributes.items():
                if type(value) in _SCALARS or name in _MODULES:
                    continue
                if isinstance(value, torch.Tensor):
                    if values and not value.requires_grad and not value.is_meta:
                        self._values.append((value, value.detach().clone()))
                else:
                    self._hold(value, seen, 0)

    def _hold(self, value: Any, seen: set[int], depth: int) -> None:
        if type(value) in _SCALARS or id(value) in seen:
            return
        if isinstance(value, dict):
            inside = list(value.values())
        elif isinstance(value, list | set | tuple):
            inside = list(value)
        elif _is_plain(value):
            inside = [vars(value)]
        else:
            return
        seen.add(id(value))
        if isinstance(value, dict | list | set):
            self._held.append((value, value.copy()))
        if depth < _DEEPEST:
            for each in inside:
                self._hold(each, seen, depth + 1)

    @torch.no_grad()
    def restore(self) -> None:
        """As they were. Hooks that were put on since then are taken off."""
        for registry, were in self._hooks:
            for key in [key for key in registry if key not in were]:
                del registry[key]
        for held, was in self._held:
            if isinstance(held, list):
                held[:] = was
            elif isinstance(held, set) or _moved(held, was):
                held.clear()
                held.update(was)
        for tensor, value in self._values:
            tensor.data.copy_(value)  # its version stays: autograd may have saved it


@contextlib.contextmanager
def modules_kept(modules: Iterable[nn.Module], values: bool = False) -> Iterator[None]:
    """Inside, a model may run: its modules' attributes are put back after it (`Attributes`)."""
    before = Attributes(modules, values)
    try:
        yield
    finally:
        before.restore()


def kept_graphs(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Tensors of a graph that are attributes of modules, or in lists, tuples and dicts of these."""
    found: list[torch.Tensor] = []
    for module in modules:
        for name, value in vars(module).items():
            if type(value) in _SCALARS or name in _MODULES:
                continue
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    found.append(value)
            elif isinstance(value, list | tuple | dict) and value:
                leaves, _ = tree_flatten(value)
                found += [x for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn]
    return found


def replace_kept(modules: Iterable[nn.Module], cut: Mapping[int, torch.Tensor]) -> None:
    """Put others in the place of tensors that `kept_graphs` finds; by `id`."""

    def other(value: Any) -> Any:
        return cut.get(id(value), value) if isinstance(value, torch.Tensor) else value

    for module in modules:
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if type(value) in _SCALARS or name in _MODULES:
                continue
            if isinstance(value, torch.Tensor):
                attributes[name] = other(value)
            elif isinstance(value, list | tuple | dict) and value:
                leaves, spec = tree_flatten(value)
                if not any(id(x) in cut for x in leaves):
                    continue
                made = tree_unflatten([other(x) for x in leaves], spec)
                if isinstance(value, list):
                    value[:] = made
                elif isinstance(value, dict):
                    value.update(made)
                else:
                    attributes[name] = made


def _moved(held: dict[Any, Any], was: dict[Any, Any]) -> bool:
    return list(held) != list(was) or any(held[key] is not was[key] for key in was)


def _is_plain(value: Any) -> bool:
    """An object with attributes of a class that is neither torch's nor Python's: a cache, ..."""
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return False
    kind = type(value)
    return hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _FOREIGN
