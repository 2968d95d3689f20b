"""Muon for the matrices of a model's blocks and AdamW for the rest, as one optimizer.

torch has no single optimizer for both, and loops of frameworks (Trainer, Accelerate, Lightning)
take one. This one has a group for each, and the engine updates each group by its own rule, as it
does with two optimizers of a script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero.rules import AdamW, Muon, Rule
from evener.zero.units import blocks

OPTIONS: Mapping[str, Any] = {
    "lr": 1e-3,
    "muon_lr": None,
    "adam_lr": None,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "adjust_lr_fn": "match_rms_adamw",
}
"""The names are those of DeepSpeed's `optimizer.params`, and torch's `adjust_lr_fn`."""


def hidden(model: nn.Module) -> Mapping[nn.Parameter, int]:
    """1 for the matrices of a model's blocks, which is what Muon is for; the rest is group 0."""
    return {p: 1 for block in blocks(model) for p in block.parameters() if p.dim() == 2}


def rules_of(**options: Any) -> list[Rule]:
    """The rules of group 0, AdamW, and of group 1, Muon. Raises UsageError for an unknown option,
    and for what is no number."""
    if unknown := set(options) - set(OPTIONS):
        raise UsageError(
            f"Muon with AdamW has no option {', '.join(sorted(unknown))}",
            f"it has {', '.join(OPTIONS)}",
        )
    found = {**OPTIONS, **options}
    for name in ("lr", "muon_lr", "adam_lr", "weight_decay", "momentum", "eps"):
        value = found[name]
        if value is None and name.endswith("_lr"):
            value = found[name] = found["lr"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise UsageError(f"{name} = {value!r}", "give a number that is not below 0")
    if found["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise UsageError(
            f"adjust_lr_fn = {found['adjust_lr_fn']!r}", 'use "match_rms_adamw" or "original"'
        )
    both = {"weight_decay": found["weight_decay"]}
    adam = AdamW(lr=found["adam_lr"], betas=tuple(found["betas"]), eps=found["eps"], **both)
    muon = {name: found[name] for name in ("momentum", "adjust_lr_fn")}
    return [adam, Muon(lr=found["muon_lr"], **muon, **both)]


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer for the engine, where a framework's loop takes one.

        optimizer = zero.MuonAdamW(model, lr=3e-4)
        trainer = zero.trainer(Trainer, config)(model=model, optimizers=(optimizer, None), ...)

    Muon has the trained matrices (two dimensions) of the model's repeated blocks; AdamW has all
    else that is trained: embeddings, the head, norms, biases. options: `lr` (1e-3) of both, or
    `muon_lr` and `adam_lr`; `weight_decay` (0.1) of both; Muon's `momentum` (0.95) and
    `adjust_lr_fn` ("match_rms_adamw", by which one `lr` fits both; "original": Keller Jordan's,
    where Muon wants some 0.02); AdamW's `betas` (0.9, 0.999) and `eps` (1e-8). Group 0 is AdamW's,
    group 1 Muon's; schedulers scale both. It steps under the engine alone.
    Raises UsageError for an unknown option, and where no matrix of a block is trained.
    """

    def __init__(
        self, model: nn.Module, *, among: Iterable[Any] | None = None, **options: Any
    ) -> None:
        self.rules = rules_of(**options)
        chosen = hidden(model)
        given = list(model.parameters() if among is None else among)
        if any(isinstance(each, dict) for each in given):
            raise UsageError(
                "model_parameters has groups, and Muon with AdamW makes its own",
                "give parameters, or initialize(optimizer=[torch.optim.Muon(...), ...])",
            )
        parameters = dict.fromkeys(p for p in given if p.requires_grad)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if chosen.get(p, 0) == number], **rule.values}
            for number, rule in enumerate(self.rules)
        ]
        if not groups[1]["params"]:
            raise UsageError(
                f"no matrix of {type(model).__name__} is trained in a block that is repeated: "
                "Muon would have nothing",
                "use AdamW, or choose matrices: initialize(optimizer=[torch.optim.Muon(matrices), "
                "torch.optim.AdamW(others)])",
            )
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> Any:
        """Refused: under the engine, its step takes this one's place."""
        raise UsageError(
            "MuonAdamW steps under the engine alone, and no engine has it",
            "give it to zero.initialize, zero.trainer or zero.accelerate; in a loop of plain torch "
            "use torch.optim.Muon and torch.optim.AdamW",
        )
