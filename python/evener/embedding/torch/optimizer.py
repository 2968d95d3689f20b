"""The step of embeddings as an optimizer of torch.

Gradients wait in their tables until `step()`, and are not applied in backward as fused embeddings
of other libraries do. That is what a user of PyTorch expects: micro-batches add up, gradients can
be clipped and unscaled first, and a step that GradScaler skips leaves everything as it was.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from evener.base.given import given
from evener.embedding.torch.lookups import apply, check, exchange
from evener.embedding.torch.modules import _Dynamic
from evener.embedding.torch.sharded import Ranks
from evener.embedding.torch.table import Table
from evener.errors import UsageError

Models = nn.Module | Iterable[nn.Module]


@given
def tables(model: Models) -> list[Table]:
    """The tables of all DynamicEmbedding and DynamicEmbeddingBag in `model`, once each."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    found = {
        id(module.table): module.table
        for each in models
        for module in each.modules()
        if isinstance(module, _Dynamic)
    }
    return sorted(found.values(), key=lambda table: table.number)


class DynamicOptimizer(torch.optim.Optimizer):
    """Steps the embeddings of `model`, and `dense`, an optimizer of everything else, with them.

    Each table is a group of `param_groups`, with its name under "embedding" and its learning rate
    under "lr", which learning rate schedulers change. The rest of the optimizer (its kind, betas)
    is in the options of the table, because its slots are in the rows.

    GradScaler works on it as on any optimizer. `clip_grad_norm_` of this package clips embeddings
    and dense parameters together; torch's takes `embeddings.waiting()` beside
    `model.parameters()`.
    """

    @given
    def __init__(
        self, model: Models, dense: torch.optim.Optimizer | None = None, lr: float | None = None
    ) -> None:
        """lr: of all tables; default: what each table's options say.

        Raises UsageError where `model` has no embedding, or one that another optimizer steps.
        """
        self._dense: torch.optim.Optimizer | None = None
        self._own: list[dict[str, Any]] = []
        self.tables = [table for table in tables(model) if not table.fused]
        if not self.tables:
            raise UsageError(
                "the model has no embedding that waits for a step",
                "give a model with DynamicEmbedding or DynamicEmbeddingBag, not fused ones",
            )
        for table in self.tables:
            if table.optimizer is not None and table.optimizer() is not None:
                raise UsageError(
                    f"embedding {table.name!r} has a DynamicOptimizer already", "make one of them"
                )
        groups = [
            {
                "params": [table.waiting, table.overflow],
                "lr": table.lr if lr is None else lr,
                "embedding": table.name,
            }
            for table in self.tables
        ]
        super().__init__(groups, {})
        self._dense = dense
        for table in self.tables:
            table.optimizer = weakref.ref(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the dense optimizer, then a group per table."""
        return self._own if self._dense is None else [*self._dense.param_groups, *self._own]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._own = groups

    def waiting(self) -> Iterator[nn.Parameter]:
        """Stand-ins for the tables' weights, whose `.grad` is what waits: for clipping."""
        for table in self.tables:
            yield table.waiting

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the dense optimizer."""
        if self._dense is not None:
            self._dense.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every table and of `dense`.

        Raises UsageError for a gradient that is not finite (on the CPU; from a cache on a GPU with
        the next call), before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _exchange_rest(self.tables)
        check(self.tables)
        apply(self.tables, [float(group["lr"]) for group in self._own])
        for table in self.tables:
            table.step += 1
        if self._dense is not None:
            self._dense.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what waits, and zero the dense gradients."""
        for table in self.tables:
            table.discard()
        if self._dense is not None:
            self._dense.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Learning rates, and the dense optimizer's state. Slots of rows are in the model's."""
        rates = {group["embedding"]: _plain(group) for group in self._own}
        dense = None if self._dense is None else self._dense.state_dict()
        return {"embeddings": rates, "dense": dense}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From `state_dict`. Raises UsageError where the tables are others."""
        rates = state_dict.get("embeddings", {})
        names = {group["embedding"] for group in self._own}
        if set(rates) != names:
            raise UsageError(
                f"the state is of embeddings {sorted(rates)}, the model has {sorted(names)}",
                "load it into the model that it was saved of",
            )
        for group in self._own:
            group.update(rates[group["embedding"]])
        if self._dense is not None and state_dict.get("dense") is not None:
            self._dense.load_state_dict(state_dict["dense"])

    def __repr__(self) -> str:
        names = ", ".join(table.name for table in self.tables)
        return f"DynamicOptimizer({names}; dense={type(self._dense).__name__})"


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@given
@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over dense parameters and embeddings together.

    The norm is over all rows of all ranks where tables are sharded (then collective). Returns the
    norm before clipping.
    """
    found = tables(model)
    if norm_type not in (1.0, 2.0):
        raise UsageError(f"norm_type={norm_type} is not there", "1 or 2")
    _exchange_rest(found)
    dense = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64)
    for gradient in dense:
        total += _power_sum(gradient, norm_type)
    parts = torch.zeros(len(found), dtype=torch.float64)
    together: dict[Ranks, list[int]] = {}
    for i, table in enumerate(found):
        own = table.waiting.grad
        if own is not None:
            parts[i] = _power_sum(own, norm_type)
        if table.sharded is not None:
            together.setdefault(table.sharded.ranks, []).append(i)
    for ranks, at in together.items():
        parts[at] = ranks.sum(parts[at])
    total += parts.sum()
    norm = total ** (1 / norm_type)
    if float(norm) > max_norm:
        factor = float(max_norm / (norm + 1e-6))
        rows = (table.waiting.grad for table in found)
        for gradient in itertools.chain(dense, (own for own in rows if own is not None)):
            gradient.mul_(factor)
    return norm.float()


def _exchange_rest(found: list[Table]) -> None:
    """Bring the gradients of backward passes that ended in `no_sync` to their owners."""
    if rest := [table for table in found if table.local or table.together]:
        exchange(rest)


def _power_sum(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    return (gradient.double().abs() ** norm_type).sum().cpu()


@given
@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside keep embeddings' gradients on their rank, as DDP's `no_sync` does.

    The first backward pass after it, or the step, brings all of them to their owners. Without it
    gradients of micro-batches are right too, and each crosses the network.
    """
    with ExitStack() as stack:
        for table in tables(model):
            stack.enter_context(table.no_exchange())
        yield
