"""What an update on the accelerator takes beside the states, per element.

A rule with a kernel of its own takes nothing. In torch operations it takes float32 copies, and with
stochastic rounding integers of 64 bits: 12 bytes with SGD, 24 with AdamW, 76 with bf16 moments. So
it is measured: the rule updates a few thousand elements on the CPU while their memory is counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from evener.zero.meter import Ledger, Meter
from evener.zero.rules import Muon, Rule
from evener.zero.states import Noise, States, stride
from evener.zero.store import Formats, states_of
from evener.zero.units import Group

NUMEL = 1 << 12
"""Elements of the update that is measured: a multiple of what memory is rounded to."""
SQUARE = torch.Size((1 << 6, 1 << 6))
"""As a matrix: the shape whose products with itself are largest."""


@torch.no_grad()
def halves_of(rule: Rule, formats: Formats) -> tuple[int, int]:
    """Bytes per element of an update of matrices that ranks share (`Muon.first_half`): of the
    larger half, and of the products."""
    assert isinstance(rule, Muon)
    hyper, (states, gradient) = _hyper(rule), _measured(rule, formats)
    momentum, change = states.first, torch.zeros(NUMEL, dtype=torch.bfloat16)
    assert momentum is not None
    noise = Noise()
    peaks = []
    for call in (
        lambda: rule.first_half(momentum, gradient, hyper, 2, 1.0, noise),
        lambda: rule.of_shape(SQUARE).second_half(states, change, hyper, 2, noise),
        lambda: rule.products(change.view(SQUARE), hyper),
    ):
        ledger = Ledger()
        with Meter(ledger):
            call()
        peaks.append(-(-ledger.peak // NUMEL))
    first, second, products = peaks
    # The parts of a matrix are put together, where it has several.
    return max(first, second), products + torch.bfloat16.itemsize


@torch.no_grad()
def scratch_of(rule: Rule, formats: Formats, cuda: bool) -> int:
    """Bytes per element. `cuda`: of a GPU, where some rules have a kernel."""
    if cuda and rule.kernel:
        return 0
    hyper, (states, gradient) = _hyper(rule), _measured(rule, formats)
    ledger = Ledger()
    with Meter(ledger):
        rule.of_shape(SQUARE).on_device(states, gradient, hyper, 2, 1.0)
    return -(-ledger.peak // NUMEL)


def _hyper(rule: Rule) -> dict[str, Any]:
    """Groups have values of their own: what is off in the rule's may be on there."""
    return {k: 0.1 if type(v) is float and v == 0 else v for k, v in rule.values.items()}


def _measured(rule: Rule, formats: Formats) -> tuple[States, torch.Tensor]:
    """States and gradient of the elements that are updated."""
    states, gradient = states_of(
        Group("measured", 0, rule=rule),
        replace(formats, pool=0),
        lambda name, dtype: torch.zeros(NUMEL // stride(name), dtype=dtype),
    )
    assert gradient is not None
    return states, gradient
