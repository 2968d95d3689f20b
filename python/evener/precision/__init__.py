"""Half precision that follows the loss: on where it does no harm, off where it does.

    policy = evener.precision.follow(model, optimizer)      # the loop stays as it is

or, with the loss computed by the policy (exact probes, and float16 with a loss scale):

    for x, y in data:
        loss = policy.step(lambda: loss_function(model(x), y))

`rules` says when; `torch` and `hooks` do it. Importing this package imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.base.given import given
from evener.precision.rules import Event, Facts, Limits, Machine, State

if TYPE_CHECKING:
    from evener.precision.torch import Policy

__all__ = ["Event", "Facts", "Limits", "Machine", "State", "follow"]


@given
def follow(model: Any, optimizer: Any, **options: Any) -> Policy:
    """A policy for a torch model and its optimizer: see `evener.precision.torch.Policy`."""
    from evener.precision.torch import Policy

    return Policy(model, optimizer, **options)
