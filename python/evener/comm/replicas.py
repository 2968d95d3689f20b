"""Replicas of a sharded model (FSDP2 between the GPUs of a node): their gradients, between nodes.

FSDP2 cuts a model into units (`fully_shard` on each block). In the backward pass it reduce-scatters
a unit's gradients over the shard group, and what a rank then holds is one flat tensor, its shard.
The same shard on the other nodes belongs to the same replica group, and `Replicas` averages it over
that group, in any form that `evener.comm.wires` has: one exchange per unit, on the stream that
FSDP2 gives to it, beside the backward pass of the units that come after.

    flat shard of a unit:  | matrix | norm | matrix | bias | ...
    lossy forms:           norms and biases go exact, in one small exchange of their own; their
                           places are zero in the large one, so no scale and no selection sees them

What a form with error feedback keeps belongs to a place in the unit's flat tensor. A checkpoint
holds it per parameter, as a DTensor that is sharded as the parameter is (`state_dict`), so it can
be loaded where the number of shards or replicas is another one.

How the exchange enters FSDP2 is `evener.fsdp`'s; which form a unit takes, where that is free,
`evener.comm.replica_plan`'s. A model of which all ranks together have one copy is `comm.sharded`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from evener.comm import guard, wires
from evener.comm.agree import require_agreement
from evener.comm.buckets import Bucket, Slot, row_width
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange, Step
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.records import Records
from evener.comm.state import LossScale
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")


@dataclass(frozen=True)
class Piece:
    """One parameter's place in its unit's flat shard: `numel` entries from `offset` on.

    `parameter`: the sharded one, a DTensor. `dense`: a norm or a bias, which lossy forms leave out.
    """

    name: str
    offset: int
    numel: int
    parameter: torch.Tensor

    @property
    def dense(self) -> bool:
        """What lossy forms leave out."""
        return self.parameter.dim() <= 1

    @property
    def width(self) -> int:
        """Entries of a row of it in memory; 0: it is no matrix."""
        local = self.parameter
        if isinstance(local, DTensor):
            local = local.to_local()
        return 0 if self.dense else row_width(local)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its entries, a view of [numel]."""
        return flat[self.offset : self.offset + self.numel]


class Unit:
    """One `fully_shard` call: the flat shard that is exchanged at once, and what it remembers.

    `numel`: entries of the flat shard, padding included, of `dtype`.
    """

    def __init__(
        self,
        index: int,
        name: str,
        pieces: Sequence[Piece],
        numel: int,
        dtype: torch.dtype,
    ) -> None:
        self.index, self.name, self.numel = index, name, numel
        self.pieces = tuple(pieces)
        self.small = tuple(piece for piece in pieces if piece.dense)
        self.all_small = len(self.small) == len(self.pieces)
        # Sizes only: FSDP2 owns the memory, and it is another one in each step.
        buffer = torch.empty(numel, dtype=dtype, device="meta")
        slots = tuple(Slot(index, p.offset, p.numel, 0, p.width) for p in pieces)
        self.bucket = Bucket(index, buffer, slots, dense=self.all_small, parts=(index,))
        self.exchange: Exchange | None = None  # by `Replicas`
        self.odd = False  # whether a backward brought only some of its gradients

    def run(self, flat: torch.Tensor, step: Step, exact: Exchange) -> None:
        """Reduce `flat` [numel] over the replicas, in place. `exact`: for norms and biases."""
        assert self.exchange is not None
        if not self.small or not self.exchange.wire.lossy:
            self.exchange.run(flat, step)
            return
        views = [piece.of(flat) for piece in self.small]
        small = torch.cat(views)
        torch._foreach_zero_(views)
        exact.wire.exchange(small, exact.state)
        self.exchange.run(flat, step)
        torch._foreach_copy_(views, list(small.split([view.numel() for view in views])))


