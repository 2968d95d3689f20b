"""How a use of a parameter is noticed while its update, or its gradient, is still on its way.

For that time the parameter's class is `Pending`, a subclass of `torch.nn.Parameter` whose
`__torch_function__` is called by every operation of torch that is given it: a layer's forward, a
functional use (MultiheadAttention hands `out_proj.weight` to a function, `out_proj` is not called),
`.grad` (clipping), `.data`, `.detach()` (state_dict), `_foreach_*` (averages of weights). It tells
the owner, which waits for the parameter's bucket and makes all of the bucket ordinary parameters
again, and then the operation runs. So a step costs one Python call a bucket, not one an operation,
and nothing has to be known about the model.

What does not go through torch's Python operations is a C++ extension that takes tensors by pybind:
`hook_modules` therefore also waits for a module's own parameters before its forward.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Owner(Protocol):
    """Who is told."""

    def used(self, parameters: Sequence[Pending], function: Callable[..., Any]) -> None:
        """They are about to be given to `function`; make them ordinary before returning."""

    def dropped(self, parameter: Pending) -> bool:
        """Its `grad` is set to None: True where the owner has done that, or will in time."""


_T = torch.Tensor
# What says nothing of the values, and is asked for often.
_HARMLESS: frozenset[Any] = frozenset(
    {
        _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__,  # type: ignore[attr-defined]
        _T.requires_grad.__get__, _T.is_leaf.__get__, _T.ndim.__get__,  # type: ignore[attr-defined]
        _T.is_cuda.__get__, _T.is_cpu.__get__, _T.is_sparse.__get__,  # type: ignore[attr-defined]
        _T.is_quantized.__get__, _T.is_meta.__get__, _T.is_nested.__get__,  # type: ignore[attr-defined]
        _T.size, _T.numel, _T.nelement, _T.dim, _T.stride, _T.element_size,
        _T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.__len__,
    }
)  # fmt: skip
_SET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__set__
_OWNER = "_evener_owner"


class Pending(nn.Parameter):
    """A parameter whose update or gradient is still on its way; see the module."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _SET_GRAD and args[1] is None and _owner(args[0]).dropped(args[0]):
            return None
        found: list[Pending] = []
        _collect((args, kwargs), found)
        for parameter in found:
            if isinstance(parameter, Pending):  # an earlier one may have brought its whole bucket
                _owner(parameter).used(found, func)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _owner(self).used([self], copy.deepcopy)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _owner(self).used([self], _T.__reduce_ex__)
        return self.__reduce_ex__(protocol)


def _owner(parameter: Pending) -> Owner:
    owner: Owner = parameter.__dict__[_OWNER]
    return owner


def _collect(value: Any, found: list[Pending]) -> None:
    if type(value) is Pending:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)


def can_guard(parameter: torch.Tensor) -> bool:
    """Whether its class may be replaced for a while: only torch's own is known to bear it."""
    return type(parameter) is nn.Parameter


def arm(parameters: Iterable[nn.Parameter], owner: Owner) -> None:
    """From now on `owner` is told of the first use of each."""
    for parameter in parameters:
        parameter.__dict__[_OWNER] = owner
        parameter.__class__ = Pending


def disarm(parameters: Iterable[nn.Parameter]) -> None:
    """Make them ordinary again."""
    for parameter in parameters:
        if type(parameter) is Pending:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            del parameter.__dict__[_OWNER]


class _Hook:
    """A forward pre-hook that dies with its owner, and that a copy of the model does not have."""

    def __init__(self, owner: Owner | None) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        owner = self._owner()
        if owner is None:
            return
        found = [p for p in module._parameters.values() if type(p) is Pending]
        if found:
            owner.used(found, module.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


def hook_modules(model: nn.Module, owner: Owner) -> list[torch.utils.hooks.RemovableHandle]:
    """Before a module with parameters of its own runs, they count as used.

    But for torch's own modules, whose forward goes through torch's Python operations: a hook costs
    each call of a module more than all the rest of this.
    """
    return [
        module.register_forward_pre_hook(_Hook(owner))
        for module in model.modules()
        if any(p is not None for p in module._parameters.values()) and not _of_torch(module)
    ]


def _of_torch(module: nn.Module) -> bool:
    """Whether its forward is one of torch.nn's own."""
    forward = type(module).forward
    own = str(getattr(forward, "__module__", "")).startswith("torch.nn.modules.")
    return own and "forward" not in vars(module)
