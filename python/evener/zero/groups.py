"""The groups of parameters that a program gives, and the optimizer of each.

A program's groups are those of its optimizer, or of several optimizers one after the other, as
Muon for matrices and AdamW for the rest. Which rule updates a chunk is a property of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero import rules
from evener.zero.config import Config
from evener.zero.split import MuonAdamW, hidden, rules_of

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What a program gives: one, or several that step together."""


def listed(given: Optimizers | None) -> list[torch.optim.Optimizer]:
    """All that were given. Raises UsageError for what cannot step together."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        return [] if given is None else [given]
    found = list(given)
    if not found:
        raise UsageError("optimizer = [] has no optimizer", "give one, or leave it out")
    owners: dict[nn.Parameter, str] = {}
    for optimizer in found:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer = [...] has {optimizer!r}", "give optimizers of torch, made on groups"
            )
        kind = type(optimizer).__name__
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in owners:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two of the optimizers, "
                    f"{owners[parameter]} and {kind}",
                    "give each parameter to one",
                )
            owners[parameter] = kind
    named = {"param_names" in group for one in found for group in one.param_groups}
    if len(named) > 1:
        raise UsageError(
            "some of the optimizers were given names of parameters and some were not",
            "give named_parameters() to all of them or to none",
        )
    return found


def made(
    given: Optimizers | None, config: Config, model: nn.Module, parameters: Iterable[Any] | None
) -> list[torch.optim.Optimizer]:
    """As `listed`, or the one optimizer that the configuration asks to be made of `parameters`."""
    if given is None and config.muon is not None:
        return [MuonAdamW(model, among=parameters, **config.muon)]
    return listed(given)


def planned(
    given: Optimizers | None, config: Config
) -> Callable[[nn.Module], Mapping[nn.Parameter, int]]:
    """What numbers the groups of a model that is only planned; writes down their rules."""
    optimizers = listed(given)
    with_rules(config, optimizers)
    if not optimizers and config.muon is not None:
        return hidden
    found = numbers([group for one in optimizers for group in one.param_groups])
    return lambda _: found


def with_rules(config: Config, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Write down the rules of these optimizers. Raises UsageError for what they cannot be with."""
    if optimizers:
        each = [rule for one in optimizers for rule in _rules(one)]
        config.rule = each[0]
        several = len(optimizers) > 1 or isinstance(optimizers[0], MuonAdamW)
        config.rules = each if several else []
    elif config.muon is not None:
        config.rules = rules_of(**config.muon)
    refuse(config)


def _rules(optimizer: torch.optim.Optimizer) -> list[rules.Rule]:
    """The rule of each group."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.rules
    return [rules.of(optimizer)] * len(optimizer.param_groups)


def rule_of(config: Config) -> Callable[[int], rules.Rule]:
    """What gives the rule of a group by its number."""
    known = dict(enumerate(config.rules))
    return lambda number: known.get(number, config.rule)


def has_matrices(config: Config) -> bool:
    """Whether a rule updates matrices as a whole."""
    return any(rule.whole for rule in (config.rule, *config.rules))


def refuse(config: Config) -> None:
    """Raise UsageError where matrices that are updated as a whole have moments of one byte."""
    for rule in (config.rule, *config.rules):
        if rule.whole and config.moments == torch.int8:
            raise UsageError(
                f'evener.moments = "int8" with {rule.title}: its momentum has no form of one byte',
                'use "bf16" or "fp32"',
            )


def refuse_unlike(config: Config, makes: Sequence[str]) -> None:
    """Raise UsageError where nodes with a copy of the states each would take products of matrices
    on other `makes` of accelerators: their last bits differ, and copies would drift apart."""
    given = sorted({*makes})
    if has_matrices(config) and len(given) > 1:
        raise UsageError(
            f"matrices are updated as a whole, on each node for itself, by {' and '.join(given)}: "
            "their products differ in the last bits, and so would the nodes' weights",
            'set "evener": {"nodes": "shard"}, or use nodes of one kind',
        )


def of(
    model: nn.Module,
    parameters: Iterable[Any] | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[dict[str, Any]]:
    """All groups, in order."""
    if optimizers:
        # The same dicts: a scheduler that was made on the given optimizer goes on writing here.
        return [group for optimizer in optimizers for group in optimizer.param_groups]
    given: list[Any] = list(parameters if parameters is not None else model.parameters())
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, nn.Parameter) else list(members)
        groups.append({**group, "params": [p for p in members if p.requires_grad]})
    return groups


def numbers(groups: Sequence[Mapping[str, Any]]) -> Mapping[nn.Parameter, int]:
    """The number of each parameter's group."""
    return {
        parameter: number for number, group in enumerate(groups) for parameter in group["params"]
    }
