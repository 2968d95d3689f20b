"""The FSDP2 door: one line for a model that `fully_shard` has sharded.

    mesh = init_device_mesh("cuda", (nodes, gpus_per_node), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    evener.fsdp.accelerate(model, mode="auto", floor="int8")

FSDP2 stays as it is: it gathers and reduce-scatters inside the node, and its checkpoints, state
dicts and gradient clipping work as before. Evener carries the reduction between the replicas
(`evener.comm.replicas`). There are two ways in, and the log names the one that was taken:

- A 2-D mesh, as above (HSDP). The group over which FSDP2 averages the replicas of each unit is
  replaced by one whose all-reduce is Evener's. That place in FSDP2 is private, so it is checked
  first; where this torch has it no more, an error says so and nothing is changed.
- A 1-D mesh of the shard group alone, and `replicate=` the other dimension. FSDP2 then knows
  nothing of replicas, and Evener comes in by its public `set_all_reduce_hook`.

A model that is sharded over all of its ranks has no replicas. There Evener takes FSDP2's place at
its all-gathers and reduce-scatters, by FSDP2's public setters (`evener.comm.sharded`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from evener.base import log, settings, torch_names
from evener.base.given import given
from evener.comm import forms
from evener.comm.codecs.checks import checksum
from evener.comm.options import Options
from evener.comm.replica_plan import ReplicaPlanner
from evener.comm.replicas import Piece, Replicas, Unit
from evener.comm.sharded import Sharded, refuse_for_replicas
from evener.errors import UsageError

logger = logging.getLogger("evener.fsdp")

MODES = forms.names()
# What a model without replicas has nothing for.
_OF_REPLICAS = (
    settings.LIGHT_2D_ALLREDUCE,
    settings.LIGHT_TOPK_ALLREDUCE,
    settings.EVENER_OUTER,
)


@given
def accelerate(
    model: nn.Module,
    *,
    replicate: DeviceMesh | dist.ProcessGroup | None = None,
    mode: str | None = None,
    floor: str | None = None,
    ratio: float | None = None,
    warmup_steps: int | None = None,
    scaler: GradScaler | None = None,
    mirror: str | None = None,
) -> nn.Module:
    """Have Evener carry what `model`'s ranks exchange; returns the model.

    `model`: the root that `fully_shard` was applied to, with weights (not on the meta device).
    Collective: call it on every rank, with equal arguments, before the first backward, after the
    last `fully_shard`. Replicas that begin with other weights take over the first one's, and the
    log says so.

    `replicate`: the mesh dimension, or the group, over which the model is replicated, for a model
    that is sharded over a 1-D mesh; leave it out where the mesh has both dimensions.

    `mode`: a form (`MODES`): "exact" (the default; lossless), "fp16", "bf16", "int8", "topk" ...,
    from "int8" on with error feedback, norms and biases exact. "auto": measure the network and one
    step, and send each unit in the mildest form that hides, down to `floor` ("bf16"); what is not
    faster than exact in a trial is not kept. `ratio`, `warmup_steps`: as in `evener.ddp`. A
    LIGHT_TOPK_* variable that is set wins. `scaler`: the GradScaler of FP16 training.

    A model that is sharded over all of its ranks has no replicas. Its weights are then gathered as
    exact differences to what each rank holds already, and `mode` is "exact", "bf16", "int8" or
    "int4", the form of its gradients, or "auto": what is fastest when tried, down to `floor`,
    FSDP2 alone among it. `mirror`: where that copy of the gathered weights lies, "host" (the
    default; pinned), "gpu", or "off" to gather as FSDP2 does.

    `model.evener` is the `evener.comm.replicas.Replicas`: put it into what
    torch.distributed.checkpoint saves where a form with error feedback is used. For a model without
    replicas it is the `evener.comm.sharded.Sharded`, of which the same holds with INT4.

    Raises UsageError for a model that cannot be accelerated, CommError where ranks disagree.
    """
    groups = _groups(model)
    if getattr(model, "evener", None) is not None:
        raise UsageError("the model is accelerated already", "call accelerate() once")
    log.begin(dist.get_rank())
    log.say_idle("models of FSDP2 take no local steps", settings.EVENER_EVERY)
    if replicate is None and not any(_replicated(group) for _, group in groups):
        refuse_for_replicas({"ratio": ratio, "warmup_steps": warmup_steps}, model)
        _refuse_meta(model)
        log.say_idle("FSDP2 shards this model over all ranks", *_OF_REPLICAS)
        _shard(model, groups, mode or "exact", mirror or "host", scaler, floor)
        return model
    if mirror is not None:
        raise UsageError(
            "mirror= was given for a model with replicas, which gathers in the node",
            "leave mirror= out",
        )
    options = _options(mode, floor, ratio, warmup_steps)
    group, native = _replica_group(groups, replicate)
    _refuse_meta(model)
    names = {id(p): name for name, p in model.named_parameters()}
    units = [_unit(index, name, found, names) for index, (name, found) in enumerate(groups)]
    device = units[0].pieces[0].parameter.to_local().device  # type: ignore[attr-defined]
    replicas = Replicas(units, options, group, device, scaler)
    _begin_alike(replicas)
    door = _Door(model, replicas, ReplicaPlanner(replicas) if mode == "auto" else None)
    for index, (_, found) in enumerate(groups):
        if native:
            door.replace_group(index, found)
        else:
            door.set_hook(index, found)
    if replicas.logs:
        torch_names.say_untried(logger)
        _say_wider(groups)
        way = "the replica group of its 2-D mesh" if native else "set_all_reduce_hook"
        logger.debug("FSDP2 hands each unit's gradients over by %s", way)
    object.__setattr__(model, "evener", replicas)
    object.__setattr__(model, "_evener_door", door)
    return model


def _shard(
    model: nn.Module,
    groups: list[tuple[str, Any]],
    mode: str,
    mirror: str,
    scaler: GradScaler | None,
    floor: str | None,
) -> None:
    """Evener under a model without replicas."""
    names = {id(p): name for name, p in model.named_parameters()}
    units = [(_unit(at, name, found, names), found) for at, (name, found) in enumerate(groups)]
    sharded = Sharded(units, mode, mirror, groups[0][1].device, scaler, floor)
    object.__setattr__(model, "evener", sharded)
    object.__setattr__(model, "_evener_door", _ShardedDoor(model, sharded))


@given
def release(model: nn.Module) -> None:
    """Give `model` back to FSDP2 alone. Collective. A 1-D mesh has then nothing that averages."""
    door = getattr(model, "_evener_door", None)
    if door is None:
        raise UsageError("the model is not accelerated", "call evener.fsdp.accelerate() first")
    door.close()
    for name in ("evener", "_evener_door"):
        object.__delattr__(model, name)


class _Door:
    """What connects FSDP2's units with a `Replicas`: hooks and groups, and their removal."""

    def __init__(self, model: nn.Module, replicas: Replicas, planner: ReplicaPlanner | None):
        self.replicas, self.planner = replicas, planner
        self._undo: list[Callable[[], None]] = []
        # The model owns the door: a hook that held it would keep both for ever.
        own = weakref.ref(self)

        def begins() -> None:
            if (door := own()) is not None and torch.is_grad_enabled():
                door.begins()

        def ended() -> None:
            if (door := own()) is not None and door.planner is not None:
                door.planner.forward_ended()

        self._undo += follow(model, begins, ended)

    def begins(self) -> None:
        """A forward that will be differentiated."""
        ended = self.replicas.step_begins()
        if self.planner is not None:
            self.planner.step_begins(ended)

    def reduce(self, index: int, found: Any, flat: torch.Tensor, average: bool) -> None:
        """One unit's flat shard, on the stream on which FSDP2 all-reduces."""
        planner = self.planner
        if planner is None or planner.settled:
            self.replicas.reduce(index, flat, average)
            return
        stream = found.comm_ctx.reduce_scatter_stream if flat.is_cuda else None
        planner.ready(index, stream)
        start = planner.mark()
        self.replicas.reduce(index, flat, average)
        planner.exchanged(index, start)

    def replace_group(self, index: int, found: Any) -> None:
        """A 2-D mesh: FSDP2 averages the replicas over a group of ours."""
        mesh_info, before = found.mesh_info, found.mesh_info.replicate_process_group
        own = _ReplicaGroup(before, lambda t, average: self.reduce(index, found, t, average))
        mesh_info.replicate_process_group = own
        self._undo.append(lambda: setattr(mesh_info, "replicate_process_group", before))

    def set_hook(self, index: int, found: Any) -> None:
        """A 1-D mesh: FSDP2 has divided by the number of shards, and not of replicas."""
        for module in found.modules:
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(lambda flat: self.reduce(index, found, flat, True))
                self._undo.append(lambda: setattr(found, "_all_reduce_hook", None))
                return
        raise UsageError(
            "a unit of this model has no set_all_reduce_hook",
            "shard it with torch.distributed.fsdp.fully_shard",
        )

    def close(self) -> None:
        """Take all of it back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.replicas.close()


class _ShardedDoor:
    """What tells a `Sharded` when the root's forward begins and ends."""

    def __init__(self, model: nn.Module, sharded: Sharded) -> None:
        self.sharded = sharded
        own = weakref.ref(sharded)

        def begins() -> None:
            if (found := own()) is not None:
                found.begins()

        def ended() -> None:
            if (found := own()) is not None:
                found.ended()

        self._undo = follow(model, begins, ended)

    def close(self) -> None:
        """Take all of it back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.sharded.close()


def follow(
    model: nn.Module, begins: Callable[[], None], ended: Callable[[], None]
) -> list[Callable[[], None]]:
    """Call these before and after each forward of the root; returns what takes the hooks away.

    `ended` also where the forward raised. So it is around what `register_fsdp_forward_method` has
    made of other methods: those call the root's FSDP2 state by name, and its own forward calls what
    was there before.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(*_: Any) -> None:
        begins()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(*_: Any) -> None:
        ended()

    undo: list[Callable[[], None]] = [
        model.register_forward_pre_hook(before, prepend=True).remove,
        model.register_forward_hook(after, always_call=True).remove,
    ]
    state = getattr(model, "_get_fsdp_state", lambda: None)()
    for name, tell in (("_pre_forward", before), ("_post_forward", after)):
        if (inner := getattr(state, name, None)) is None:
            continue

        def around(*args: Any, inner: Any = inner, tell: Any = tell) -> Any:
            tell()
            return inner(*args)

        setattr(state, name, around)
        undo.append(functools.partial(delattr, state, name))
    return undo


