"""The norm of all stages' gradients, for torch's own clip_grad_norm_ too.

A rank holds the parameters of its stages. torch.nn.utils.clip_grad_norm_ would clip each stage by a
norm of its own, and copies of a tied parameter would run apart. So while a pipeline is there, the
function in which torch takes the norm asks the pipeline where the gradients are its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from evener.errors import UsageError
from evener.pipeline import torch_names


class Owner(Protocol):
    """What has gradients on several ranks."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def grad_norm(
        self, norm_type: float = 2.0, gradients: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor: ...


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def own(owner: Owner) -> None:
    """Let torch's clipping take the norm of `owner`'s gradients over all ranks."""
    _owners.add(owner)
    torch_names.replace_total_norm(_asked)


def disown(owner: Owner) -> None:
    _owners.discard(owner)


def _asked(plain: Callable[..., torch.Tensor], tensors: Any, norm_type: Any = 2.0,
           error_if_nonfinite: bool = False, foreach: Any = None) -> torch.Tensor:  # fmt: skip
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    owners: list[Owner] = list(_owners)
    if not owners:
        return plain(given, norm_type, error_if_nonfinite, foreach)
    if not given:
        # A stage without any of these parameters takes part in the norm of the others'.
        if len(owners) > 1:
            return plain(given, norm_type, error_if_nonfinite, foreach)
        found = owners[0].grad_norm(norm_type, [])
    else:
        here = {id(t) for t in given}
        for owner in owners:
            mine = here & {id(p.grad) for p in owner.parameters() if p.grad is not None}
            if not mine:
                continue
            if mine != here:
                raise UsageError(
                    "gradients of a pipeline and others are clipped together",
                    "clip pipe.parameters() alone; pipe.grad_norm() gives their norm",
                )
            found = owner.grad_norm(norm_type, given)
            break
        else:
            return plain(given, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite and not bool(found.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(found)}"
        )
    return found


def partial(gradients: Iterable[tuple[torch.Tensor, float]], norm_type: float) -> float:
    """What one rank adds to a norm; each gradient with the share that is this rank's."""
    total = 0.0
    for gradient, share in gradients:
        if not share:
            continue
        value = gradient.coalesce().values() if gradient.is_sparse else gradient
        norm = float(torch.linalg.vector_norm(value, norm_type)) if value.numel() else 0.0
        if math.isinf(norm_type):
            # As torch's maximum: NaN stays.
            total = norm if norm != norm or norm > total else total
        else:
            total += share * (norm != 0 if norm_type == 0 else norm**norm_type)
    return total


def whole(parts: Sequence[float], norm_type: float) -> float:
    """The norm, from what the ranks add."""
    if math.isinf(norm_type):
        return float(torch.tensor(parts).max())
    total = sum(parts)
    return total if norm_type == 0 else total ** (1 / norm_type)
