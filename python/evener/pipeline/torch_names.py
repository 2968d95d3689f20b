"""Names of torch that are not promised to stay, and for which versions they are known.

All of what a pipeline takes from torch beside its documented interface is here. Seen in 2.9 to
2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

_Norm = Callable[..., torch.Tensor]


def replace_total_norm(asked: Callable[..., torch.Tensor]) -> None:
    """Let torch.nn.utils.clip_grad_norm_ take the norm from `asked(torch's own, ...)`.

    `clip_grad._get_total_norm`: 2.6 to 2.15, also as `torch.nn.utils.get_total_norm`.
    """
    plain: _Norm | None = getattr(clip_grad, "_get_total_norm", None)
    if plain is None or getattr(plain, "evener", False):
        return

    def total_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return asked(plain, *args, **kwargs)

    total_norm.evener = True  # type: ignore[attr-defined]
    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm
