"""Evener under a model that FSDP2 shards over all ranks: who gathers and who reduces.

Weights travel as exact differences (`comm.mirrors`, `comm.ahead`), gradients as FSDP2 sends them or
in a form (`comm.shards`). Both come in by FSDP2's public setters, one object for each of its units;
units whose group is another one (`reshard_after_forward=` a number gathers in the node) stay as
they are.

Where each node has a whole copy of the model (HSDP), `comm.replicas` does the work instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from evener.base import settings, torch_names
from evener.comm import guard
from evener.comm.ahead import Ahead, Lane, MirroredGather
from evener.comm.codecs import trial
from evener.comm.groups import Communicators
from evener.comm.loads import LoadHook
from evener.comm.mirrors import Mirror, Spread, Traffic
from evener.comm.options import Options
from evener.comm.replicas import Unit, piece_like, piece_local
from evener.comm.sharded_plan import PLAIN, ShardedPlanner
from evener.comm.shards import FORMS, FormedReduceScatter, Way
from evener.comm.state import LossScale
from evener.comm.world.topology import host_identity, levels
from evener.errors import UsageError

logger = logging.getLogger("evener.fsdp")

MIRRORS = ("host", "gpu", "off")
# Of the memory that a host or a GPU has free; the rest is everybody else's.
_MOST = 0.8


class Sharded:
    """What `evener.fsdp.accelerate` puts into a model that has no replicas, as `model.evener`.

    `traffic`: what the gathers moved so far on this rank. `close()` gives the model back. It is
    `Stateful`: put it into what torch.distributed.checkpoint saves where a form keeps what it did
    not send (INT4).
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Any]],
        mode: str,
        mirror: str,
        device: torch.device,
        scaler: GradScaler | None = None,
        floor: str | None = None,
    ) -> None:
        """`units`: each with FSDP2's parameter group; `floor`: how far "auto" may go. Collective.

        Raises UsageError where the arguments, ranks or the memory forbid it.
        """
        if mode not in (*FORMS, "auto"):
            raise UsageError(
                f"mode={mode!r} is no form for a model that is sharded over all ranks",
                f"take one of {', '.join(FORMS)}, auto; others average replicas (a 2-D mesh)",
            )
        floor = _floor(mode, floor)
        if mirror not in MIRRORS:
            raise UsageError(f"mirror={mirror!r}", f"take one of {', '.join(MIRRORS)}")
        self.mode, self.traffic = mode, Traffic()
        self._undo: list[Callable[[], None]] = []
        group = units[0][1].mesh_info.shard_process_group
        _require_agreement(group, (mode, floor, mirror, len(units)))
        if mirror != "off" and not _all_agree(trial.differences_are_right(device), device, group):
            mirror = "off"
        # All that can be refused is refused before anything changes.
        modules = [_module_of(unit.name, found) for unit, found in units]
        for _, found in units:
            torch_names.fsdp_require_comms(found)
        size = 0 if mirror == "off" else sum(_gathered_bytes(found) for _, found in units)
        kept = _kept_bytes(units, group) if floor == "int4" else 0
        _require_memory(size, kept, mirror, device, group)
        options = _options(floor, group)
        self.ahead: Ahead | None = None
        self.reductions: list[FormedReduceScatter] = []
        self.steps = 0
        parameters = [piece.parameter for unit, _ in units for piece in unit.pieces]
        self.optimizers = guard.Optimizers(parameters)
        self.loss_scale = LossScale(scaler)
        self.options = options
        self.communicators: Communicators | None = None
        self.floor = floor
        self.planner: ShardedPlanner | None = None
        if floor != "exact" or mode == "auto":
            self.communicators = Communicators(options, device, group)
            self._undo.append(self.communicators.close)
        if floor != "exact":
            self.optimizers.watch()
            self.loss_scale.watch(parameters)
        if mirror != "off":
            self._mirror(units, modules, Communicators(options, device, group), mirror == "host")
        if self.communicators is not None and floor != "exact":
            way = Way(self.communicators)
            for (unit, found), module in zip(units, modules, strict=True):
                reduction = FormedReduceScatter(unit, floor, self.communicators, way, found)
                self.reductions.append(reduction)
                hook = _before(reduction.finish, found._all_reduce_hook)
                self._set(found, "_all_reduce_hook", module.set_all_reduce_hook, hook)
                force = module.set_force_sum_reduction_for_comms
                self._set(found, "force_sum_reduction_for_comms", force, True)
                place = module.set_custom_reduce_scatter
                self._set(found, "_reduce_scatter_comm", place, reduction)
                for part in found.modules:
                    heard = part.register_load_state_dict_pre_hook(LoadHook(reduction))
                    self._undo.append(heard.remove)
        if mode == "auto" and self.communicators is not None:
            self.use(PLAIN)
            narrow = all(unit.bucket.buffer.element_size() <= 2 for unit, _ in units)
            self.planner = ShardedPlanner(self, floor, parameters, self.communicators, narrow)
        if group.rank() == 0:
            weights = "weights whole"
            if mirror != "off":
                place = "the GPU" if mirror == "gpu" and device.type != "cpu" else "host memory"
                weights = f"weights as exact differences (a copy of {_bytes(size)} in {place})"
            more = f" ({_bytes(kept)} of what is not sent yet on each rank)" if kept else ""
            how = mode if mode != "auto" else f"auto, down to {floor}"
            logger.info("FSDP2, %d units: %s; gradients %s%s", len(units), weights, how, more)

    def use(self, way: str) -> None:
        """Exchange in this form from the next pass on; `PLAIN`: as torch does it. On all ranks."""
        for gather in self.ahead.gathers if self.ahead is not None else ():
            gather.on = way != PLAIN
        for reduction in self.reductions:
            reduction.form = "exact" if way == PLAIN else way

    def step_aside(self) -> None:
        """Leave the model to torch, for good; what error feedback kept goes with the next sum."""
        self.use(PLAIN)
        if all(reduction.residual is None for reduction in self.reductions):
            self.close()

    def _mirror(
        self,
        units: Sequence[tuple[Unit, Any]],
        modules: Sequence[Any],
        own: Communicators,
        host: bool,
    ) -> None:
        lane = Lane(own.device)
        self._undo += [own.close, lane.close]  # last first
        self.ahead, spread = Ahead(lane), Spread(own)
        for (unit, found), module in zip(units, modules, strict=True):
            group = found.mesh_info.shard_process_group
            mirror = Mirror(unit.name, spread, self.traffic, host)
            gather = MirroredGather(found, group, mirror, self.ahead)
            self._set(found, "_all_gather_comm", module.set_custom_all_gather, gather)

    def _set(self, unit: Any, name: str, setter: Callable[[Any], None], value: Any) -> None:
        before = getattr(unit, name)
        setter(value)
        self._undo.append(lambda: setattr(unit, name, before))

    # --- a step ---

    def begins(self) -> None:
        """The root's forward begins. Collective where a form keeps something, or is judged."""
        if torch.is_grad_enabled():
            if self.planner is not None:
                self.planner.begins()
            if self.communicators is not None and self.reductions:
                self._step_begins(self.communicators)
        if self.ahead is not None:
            self.ahead.begins()

    def ended(self) -> None:
        """It has ended, in whatever way."""
        if self.ahead is not None:
            self.ahead.ended()

    def _step_begins(self, communicators: Communicators) -> None:
        communicators.check()
        change = self.loss_scale.change()
        if any(each.measured is not None for each in self.reductions):
            judged: Any = self.reductions  # they have what is asked of an exchange
            verdicts = guard.judge(judged, self.steps, self.options, communicators, self.optimizers)
            for verdict in verdicts:
                if verdict.falls_to:
                    self.reductions[verdict.bucket].form = verdict.falls_to
        self.steps += 1
        strict = self.optimizers.strict
        due = guard.due(self.steps, self.options.guard_steps, strict)
        for reduction in self.reductions:
            reduction.checked = due or reduction.checked
            if change is not None:
                reduction.rescale *= change.factor

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """What error feedback has not sent yet, by parameter: DTensors, sharded as it is, float32.

        Collective. Summed over the ranks, in units of the gradient that FSDP2 makes of the sum.
        """
        found: dict[str, Any] = {}
        for reduction in self._feeding():
            owed = reduction.owed().div_(reduction.divisor())
            for piece in reduction.unit.pieces:
                if not piece.dense:
                    found[piece.name] = piece_like(piece.parameter, piece.of(owed))
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, on any number of ranks.

        Raises UsageError for one of another model.
        """
        feeding = self._feeding()
        known = {piece.name for each in feeding for piece in each.unit.pieces if not piece.dense}
        if strangers := sorted(set(state) - known):
            raise UsageError(
                f"the checkpoint has a residual of {strangers[0]}, which this model, in "
                f"mode={self.mode!r}, has not",
                "load the checkpoint of this model and mode, or leave Evener's part of it out",
            )
        for reduction in feeding:
            unit = reduction.unit
            if not any(piece.name in state for piece in unit.pieces):
                reduction.forget()
                continue
            owed = torch.zeros(
                unit.numel, dtype=torch.float32, device=reduction.communicators.device
            )
            for piece in unit.pieces:
                if piece.name in state:
                    given = piece_local(state[piece.name]).reshape(-1)
                    piece.of(owed)[: given.numel()].copy_(given)
            reduction.take_over(owed.mul_(reduction.divisor()))

    def _feeding(self) -> list[FormedReduceScatter]:
        """The units of which something may not be sent yet: equal before and after a restart."""
        if self.floor != "int4":
            return []
        return [each for each in self.reductions if not each.unit.all_small]

    def close(self) -> None:
        """Give every unit what it had. May be called twice."""
        if self.planner is not None:
            self.planner.close()
        self.optimizers.settle()
        self.loss_scale.settle()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.ahead, self.communicators, self.reductions = None, None, []


def _before(first: Callable[[Any], None], then: Callable[[Any], None] | None) -> Any:
    """Both, where the program has one of its own."""

    def hook(reduced: torch.Tensor) -> None:
        first(reduced)
        if then is not None:
            then(reduced)

    return hook


def _floor(mode: str, floor: str | None) -> str:
    """The harshest form that gradients may take."""
    if mode != "auto":
        if floor is not None:
            raise UsageError(
                f"floor={floor!r} says how far mode='auto' may go, and mode is {mode!r}",
                "leave it out, or give mode='auto'",
            )
        return mode
    if floor is not None and floor not in FORMS:
        raise UsageError(
            f"floor={floor!r} is no form for a model that is sharded over all ranks",
            f"take one of {', '.join(FORMS)}",
        )
    return floor or "bf16"


def _options(mode: str, group: Any) -> Options:
    """Two levels where the nodes have several ranks, and all as many."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, host_identity(), group=group)
    intra = settings.LIGHT_INTRA_SIZE.get()
    shape = levels(group.rank(), hosts, "auto", intra, uneven=False)
    limit = settings.EVENER_TIMEOUT
    return Options(
        algorithm="auto" if shape.two_level else "flat",
        wire=mode,
        guard_steps=settings.EVENER_GUARD_STEPS.get(),
        guard_residual=settings.EVENER_GUARD_RESIDUAL.get(),
        guard_cosine=settings.EVENER_GUARD_COSINE.get(),
        intra_size=intra,
        average=False,  # FSDP2 divides
        timeout=limit.get() if limit.is_set() else 0.0,
        outer=settings.EVENER_OUTER.get(),
    )


