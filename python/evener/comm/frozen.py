"""Parameters that are frozen for now, where torch wants them to require gradients.

What is reduced is settled once, when a model is wrapped; `requires_grad` may change at any time
after that. torch hands out the node that accumulates a gradient only while the parameter requires
one, and the node then serves the parameter for as long as anything holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def thawed(
    parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()
) -> Iterator[None]:
    """For a while all of `parameters` require gradients, and no other of `others` does."""
    wanted = list(parameters)
    mine = {id(parameter) for parameter in wanted}
    changed = [p for p in wanted if not p.requires_grad]
    changed += [p for p in others if id(p) not in mine and p.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
