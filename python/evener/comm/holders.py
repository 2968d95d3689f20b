"""Who else holds a tensor: references that a program has kept.

What nobody else can see may change while it is on its way. A reference can be the tensor itself
(Python counts those), the tensor from C++ (a graph that saved it), or other tensors in the same
memory: views, `.data`, arrays of NumPy. torch counts all of them; what the counts are where there
is nobody depends on versions, so they are measured, once, in tensors that nobody holds.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Counts = tuple[int, int, int]


def memory(tensor: torch.Tensor) -> int:
    """How many tensors lie in this tensor's memory, by torch's count; 0 for a sparse one."""
    if tensor.layout is not torch.strided:
        return 0
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def together(gradients: Iterable[torch.Tensor]) -> Counter[int]:
    """How many of `gradients` lie in each piece of memory: cuDNN writes an LSTM's into one."""
    dense = (g for g in gradients if g.layout is torch.strided)
    return Counter(gradient.untyped_storage()._cdata for gradient in dense)


def is_kept(parameter: torch.Tensor, here: Counter[int] | None) -> bool:
    """Whether anybody but `parameter` holds its `grad`, or memory of it.

    `here`: the gradients that lie `together`. None: memory is not looked at, because this
    parameter's own hook runs, and autograd holds some of it.
    """
    references, users, tensors = _of_gradient(parameter)
    alone = _alone()
    if references > alone[0] or users > alone[1]:
        return True
    gradient: Any = parameter.grad
    if here is None or gradient.layout is not torch.strided:
        return False
    return tensors > alone[2] + here[gradient.untyped_storage()._cdata] - 1


def view_is_kept(views: list[torch.Tensor], index: int, is_gradient: bool) -> bool:
    """Whether anybody holds `views[index]` but the list, and a parameter as its `grad`."""
    references, users = _in_list(views, index)
    alone = _alone_in_list()[is_gradient]
    return references > alone[0] or users > alone[1]


def values_are_kept(values: dict[Any, Any]) -> bool:
    """Whether anybody but the optimizer holds tensors of `values`, what it knows of a parameter.

    True too for what is neither a tensor nor immutable: nobody can count who sees that.
    """
    alone = _alone_in_dict()
    for value in values.values():
        if isinstance(value, torch.Tensor):
            if sys.getrefcount(value) > alone[0] or value._use_count() > alone[1]:  # type: ignore[attr-defined]
                return True
            if memory(value) > alone[2]:
                return True
        elif value is not None and not isinstance(value, int | float | complex | str | bytes):
            return True
    return False


def share_memory(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether other tensors lie in the memory of these, or other processes see it."""
    beside: dict[int, int] = {}
    for parameter in parameters:
        storage = parameter.untyped_storage()
        key = storage._cdata
        if key not in beside:
            beside[key] = int(torch._C._storage_Use_Count(key)) - _alone()[2]
        else:
            beside[key] -= 1
    return any(left > 0 for left in beside.values())


def is_foreign(parameter: torch.Tensor) -> bool:
    """Whether its memory is not torch's alone: NumPy's, a file's, shared with processes."""
    storage = parameter.untyped_storage()
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


# --- counts, and what they are where there is nobody else ---


def _of_gradient(parameter: torch.Tensor) -> Counts:
    gradient: Any = parameter.grad
    return sys.getrefcount(gradient), gradient._use_count(), memory(gradient)


def _in_list(tensors: list[torch.Tensor], index: int) -> tuple[int, int]:
    tensor: Any = tensors[index]
    return sys.getrefcount(tensor), tensor._use_count()


@functools.cache
def _alone() -> Counts:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _of_gradient(parameter)


@functools.cache
def _alone_in_list() -> tuple[tuple[int, int], tuple[int, int]]:
    parameter, tensors = nn.Parameter(torch.zeros(1)), [torch.zeros(1)]
    before = _in_list(tensors, 0)
    parameter.grad = tensors[0]
    return before, _in_list(tensors, 0)


@functools.cache
def _alone_in_dict() -> Counts:
    for value in {"one": torch.zeros(1)}.values():
        return sys.getrefcount(value), value._use_count(), memory(value)  # type: ignore[attr-defined]
    raise AssertionError
