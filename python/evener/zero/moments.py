"""The optimizer's moments as torch's `state_dict` has them, and back.

The engine keeps moments flat, chunk by chunk, 1/N of each chunk on a rank. Here each parameter's
part is cut out of it and named as torch.optim names it. On one rank that is the whole parameter in
its shape; on several it is a flat piece with its `range`: (first element, one past the last).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evener.errors import UsageError
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.units import Piece


@dataclass(frozen=True)
class _Part:
    """Elements [low, high) of a parameter are at `begin` in this rank's share of its chunk."""

    chunk: Chunk
    place: int
    low: int
    high: int
    begin: int

    @property
    def names(self) -> Mapping[str, str]:
        """torch's name of each moment, and its place."""
        return self.chunk.group.rule.moments

    def read(self, name: str) -> torch.Tensor:
        """One moment: a view, or a copy of what is on the SSD."""
        return self.chunk.read_moment(name, self.begin, self.begin + self.high - self.low)

    def write(self, name: str, values: torch.Tensor | None) -> None:
        """Set it; None: to zeros."""
        if values is None:
            values = torch.zeros(self.high - self.low)
        self.chunk.write_moment(name, self.begin, values)


def collect(engine: Engine, groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """torch's `state`: number of the parameter in the groups to its step and moments. A parameter
    that has taken no step has none, as in torch."""
    parts = _parts(engine)
    found: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(groups)):
        part = parts.get(id(parameter))
        if part is None or part.chunk.steps[part.place] == 0:
            continue
        entry: dict[str, Any] = {"step": torch.tensor(float(part.chunk.steps[part.place]))}
        for name, own in part.names.items():
            if own in part.chunk.formats():
                value = part.read(own).detach().to("cpu", copy=True)
                entry[name] = value if engine.world > 1 else value.view(parameter.shape)
        if engine.world > 1:
            entry["range"] = (part.low, part.high)
        found[number] = entry
    return found


def install(engine: Engine, groups: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """The inverse of `collect`, and the groups' values. Raises UsageError, with nothing changed."""
    saved, state = given["param_groups"], given["state"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise UsageError(
            f"the state has {sum(len(g['params']) for g in saved)} parameters in {len(saved)} "
            f"groups, this optimizer {sum(len(g['params']) for g in groups)} in {len(groups)}",
            "load the state of this model, with the same groups",
        )
    parts = _parts(engine)
    numbers = [number for group in saved for number in group["params"]]
    jobs: list[tuple[_Part, dict[str, Any]]] = []
    for number, parameter in zip(numbers, _parameters(groups), strict=True):
        part, entry = parts.get(id(parameter)), state.get(number)
        if part is None:
            continue
        if entry is not None:
            entry = _cut(engine, part, entry, parameter.numel())
            _check(part, number, entry)
        jobs.append((part, entry or {}))
    with torch.no_grad():
        for part, entry in jobs:
            # torch's own SGD and Muon do not count theirs.
            part.chunk.steps[part.place] = int(entry.get("step", 1 if entry else 0))
            for name, own in part.names.items():
                if own not in part.chunk.formats():
                    continue
                value = entry.get(name)
                part.write(own, None if value is None else value.reshape(-1))
    for group, values in zip(groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _cut(engine: Engine, part: _Part, entry: dict[str, Any], whole: int) -> dict[str, Any]:
    """This rank's part of what torch's own optimizer holds."""
    if engine.world == 1 or "range" in entry:
        return entry
    cut = dict(entry)
    for name in part.names:
        value = cut.get(name)
        if value is not None and value.numel() == whole:
            cut[name] = value.reshape(-1)[part.low : part.high]
    return cut


def _check(part: _Part, number: int, entry: dict[str, Any]) -> None:
    rule, names = part.chunk.group.rule, part.names
    span = tuple(entry.get("range", (part.low, part.high)))
    if span != (part.low, part.high):
        raise UsageError(
            f"the state holds elements {span[0]} to {span[1]} of parameter {number}, this rank has "
            f"{part.low} to {part.high}",
            "load it with the number of ranks that saved it; zero.save_checkpoint fits any number",
        )
    for name in names:
        value = entry.get(name)
        if value is not None and value.numel() != part.high - part.low:
            raise UsageError(
                f"{name} of parameter {number} has {value.numel()} elements, it needs "
                f"{part.high - part.low}",
                "load the state of this model",
            )
    if names and not any(name in entry for name in names) and not rule.optional:
        raise UsageError(
            f"the state of parameter {number} has {', '.join(sorted(entry))}",
            f"load one of {rule.name}, which has {', '.join(names)}",
        )


def _parameters(groups: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group["params"]


def _parts(engine: Engine) -> dict[int, _Part]:
    """By the parameter's id; what this rank has nothing of is not in it."""
    found: dict[int, _Part] = {}
    for chunk in engine.chunks():
        if not chunk.group.trainable:
            continue
        share = chunk.states.weights.numel()
        begin = engine.rank * share
        for place, piece in enumerate(chunk.group.pieces):
            low = max(piece.offset, begin)
            high = min(piece.offset + piece.numel, begin + share)
            if low < high:
                found[id(piece.parameter)] = _part(chunk, place, piece, low, high, begin)
    return found


def _part(chunk: Chunk, place: int, piece: Piece, low: int, high: int, begin: int) -> _Part:
    return _Part(chunk, place, low - piece.offset, high - piece.offset, low - begin)
