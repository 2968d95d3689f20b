"""Where a function of torch decides by the values of what it is given.

`if x.mean() > 0`, `float(x.std())`, `x.argmax().item()`, `x.tolist()`, `x.numpy()`: a number leaves
the tensors, and Python goes on with it. The check of `bucketed` sees the ways that a few batches
take, and the next may take another, in which rows are not computed one by one. So what is looked
for is the number itself: the values of padded inputs are followed through one call. Shapes do not
count, and neither does whether numbers are finite: padding that repeats a row has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_NUMBERS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
# These read memory, and no operation tells of it.
_ARRAYS = (
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__,
)  # fmt: skip
_NO_VALUES = (
    _aten.isnan.default, _aten.isinf.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.empty_like.default, _aten.full_like.default, _aten.rand_like.default,
    _aten.randn_like.default,
)  # fmt: skip


class Decisions(TorchDispatchMode):
    """While it is open, `found` becomes True where a number is taken from what follows `inputs`."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.found = False
        # By id: kept, so that no other tensor gets it meanwhile.
        self._following = {id(x): x for x in inputs}
        self._arrays = _Arrays(self)

    def __enter__(self) -> Decisions:
        self._arrays.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._arrays.__exit__(*error)

    def follows(self, given: Iterable[Any]) -> bool:
        """Whether one of them is a tensor that follows the inputs."""
        return any(id(x) in self._following for x in given if isinstance(x, torch.Tensor))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        follows = self.follows(given)
        self.found = self.found or (follows and func in _NUMBERS)
        made = func(*args, **(kwargs or {}))
        if follows and func not in _NO_VALUES:
            outputs = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
            self._following |= {id(x): x for x in outputs}
        return made


class _Arrays(TorchFunctionMode):
    """The part of `Decisions` that sees a tensor become a list or an array."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ARRAYS and self._decisions.follows(args):
            self._decisions.found = True
        return func(*args, **(kwargs or {}))
