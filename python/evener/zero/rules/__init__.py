"""The optimizers of `evener.zero`. Each is one class in one file: its names, its defaults, its
moments, its formula, and its faster forms where it has some (`base.py` says what each must be).

To add one, write its file and name its class in `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.errors import UsageError
from evener.zero.rules.adam import Adam, AdamW
from evener.zero.rules.base import Rule
from evener.zero.rules.lion import Lion
from evener.zero.rules.muon import Muon
from evener.zero.rules.sgd import SGD

__all__ = ["RULES", "SGD", "Adam", "AdamW", "Lion", "Muon", "Rule", "configured", "named", "of"]

RULES: tuple[type[Rule], ...] = (AdamW, Adam, SGD, Lion)
WHOLE = {
    "adafactor": "has one number for each row and column of a parameter",
    "lamb": "scales a step by the norm of the whole parameter",
    "lars": "scales a step by the norm of the whole parameter",
    "shampoo": "multiplies by matrices of the whole parameter",
}
"""Optimizers that are not elementwise, and why: what they do needs a parameter as a whole, and here
it is updated in slices, on several ranks and by two lanes, none of which sees the others. Muon is
the one that was worth lanes of whole matrices, and an exchange between ranks (`matrices`)."""


def named(name: str, **given: Any) -> Rule:
    """The optimizer of this name, with these hyper-parameters. Raises UsageError."""
    for rule in RULES:
        if rule.name == name:
            return rule(**given)
    raise UsageError(f"optimizer {name!r} is not known", f"use one of {_choice('name')}")


def of(optimizer: torch.optim.Optimizer) -> Rule:
    """The same optimizer as this one, by its class. Those of other libraries that are known to
    do the same are taken, by their module and name.

    Raises UsageError where there is none, and where it does something that ours does not.
    """
    kind = type(optimizer).__name__
    if type(optimizer) is getattr(torch.optim, "Muon", None):  # torch has it from 2.9 on
        return Muon(**Muon.read(kind, optimizer.defaults))
    for rule in RULES:
        if rule.title == kind and _known(type(optimizer)):
            if getattr(optimizer, "decoupled_wd", False):  # no default of lion_pytorch's
                raise UsageError(f"{kind}(decoupled_weight_decay=True)", "use False")
            return rule(**rule.read(kind, optimizer.defaults))
    _refuse_whole(kind)
    if any(rule.title == kind for rule in RULES):
        kind = f"{type(optimizer).__module__}.{kind}"
    raise UsageError(
        f"optimizer {kind} has no fused kernel",
        f"use {_choice('title')}, or name one in the configuration",
    )


LIBRARIES = (
    "lion_pytorch.lion_pytorch",
    "bitsandbytes.optim",
    "timm.optim",
    "deepspeed.ops",
    "apex.optimizers",
)


def _known(kind: type) -> bool:
    return getattr(torch.optim, kind.__name__, None) is kind or kind.__module__.startswith(
        LIBRARIES
    )


def configured(kind: str, params: Mapping[str, Any]) -> Rule:
    """What DeepSpeed's JSON names: `optimizer.type` and `optimizer.params`. Raises UsageError."""
    for rule in RULES:
        if (given := rule.from_deepspeed(kind.lower(), dict(params))) is not None:
            return rule(**given)
    _refuse_whole(kind)
    raise UsageError(f"optimizer.type = {kind!r}", f"use {_choice('title')}")


def _refuse_whole(kind: str) -> None:
    if kind.lower() == "muon":
        raise UsageError(
            f"optimizer {kind} is taken as torch.optim.Muon or zero.MuonAdamW alone",
            "give zero.MuonAdamW(model), or [torch.optim.Muon(matrices), "
            "torch.optim.AdamW(others)]",
        )
    if why := WHOLE.get(kind.lower()):
        raise UsageError(
            f"optimizer {kind} {why}, and parameters are updated in slices here",
            f"use {_choice('title')}; int8 moments (evener.moments) are a quarter of AdamW's",
        )


def _choice(attribute: str) -> str:
    words = [getattr(rule, attribute) for rule in RULES]
    return f"{', '.join(words[:-1])} or {words[-1]}"
