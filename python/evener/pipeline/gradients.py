"""Gradients of a stage over the replicas of a pipeline: their mean, exact or in a form of comm's.

Exact ones are one all-reduce per dtype. In another form the parameters go in units of about 64 MiB
by `evener.comm.replicas`, which carries sharded models between nodes too: error feedback, the
guard, and norms and biases that stay exact.

A rank sends as soon as its own stages have ended their last backward. Stages at the end of the
pipeline have ended theirs first, so what they send hides where they would wait for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from evener.comm import forms
from evener.comm.options import Options
from evener.comm.replicas import Piece, Replicas, Unit
from evener.pipeline import tensor as divided

UNIT_BYTES = 64 << 20
"""Gradients that are sent at a time in a form."""

Named = Sequence[tuple[str, nn.Parameter]]


class Gradients:
    """Gradients of one rank's stages. `form`: the one asked for, a name in `evener.comm.wires`."""

    def __init__(
        self, named: Named, group: dist.ProcessGroup, device: torch.device, form: str
    ) -> None:
        """Collective over `group`, the ranks that hold the same stages.

        named: parameters with a gradient. Raises UsageError for a form that does not exist,
        CommError where a rank is missing.
        """
        self.form = forms.require(form, "gradients")
        self._parameters = [parameter for _, parameter in named]
        self._group = group
        self._replicas: Replicas | None = None
        if self.form != "exact":
            options = Options.resolve(wire=self.form)
            self._replicas = Replicas(list(_units(named)), options, group, device)

    @property
    def lossy(self) -> bool:
        """Whether a step's gradients must be sent alone, without those of earlier steps."""
        return self._replicas is not None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Process groups of its own, for who ends waits."""
        return [] if self._replicas is None else self._replicas.communicators.handles

    def average(self) -> None:
        """Gradients become the mean of all replicas'; a parameter without one gets zeros."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._replicas is None:
            self._exact()
            return
        own = {id(p): divided.own(p.grad) for p in self._parameters if p.grad is not None}
        for unit in self._replicas.units:
            gradients = [own[id(piece.parameter)] for piece in unit.pieces]
            flat = torch.cat([g.flatten() for g in gradients]).to(unit.bucket.buffer.dtype)
            self._replicas.reduce(unit.index, flat, average=True)
            _spread(flat, gradients)
        self._replicas.step_begins()

    def _exact(self) -> None:
        count = dist.get_world_size(self._group)
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._parameters:
            assert parameter.grad is not None
            gradient = divided.own(parameter.grad)
            found.setdefault(gradient.dtype, []).append(gradient)
        for gradients in found.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self._group)
            flat /= count
            _spread(flat, gradients)

    def close(self) -> None:
        """Give the groups back: on all ranks alike, between steps."""
        if self._replicas is not None:
            self._replicas.close()


def _spread(flat: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _units(named: Named) -> Iterator[Unit]:
    """Parameters of one dtype that follow each other, up to UNIT_BYTES."""
    index = offset = 0
    pieces: list[Piece] = []
    kinds: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kinds.setdefault(parameter.dtype, []).append((name, parameter))
    for dtype, members in kinds.items():
        for at, (name, parameter) in enumerate(members):
            pieces.append(Piece(name, offset, divided.own(parameter).numel(), parameter))
            offset += pieces[-1].numel
            if offset * dtype.itemsize >= UNIT_BYTES or at == len(members) - 1:
                yield Unit(index, f"{pieces[0].name} ...", pieces, offset, dtype)
                index, offset, pieces = index + 1, 0, []