def _module_of(name: str, unit: Any) -> Any:
    for module in unit.modules:
        if hasattr(module, "set_custom_all_gather"):
            return module
    raise UsageError(
        f"{name} has no set_custom_all_gather in torch {torch.__version__}",
        "use torch 2.9 or newer, and shard with torch.distributed.fsdp.fully_shard",
    )


def _gathered_bytes(unit: Any) -> int:
    """Bytes of a unit's gathered weights, all ranks' rows with their padding."""
    world = unit.mesh_info.shard_process_group.size()
    total = 0
    for parameter in unit.fsdp_params:
        dtype = torch_names.fsdp_gather_dtype(unit, parameter)
        total += parameter.padded_sharded_param_size.numel() * world * dtype.itemsize
    return total


def _kept_bytes(units: Sequence[tuple[Unit, Any]], group: Any) -> int:
    """Bytes that error feedback takes per rank, at most: bf16, for every other rank's rows."""
    rows = group.size() - 1
    return sum(2 * rows * unit.numel for unit, _ in units if not unit.all_small)


def _require_memory(size: int, kept: int, mirror: str, device: torch.device, group: Any) -> None:
    """Refuse what does not fit before the first step, on all ranks alike."""
    on_gpu, in_host = kept, size
    if device.type != "cuda":
        on_gpu, in_host = 0, size + kept
    elif mirror == "gpu":
        on_gpu, in_host = size + kept, 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    room = _host_free() * _MOST / ranks
    what, allowed, wanted = "of host memory for this rank", room, in_host
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(device)
        if on_gpu > free * _MOST:
            what, allowed, wanted = f"free on {device}", free * _MOST, on_gpu
    if not _all_agree(wanted <= allowed, device, group):
        raise UsageError(
            f"a copy of the gathered weights takes {_bytes(size)}, what INT4 has not sent yet "
            f"{_bytes(kept)}, and on at least one rank that does not fit (here {_bytes(allowed)} "
            f"{what})",
            "pass mirror='off' (gathers as FSDP2 does), or mirror='host' or 'gpu', whichever "
            "has room; mode='int8' keeps nothing",
        )


def _host_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _all_agree(mine: bool, device: torch.device, group: Any) -> bool:
    found = torch.tensor(float(mine), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return bool(found.item())


def _require_agreement(group: Any, chosen: tuple[Any, ...]) -> None:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, chosen, group=group)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise UsageError(
                f"ranks chose differently (mode, floor, mirror, units): rank 0 "
                f"{every[0]}, rank {rank} {other}",
                "call evener.fsdp.accelerate() and release() on every rank, with equal arguments",
            )


def refuse_for_replicas(given: dict[str, Any], module: nn.Module) -> None:
    """Arguments that only replicas have, given for a model that has none."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}= was given for a {type(module).__name__} that is sharded over all of its "
                "ranks",
                f"leave {name}= out, or give fully_shard() a 2-D mesh (replicate, shard)",
            )
