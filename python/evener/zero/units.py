"""How a model is cut: units that are fetched and freed together, in the order of the model.

A unit is an entry of an outermost ModuleList or Sequential (a transformer block), or else the
module that holds parameters itself (an embedding, a head). Inside a unit, the parameters of one
optimizer group form a chunk, and the frozen ones another. Small units stay on the accelerator. So
do the weights of parameters that are tied (reached by two names), held by a container, or read
while their unit does not run (`trace` finds those); their states may be on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from evener.base.optimizers import BLOCK
from evener.zero.owners import Matrix
from evener.zero.rules import AdamW, Rule

FROZEN = -1
ALIGN = 8
"""Parameters begin at multiples of it, ranks' shares too: aligned for vector loads."""
LEAST = 4096
"""Elements from which on a parameter's moments have one byte, where that is asked for. Below, it
would save nothing (Dettmers et al., arXiv 2110.02861, keep the same in float32)."""


@dataclass
class Piece:
    """One parameter in its chunk's flat buffer."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()


@dataclass
class Group:
    """The parameters of one chunk."""

    name: str
    group: int
    pieces: list[Piece] = field(default_factory=list)
    numel: int = 0
    kept: bool = False
    """The weights stay on the accelerator, the states need not."""
    align: int = ALIGN
    """What offsets are multiples of; `BLOCK` where moments have one byte, so that no block is of
    two parameters or ranks."""
    rule: Rule = field(default_factory=AdamW)
    """The optimizer of its parameters, where it is trainable."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Its parameters, where each is updated as a whole; else none."""
        if not (self.trainable and self.rule.whole):
            return ()
        return tuple(Matrix(p.offset, p.numel, self.rule.flops(p.shape)) for p in self.pieces)

    @property
    def trainable(self) -> bool:
        """Whether it has optimizer states."""
        return self.group != FROZEN

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Append a parameter."""
        self.pieces.append(Piece(name, parameter, parameter.shape, self.numel))
        self.numel += -(-parameter.numel() // self.align) * self.align


@dataclass
class Unit:
    """What is fetched together. `module` is None for the unit that always stays."""

    name: str
    module: nn.Module | None
    groups: list[Group]
    repeated: bool = False
    once: bool = False
    """It cannot be recomputed, as something is written in place to what it is given."""

    @property
    def numel(self) -> int:
        """Elements, with padding."""
        return sum(group.numel for group in self.groups)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    found: list[tuple[str, nn.Module, bool]] = []

    def walk(name: str, module: nn.Module, repeated: bool) -> None:
        if repeated:
            found.append((name, module, True))
            return
        if next(module.parameters(recurse=False), None) is not None:
            found.append((name, module, False))
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child, sub in module.named_children():
            walk(f"{name}.{child}" if name else child, sub, listed)

    walk("", model, False)
    return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are repeated."""
    return [module for _, module, repeated in _modules(model) if repeated]


def cut(
    model: nn.Module,
    groups: Mapping[nn.Parameter, int] | None = None,
    small: int = 0,
    stay: Set[str] = frozenset(),
    bytes: bool = False,
    rule_of: Callable[[int], Rule] = lambda _: AdamW(),
) -> list[Unit]:
    """The units of `model`; the first is the one that stays. `groups`: optimizer group by
    parameter (default: all in group 0). `small`: units of at most this many elements stay. `stay`:
    names of parameters that do. `bytes`: moments have one byte each (`_blocked`). `rule_of`: the
    optimizer of a group."""
    group_of = groups or {}
    owners: dict[nn.Parameter, set[str]] = {}
    names: dict[nn.Parameter, str] = {}
    entries = _modules(model)
    for prefix, module, repeated in entries:
        for name, parameter in module.named_parameters(
            prefix=prefix, recurse=repeated, remove_duplicate=False
        ):
            names.setdefault(parameter, name)
            owners.setdefault(parameter, set()).add(prefix)
    always = Unit("(stays)", None, [])
    units = [always]
    taken: set[nn.Parameter] = set()

    def put(unit: Unit, parameter: nn.Parameter, kept: bool = False) -> None:
        number = group_of.get(parameter, 0) if parameter.requires_grad else FROZEN
        for chunk in unit.groups:
            if chunk.group == number and chunk.kept == kept:
                break
        else:
            name = "(kept)" if kept else unit.name
            label = f"{name}/{'frozen' if number == FROZEN else number}"
            chunk = Group(label, number, kept=kept, rule=rule_of(number))
            unit.groups.append(chunk)
        chunk.add(names[parameter], parameter)

    for prefix, module, repeated in entries:
        unit = Unit(prefix, module, [], repeated)
        mine = list(dict.fromkeys(module.parameters(recurse=repeated)))
        container = not repeated and any(True for _ in module.children())
        tiny = sum(p.numel() for p in mine) <= small
        for parameter in mine:
            if parameter in taken:
                continue
            taken.add(parameter)
            kept = container or len(owners[parameter]) > 1 or names[parameter] in stay
            large = parameter.numel() > small
            put(always if kept or tiny else unit, parameter, kept and large)
        if unit.groups:
            units.append(unit)
    return _blocked(units) if bytes else units


def _blocked(units: list[Unit]) -> list[Unit]:
    """The same units for moments of one byte: of each chunk the parameters that are large enough,
    on blocks of their own. The others stay on the accelerator."""
    found = [replace(unit, groups=[]) for unit in units]
    small: dict[int, Group] = {}
    for unit, made in zip(units, found, strict=True):
        for group in unit.groups:
            if not group.trainable:
                made.groups.append(group)
                continue
            large = replace(group, pieces=[], numel=0, align=BLOCK)
            for piece in group.pieces:
                to = large
                if piece.numel < LEAST:
                    name = f"(stays)/{group.group}/small"
                    to = small.setdefault(group.group, Group(name, group.group, rule=group.rule))
                to.add(piece.name, piece.parameter)
            if large.pieces:
                made.groups.append(large)
    found[0].groups += small.values()
    return [found[0], *(unit for unit in found[1:] if unit.groups)]