class _ReplicaGroup(dist.ProcessGroup):
    """A replica group whose sums and means are Evener's; all else is the inner group's."""

    def __init__(self, inner: dist.ProcessGroup, reduce: Callable[[torch.Tensor, bool], None]):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._reduce = inner, reduce

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """For torch's messages."""
        return "evener"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """FSDP2 calls it with one tensor, on the stream on which it is to happen."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        average = op == dist.ReduceOp.AVG  # `op in (...)` is False: it asks the other side
        if len(tensors) != 1 or not (average or op == dist.ReduceOp.SUM):
            return self.inner.allreduce(tensors, opts)
        self._reduce(tensors[0], average)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tensors)
        return torch_names.work_of(done)


# --- what a model brings ---


def _groups(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, parameter group) of each unit that has parameters to train, in module order."""
    found: list[tuple[str, Any]] = []
    sharded = False
    for name, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is None:
            continue
        sharded = True
        group = torch_names.fsdp_group(state(), name)
        if group is None or not any(p.sharded_param.requires_grad for p in group.fsdp_params):
            continue
        if all(group is not other for _, other in found):
            found.append((name or "the root", group))
    if not sharded:
        raise UsageError(
            f"accelerate() was given a {type(model).__name__} that is not sharded by FSDP2",
            "call torch.distributed.fsdp.fully_shard on its blocks and on itself first",
        )
    if not found:
        raise UsageError(
            "there is no parameter that requires a gradient", "pass the root of the sharded model"
        )
    return found


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh of the first unit, also where weights are gathered and so are no DTensors now."""
    for name, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else torch_names.fsdp_group(state(), name)
        if group is not None:
            mesh: DeviceMesh = group.mesh_info.mesh
            return mesh
    raise UsageError("no parameter of this model is sharded", "pass what fully_shard() was given")


def _replicated(group: Any) -> dist.ProcessGroup | None:
    """The group over which FSDP2 itself averages the replicas of a unit."""
    found: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
    return found


def _replica_group(
    groups: list[tuple[str, Any]], replicate: DeviceMesh | dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, bool]:
    """The group of the replicas, and whether FSDP2 has it itself (a 2-D mesh)."""
    own = {_replicated(group) for _, group in groups}
    if len(own) > 1:
        raise UsageError(
            "the units of this model are replicated over different meshes",
            "give every fully_shard() the same mesh",
        )
    native = next(iter(own))
    if native is not None and replicate is None:
        return native, True
    if replicate is None:
        raise UsageError(
            "some units of this model have replicas and others have none",
            "give every fully_shard() the same mesh",
        )
    if native is not None:
        raise UsageError(
            "replicate= was given, and the mesh of this model has a replicate dimension",
            "leave replicate= out",
        )
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise UsageError(
                f"replicate= is a mesh of {replicate.ndim} dimensions",
                'give the one of the replicas, as mesh["replicate"]',
            )
        return replicate.get_group(), False
    return replicate, False


def _unit(index: int, name: str, group: Any, names: dict[int, str]) -> Unit:
    """The layout of one unit's flat shard, as FSDP2 fills it."""
    pieces, offset, dtype = [], 0, torch.float32
    for parameter in group.fsdp_params:
        sharded = parameter.sharded_param
        if not sharded.requires_grad:
            continue
        numel = parameter.padded_sharded_param_size.numel()
        # A program that has called unshard() before its first forward has the gathered one.
        gathered = getattr(parameter, "unsharded_param", None)
        known = names.get(id(sharded)) or names.get(id(gathered)) or f"{name} {offset}"
        pieces.append(Piece(known, offset, numel, sharded))
        offset += numel
        dtype = torch_names.fsdp_reduce_dtype(group, parameter)
    return Unit(index, name, pieces, offset, dtype)


