"""Do all ranks reduce the same thing? Asked once, before the first gradient.

Without this, unequal models meet in a collective of unequal sizes: Gloo aborts the process, NCCL
hangs or writes past the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.errors import CommError
from evener.comm.groups import Communicators
from evener.comm.options import Options

Signature = list[tuple[str, str]]


def everyones(communicators: Communicators, mine: Any) -> list[Any]:
    """What every rank has where this one has `mine`, by rank. Collective."""
    found: list[Any] = [None] * communicators.size
    dist.all_gather_object(found, mine, group=communicators.control.handle)
    return found


def signature(
    names: Sequence[str], parameters: Sequence[torch.Tensor], options: Options
) -> Signature:
    """(what, how) pairs that must be equal on all ranks, in the order of comparison."""
    said = {key: value for key, value in asdict(options).items() if key != "timeout"}
    pairs = [(f"option {key}", str(value)) for key, value in said.items()]
    pairs.append(("number of parameters", str(len(parameters))))
    for name, parameter in zip(names, parameters, strict=True):
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        how = f"{parameter.dtype} {shape} strides {parameter.stride()} on {parameter.device.type}"
        pairs.append((f"parameter {name}", how))
    return pairs


def first_difference(signatures: Sequence[Signature]) -> str | None:
    """In words, where some rank differs from rank 0; None where all are equal."""
    for rank, other in enumerate(signatures[1:], start=1):
        for mine, theirs in zip(signatures[0], other, strict=False):
            if mine != theirs:
                return (
                    f"rank 0 has {mine[0]} = {mine[1]}, rank {rank} has {theirs[0]} = {theirs[1]}"
                )
    return None


def require_agreement(
    communicators: Communicators,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    options: Options,
) -> None:
    """Raise the same CommError on every rank unless all would reduce the same. Collective."""
    gathered: list[Signature] = [[] for _ in range(communicators.size)]
    mine = signature(names, parameters, options)
    dist.all_gather_object(gathered, mine, group=communicators.control.handle)
    if difference := first_difference(gathered):
        raise CommError(
            f"the ranks do not agree: {difference}",
            "build the same model with the same settings on every rank",
        )