class Replicas:
    """Averages what FSDP2's units bring, over the ranks of one replica group.

    A door calls `reduce` for each unit in each backward, and `step_begins` before a forward that
    will be differentiated. `steps`: backward passes that were reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        options: Options,
        group: dist.ProcessGroup,
        device: torch.device,
        scaler: GradScaler | None = None,
    ) -> None:
        """Collective over `group`. Raises CommError where ranks are missing or disagree."""
        self.units, self.options = list(units), options
        self.communicators = Communicators(options, device, group)
        pieces = [piece for unit in units for piece in unit.pieces]
        require_agreement(
            self.communicators,
            [piece.name for piece in pieces],
            [piece_local(piece.parameter) for piece in pieces],
            options,
        )
        self.loss_scale = LossScale(scaler)
        self.optimizers = guard.Optimizers([piece.parameter for piece in pieces])
        self.steps = 0
        self._wires: dict[str, wires.Wire] = {}
        self._records = Records.open(dist.get_rank())
        self._step = Step()
        self._seen: set[int] = set()
        self._exact = self._exchange(Unit(-1, "exact", (), 0, torch.float32).bucket, "exact", [])
        for unit in self.units:
            form = wires.choose(options, self.communicators.route, unit.bucket)
            unit.exchange = self._exchange(unit.bucket, form, [p.name for p in unit.pieces])
        if any(exchange.wire.lossy for exchange in self.exchanges):
            self.optimizers.watch()
            self.loss_scale.watch([piece.parameter for piece in pieces])
        if self.logs:
            logger.info("%s", self.describe())

    @property
    def logs(self) -> bool:
        """Whether this process says what concerns all of them: one does."""
        return dist.get_rank() == 0

    @property
    def exchanges(self) -> list[Exchange]:
        """One for each unit."""
        return [unit.exchange for unit in self.units if unit.exchange is not None]

    def _exchange(self, bucket: Bucket, form: str, names: list[str]) -> Exchange:
        return Exchange(bucket, self.communicators.route, self.wire(form), self.options, names)

    def wire(self, form: str) -> wires.Wire:
        """The one of that form, which all units share."""
        if form not in self._wires:
            self._wires[form] = wires.get(form)(self.communicators.route, self.options)
        return self._wires[form]

    # --- a step ---

    def step_begins(self) -> bool:
        """Before a forward: the backward that was reduced last, if any, has ended; True then.

        Collective in the steps that the guard checks.
        """
        if not self._seen:
            return False
        self._seen.clear()
        self.steps += 1
        self.communicators.check()
        verdicts: list[guard.Verdict] = []
        if self._step.checked:
            verdicts = guard.judge(
                self.exchanges, self.steps, self.options, self.communicators, self.optimizers
            )
            for verdict in verdicts:
                if verdict.falls_to:
                    self.use(verdict.bucket, verdict.falls_to)
        if self._records is not None:
            self._records.step(self.steps, self.exchanges, verdicts)
        return True

    def use(self, unit: int, form: str) -> None:
        """Exchange this unit in `form` from the next step on. On all ranks of the group alike."""
        exchange = self.units[unit].exchange
        assert exchange is not None
        exchange.wire = self.wire(form)

    def permitted(self, unit: int, form: str) -> bool:
        """Whether a planner may send this unit in `form`: what the guard left stays left."""
        return wires.suitable(form, self.units[unit].bucket) == form

    def reduce(self, index: int, flat: torch.Tensor, average: bool) -> None:
        """`flat` [numel] becomes the sum over the replicas, or their mean, in place.

        On a GPU it is enqueued on the current stream. Raises CommError naming the unit.
        """
        unit = self.units[index]
        if not self._seen:
            due = guard.due(self.steps + 1, self.options.guard_steps, self.optimizers.strict)
            lossy = any(exchange.wire.name != "exact" for exchange in self.exchanges)
            self._step = Step(
                change=self.loss_scale.change(),
                checked=due and lossy,
                follows_scale=self.loss_scale.active,
                timed=self._records is not None,
            )
        self._seen.add(index)
        try:
            self.communicators.check()
            if average:  # before it: a 16-bit sum must not overflow
                flat.mul_(1.0 / self.communicators.size)
            if flat.numel() == unit.numel:
                unit.run(flat, self._step, self._exact)
            else:
                self._some(unit, flat)
        except CommError:
            raise
        except Exception as error:
            raise CommError(
                f"replica {self.communicators.rank} of {self.communicators.size}, {unit.name}: "
                f"{error}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within {self.communicators.waits}",
            ) from error

    def _some(self, unit: Unit, flat: torch.Tensor) -> None:
        """Only some parameters of the unit have a gradient: FSDP2 does not say which."""
        if not unit.odd:
            unit.odd = True
            logger.info(
                "%s: %d of %d gradient entries came, so some of its parameters were not used; "
                "such a step is sent exact",
                unit.name,
                flat.numel(),
                unit.numel,
            )
        self._exact.wire.exchange(flat, self._exact.state)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """What error feedback has not sent yet, by parameter: DTensors, sharded as it is, float32.

        Collective. Summed over the replicas, in units of the gradient's mean. With
        torch.distributed.checkpoint put this object itself into the dictionary that is saved and
        loaded (it is `Stateful`); the numbers of shards and replicas may then be others.
        """
        found: dict[str, Any] = {}
        for unit in self.units:
            exchange = unit.exchange
            assert exchange is not None
            residual = exchange.state.residual
            if residual is None:
                if not self._may_owe(unit):
                    continue
                device = self.communicators.device
                residual = torch.zeros(unit.numel, dtype=torch.float32, device=device)
            owed = residual.clone()
            self.communicators.route.outer.all_reduce(owed, dist.ReduceOp.SUM)
            for piece in unit.pieces:
                if not piece.dense:
                    found[piece.name] = piece_like(piece.parameter, piece.of(owed))
        self.communicators.check()
        return found

    def _may_owe(self, unit: Unit) -> bool:
        """Whether this unit can have a residual at all: equal before and after a restart."""
        harshest = (self.options.wire, self.options.floor)
        return not unit.all_small and any(wires.get(form).feedback for form in harshest)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises UsageError for one of another model."""
        known = {piece.name for unit in self.units for piece in unit.pieces if not piece.dense}
        if strangers := sorted(set(state) - known):
            raise UsageError(
                f"the checkpoint has a residual of {strangers[0]}, which this model has not",
                "load the checkpoint of this model, or leave Evener's part of it out",
            )
        for unit in self.units:
            exchange = unit.exchange
            assert exchange is not None
            if not any(piece.name in state for piece in unit.pieces):
                continue
            device = self.communicators.device
            residual = torch.zeros(unit.numel, dtype=torch.float32, device=device)
            for piece in unit.pieces:
                if piece.name in state:
                    given = piece_local(state[piece.name]).reshape(-1)
                    place = piece.of(residual)[: given.numel()]
                    place.copy_(given).mul_(1.0 / self.communicators.size)
            exchange.state.residual = residual

    # --- the end ---

    def describe(self) -> str:
        """One line: replicas, units, forms."""
        forms = [exchange.wire.name for exchange in self.exchanges]
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        sent = sum(unit.bucket.bytes for unit in self.units) / 1e6
        route = self.communicators.route
        nodes = route.levels.nodes
        where = f"on {nodes} nodes" if nodes > 1 else "on one host: nothing crosses a network"
        return (
            f"{self.communicators.size} replicas {where}, {sent:.1f} MB of sharded gradients per "
            f"rank in {len(self.units)} units: {counts}; carried by {route.carrier.name}"
        )

    def close(self) -> None:
        """Give the groups back: on all ranks alike, between steps."""
        self.optimizers.settle()
        if self._records is not None:
            self._records.close()
        self.communicators.close()


def piece_local(parameter: Any) -> torch.Tensor:
    """This rank's part of a DTensor."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def piece_like(parameter: Any, flat: torch.Tensor) -> Any:
    """`flat`, padding at its end, as a float32 DTensor that is sharded as `parameter` is."""
    from torch.distributed.tensor import DTensor

    local = parameter.to_local()
    own = flat[: local.numel()].view(local.shape)
    return DTensor.from_local(
        own.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
