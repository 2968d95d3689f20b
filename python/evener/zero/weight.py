"""Parameters of a model under the engine: they hold values only while the engine lends them some.

A parameter whose values are away, or are those of before the last step, raises with its name where
something computes with it. One that the engine brings at the start of each pass is brought then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from evener.errors import UsageError

_GRAD: Any = torch.Tensor.grad
_SEEN = {
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_leaf", "grad_fn", "names", "itemsize", "nbytes", "is_nested",
    "is_mps", "is_xpu", "is_mkldnn", "is_sparse_csr", "grad", "_backward_hooks",
}  # fmt: skip
_ASKED = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.ndimension, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.__hash__, torch.Tensor.element_size, torch.Tensor.__len__, torch.Tensor.stride,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.get_device,
    torch.Tensor.requires_grad_, torch.Tensor.register_hook, torch.Tensor.is_contiguous,
    torch.Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip


class Weight(nn.Parameter):
    """A parameter that holds its values. `place`: (its chunk, where it is in it)."""

    place: tuple[weakref.ref[Any], int, str]
    wake: Callable[[], None]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, on its way to the engine. Raises UsageError where it has left: what reads
        or clips it here would do nothing."""
        found: torch.Tensor | None = _GRAD.__get__(self)
        if found is None:
            self._refuse_gone("read")
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if _GRAD.__get__(self) is None:
            self._refuse_gone("set")
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _refuse_gone(self, what: str) -> None:
        place = getattr(self, "place", None)
        chunk = place[0]() if place is not None else None
        if place is not None and chunk is not None and (
            place[1] in chunk.given or place[1] in chunk.arrived
        ):  # fmt: skip
            raise UsageError(
                f"the gradient of {place[2]} cannot be {what}: it has left the parameter for the "
                "engine",
                "clip by `gradient_clipping` in the configuration; engine.norm() is the norm, and "
                "the optimizer's zero_grad() drops what has come",
            )


class Away(Weight):
    """One that does not."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (
            func in _ASKED
            or (name == "__get__" and func.__self__.__name__ in _SEEN)
            or (name == "__set__" and func.__self__.__name__ in ("requires_grad", "grad"))
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for woken in (False, True):
            gone = [x for x in tree_leaves((args, kwargs)) if type(x) is Away]
            if not gone:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if not woken:
                gone[0].wake()
        named = gone[0].place[2]
        raise UsageError(
            f"weight {named} is away: its values are with the engine while its block does not run",
            "read it from engine.module.state_dict(), or take all back with zero.give_back(engine)",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"weight {self.place[2]} {tuple(self.shape)}, away"


def _become(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    parameter.__class__ = kind


def take(parameter: nn.Parameter, chunk: Any, place: int, name: str) -> None:
    """Make `parameter` the engine's."""
    if type(parameter) is nn.Parameter:
        _become(parameter, Weight)
        vars(parameter)["place"] = (weakref.ref(chunk), place, name)
        vars(parameter)["wake"] = lambda: None


def lend(parameter: nn.Parameter) -> None:
    """It holds its values."""
    if type(parameter) is Away:
        _become(parameter, Weight)


def away(parameter: nn.Parameter) -> None:
    """It does not."""
    if type(parameter) is Weight:
        _become(parameter, Away)


def free(parameter: nn.Parameter) -> None:
    """It is nobody's."""
    if isinstance(parameter, Weight):
        _become(parameter, nn.Parameter)
        vars(parameter).pop("place", None)
        vars(parameter).pop("wake", None)