def _say_wider(groups: list[tuple[str, Any]]) -> None:
    """From torch 2.15 on, an unset reduce_dtype means the gradient's dtype: more bytes."""
    for name, group in groups:
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad and torch_names.fsdp_widens(group, parameter):
                logger.warning(
                    "%s: reduce_dtype is unset, so torch %s reduces gradients in %s, where older "
                    "ones took %s; MixedPrecisionPolicy(reduce_dtype=...) sends less",
                    name,
                    torch.__version__,
                    torch_names.fsdp_reduce_dtype(group, parameter),
                    parameter.mp_policy.param_dtype,
                )
                return


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{name} is on the meta device",
                "load or initialise the weights first, then call evener.fsdp.accelerate()",
            )


def _begin_alike(replicas: Replicas) -> None:
    """All replicas begin with the first one's weights. Collective."""
    outer = replicas.communicators.route.outer
    locals_ = [
        piece.parameter.to_local().detach()  # type: ignore[attr-defined]
        for unit in replicas.units
        for piece in unit.pieces
    ]
    sums = torch.stack([checksum(tensor) for tensor in locals_]).cpu()
    least, most = sums.clone(), sums.clone()
    control = replicas.communicators.control.handle
    dist.all_reduce(least, dist.ReduceOp.MIN, group=control)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=control)
    differ = (least != most).nonzero().flatten().tolist()
    for place in differ:
        tensor = locals_[place].contiguous()
        dist.broadcast(tensor, group=outer.handle, group_src=0)
        locals_[place].copy_(tensor)
    if differ and replicas.logs:
        logger.warning(
            "the replicas began with different weights in %d of %d parameters: all have taken over "
            "those of the first one",
            len(differ),
            len(locals_),
        )


def _options(
    mode: str | None, floor: str | None, ratio: float | None, warmup_steps: int | None
) -> Options:
    return Options.of_mode(
        mode,
        floor,
        algorithm="flat",
        ratio=ratio,
        warmup_steps=warmup_steps,
        average=False,  # FSDP2 says for each call whether it is a mean
    )
