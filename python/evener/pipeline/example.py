"""One call of a model, and what a later call must have in common with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from evener.errors import UsageError


@dataclass(frozen=True)
class Example:
    """One call of the model. Tensors may be on the meta device: only shapes are looked at."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    @classmethod
    def of(cls, given: Any, target: Any = None) -> Example:
        """From what a user writes: a tensor, a tuple of arguments, a mapping of named ones."""
        if isinstance(given, Example):
            return given
        if isinstance(given, torch.Tensor):
            return cls((given,), {}, target)
        if isinstance(given, Mapping):
            return cls((), dict(given), target)
        if isinstance(given, tuple | list):
            return cls(tuple(given), {}, target)
        raise UsageError(
            f"an example of type {type(given).__name__} is not known",
            "give a tensor, a tuple of arguments, or a dict of named arguments",
        )

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self) if isinstance(leaf, torch.Tensor)]

    @property
    def rows(self) -> int:
        """Rows of the batch: the first dimension of the first tensor that has one."""
        for tensor in self.tensors():
            if tensor.dim():
                return int(tensor.shape[0])
        raise UsageError("the example has no tensor with a batch", "give one batch of inputs")

    def resized(self, rows: int) -> Example:
        """The same with another number of rows, values repeated. `rows`: at least 1."""
        had = self.rows

        def fit(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != had:
                return leaf
            return leaf.repeat(-(-rows // had), *[1] * (leaf.dim() - 1))[:rows]

        found: Example = pytree.tree_map(fit, self)
        return found

    def part(self, begin: int, end: int) -> Example:
        """The rows from `begin` to before `end`."""
        had = self.rows

        def fit(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != had:
                return leaf
            return leaf[begin:end]

        found: Example = pytree.tree_map(fit, self)
        return found


pytree.register_pytree_node(
    Example,
    lambda e: ([e.args, e.kwargs, e.target], None),
    lambda children, _: Example(*children),
    serialized_type_name="evener.pipeline.Example",
)


@dataclass(frozen=True)
class Tensor:
    """What a call's tensor must be like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"


def leaf_of(value: Any) -> Any:
    return Tensor(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def check_same(name: str, given: Any, known: Any, split: bool, rows: int) -> None:
    """Raises UsageError for a value that the captured operations were not made with."""
    now = leaf_of(given)
    if isinstance(known, Tensor):
        wanted = Tensor((rows, *known.shape[1:]), known.dtype) if split else known
        if now != wanted:
            raise UsageError(
                f"{name} is {now if isinstance(now, Tensor) else repr(now)}, and was captured as "
                f"{wanted}",
                "give what the example had, but for the rows of the batch; pad to one length, or "
                "make a pipeline for each",
            )
        if given.requires_grad:
            raise UsageError(f"{name} requires a gradient, which stays in the pipeline",
                             "give it detached, or make it a parameter of the model")  # fmt: skip
    elif type(now) is not type(known) or not _equal(now, known):
        raise UsageError(
            f"{name}={now!r} was captured as {known!r}, which is a constant in the pipeline",
            "give what changes as a tensor, or make a pipeline for each value",
        )


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:  # noqa: BLE001 - then only the same object is known to be equal
        return one is other
