"""torch's norm of gradients, where some of them lie on other ranks.

torch.nn.utils.clip_grad_norm_ takes the norm of what one rank has. Where ranks hold different
parameters (stages of a pipeline, spread experts) each would clip by a norm of its own, and what
they share would run apart. Who holds such parameters says how their norm is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from evener.base import torch_names

Plain = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""torch's own norm of some gradients."""

Asked = Callable[[Sequence[torch.Tensor], float, Plain], torch.Tensor | None]
"""(gradients, norm type, torch's own) > their norm over all ranks; None where none is its own."""

_asked: list[Asked] = []


def ask(asked: Asked) -> None:
    """Ask `asked` before torch takes a norm in clip_grad_norm_ or get_total_norm.

    Raises UsageError for a torch that takes it elsewhere: each rank would clip by its own norm.
    """
    plain = torch_names.total_norm()
    if asked not in _asked:
        _asked.append(asked)
    if not getattr(plain, "evener", False):
        made = _asking(plain)
        clip_grad._get_total_norm = made
        torch.nn.utils.get_total_norm = made


def _asking(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for asked in list(_asked):
            with torch.no_grad():
                found = asked(
                    given, float(norm_type), lambda some: plain(some, norm_type, False, foreach)
                )
            if found is None:
                continue
            if error_if_nonfinite and not bool(found.isfinite()):
                raise RuntimeError(
                    f"the total norm of order {norm_type} of the gradients is {float(found)}"
                )
            return found
        return plain(given, norm_type, error_if_nonfinite, foreach)

    total_norm.evener = True  # type: ignore[attr-defined]
    return total_norm


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
            total = norm if math.isnan(norm) or norm > total else total
        else:
            total += share * (float(norm != 0) if norm_type == 0 else norm**norm_type)
    return total


def whole(parts: Sequence[float], norm_type: float) -> float:
    """The norm, from what the ranks add."""
    if math.isinf(norm_type):
        return float(torch.tensor(parts, dtype=torch.float64).max())
    total = sum(parts)
    return total if norm_type == 0 else total ** (1 / norm_type)
