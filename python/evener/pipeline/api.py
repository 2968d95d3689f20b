"""A pipeline that trains.

    pipe = evener.pipeline.auto(model, example, stages=4, memory="24GB")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-4)
    for batch in data:
        loss = pipe.step(**batch)          # forward, backward; gradients are in .grad
        optimizer.step(); optimizer.zero_grad()

Every rank runs the same lines with the same batch, takes the inputs that its stage uses, and gets
the same loss. All ranks capture the model at once; rank 0 measures, when they are done and leave it
the machine, and plans; all ranks cut by its plan.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evener.base.given import given
from evener.base.log import logger
from evener.comm import forms
from evener.comm.world.topology import host_identity
from evener.errors import EvenerError, UsageError
from evener.pipeline import links, schedules, torch_names
from evener.pipeline import tensor as divided
from evener.pipeline.capture import Captured, capture, place_of
from evener.pipeline.example import Example
from evener.pipeline.plan import Plan, Planned, digest, planned
from evener.pipeline.put_back import quiet_random
from evener.pipeline.replicas import Replicas
from evener.pipeline.running import Pipeline, Weights
from evener.pipeline.verify import refuse_mixing, verify
from evener.pipeline.weigh import Weighing, agreed


@given
def auto(
    model: nn.Module,
    example: Any,
    *,
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    tensor: Mapping[str, Any] | None = None,
    gradients: str = "exact",
    average: str = "batch",
    device: torch.device | str | None = None,
    weights: Weights | None = None,
    plan: Plan | None = None,
    seed: int | None = None,
    timeout: float = 600.0,
    **given: Any,
) -> Pipeline:
    """Plan a pipeline over the ranks of `group` and build this rank's stage.

    example: the inputs of a whole step: a tensor, a tuple, or a dict of named ones; with `loss`
    also `target`. group: one rank per device; default: all ranks. mesh: replicas of the pipeline in
    place of a group: a DeviceMesh with the dimension `pipeline`, and `data`, `tensor` or both. Each
    replica (`data`) is given a batch of its own, and gradients are those of the mean of the
    replicas' losses; the parameters of a stage are divided over `tensor` (torch's DTensors).
    tensor: how, as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; default: the plan that
    models of transformers bring. gradients: the form in which they cross between replicas, one of
    comm's (`fp16`, `int8`, ...). average: "batch": loss and gradients are those of the whole batch;
    a microbatch counts by its rows, or by its labels that are not ignored, or fully where the loss
    is a sum; refused where no such weights exist (negatives inside the batch), and where the
    forward moves a buffer once per call (a counter, a running mean; batch norm's may be those of
    microbatches). "microbatches": the plain mean of the microbatches' losses, and buffers that move
    with each microbatch, as gradient accumulation has it. device: this rank's;
    default: its GPU, or the CPU. weights: for a model on the meta device, a function from a
    parameter's name and shape (a meta tensor) to its values. plan: one that was made before; else
    rank 0 measures and makes one with the remaining arguments (`memory`, `schedule`,
    `microbatches`, ...; see `planned`). network: as `pipeline.network(...)` makes it; default: what
    is measured between these ranks. seed: of dropout; default: rank 0's torch.initial_seed().
    timeout: seconds that a step may wait for another rank.

    Raises UsageError (on all ranks), NoFitError, PipelineError.
    """
    if not dist.is_initialized():
        raise UsageError(
            "a pipeline needs a process group",
            "start the script with torchrun or evener launch, and call "
            "torch.distributed.init_process_group() first",
        )
    torch_names.require()
    forms.require(gradients, "gradients")
    if average not in ("batch", "microbatches"):
        raise UsageError(f"average={average!r} is not known", "give 'batch' or 'microbatches'")
    replicas = Replicas.of(mesh, group)
    if tensor is not None and replicas.tensor is None:
        raise UsageError(
            "tensor= says how parameters are divided, and the mesh has no dimension for it",
            "give mesh= a dimension named 'tensor', or leave tensor= out",
        )
    group = replicas.pipeline
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    stages = given.pop("stages", size)
    if stages != size:
        raise UsageError(
            f"stages={stages}, and the group has {size} ranks", "give stages as many as ranks"
        )
    if plan is not None and given:
        raise UsageError(
            f"{', '.join(sorted(given))}: the plan that is given has made these choices",
            "leave them out, or leave out plan= to make another",
        )
    place = torch.device(device) if device is not None else _own_device()
    chosen: Any = [None]
    made: Planned | None = None
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, host_identity(), group=group)
    if plan is None and size > 1 and not {"network", "rates"} & set(given):
        given["network"] = links.probe(group, place, hosts)
    call = Example.of(example, target)
    first, states = _captured_by_all(model, call, loss, place, group)
    if rank == 0 and replicas.first:
        try:
            _alike(states)
            if replicas.tensor is not None:
                divided.plan_of(model, tensor)  # before the work
            if plan is None:
                with quiet_random(place):
                    made = planned(model, call, loss=loss, stages=size, device=place,
                                   tensor=replicas.parts, captured=first, **given)  # fmt: skip
                plan = made.plan
            seed = torch.initial_seed() if seed is None else seed
            chosen = [(plan.to_dict(), seed, None)]
        except Exception as error:  # noqa: BLE001 - every rank raises it
            chosen = [(None, 0, error)]
    if rank == 0 and replicas.data is not None:
        dist.broadcast_object_list(chosen, group_src=0, group=replicas.data)
    if rank == 0 and replicas.tensor is not None:
        dist.broadcast_object_list(chosen, group_src=0, group=replicas.tensor.get_group())
    dist.broadcast_object_list(chosen, group_src=0, group=group)
    record, seed, failed = chosen[0]
    if failed is not None:
        raise failed
    _alike(states)  # of this replica
    assert first is not None
    plan = Plan.from_dict(record)
    if schedules.kind_of(plan.schedule).split:
        torch_names.require_split(plan.schedule)
    captured = made.captured if made else first
    if not first.fits(plan.rows):
        again = None if made is None else made.captured
        found, states = _captured_by_all(model, call.resized(plan.rows), loss, place, group, again)
        _alike(states)
        assert found is not None
        captured = found
    if digest(captured) != plan.operations:
        raise UsageError(
            "the plan is of another model",
            "give every rank the same model, example and versions; plan again",
        )
    weighing, evaluates = _verified(model, loss, captured, plan, call, average, replicas)
    if rank == 0 and replicas.first:
        logger.info("pipeline: %s", replicas.said(plan))
        if plan.estimated:
            logger.warning(
                "pipeline: %d operations could not be timed, and are reckoned from their bytes: %s",
                len(plan.estimated),
                ", ".join(plan.estimated[:5]),
            )
    sharding = None
    if replicas.tensor is not None:
        sharding = divided.Sharding(replicas.tensor, divided.plan_of(model, tensor))
    return Pipeline(captured, plan, model, replicas, place, weights, int(seed or 0), timeout, hosts,
                    sharding, gradients, weighing, evaluates)  # fmt: skip


def _verified(
    model: nn.Module, loss: Any, captured: Captured, plan: Plan, call: Example, average: str,
    replicas: Replicas,
) -> tuple[Weighing, str]:  # fmt: skip
    """How microbatches are weighed, and why the pipeline cannot evaluate ("": it can).

    The first rank of each pipeline compares the stages with the model; all ranks raise what it
    found.
    """
    told: Any = ("", "", None)
    if dist.get_rank(replicas.pipeline) == 0:
        try:
            _has_parameters(captured, plan)
            both = call.resized(2 * plan.rows) if plan.microbatches > 1 else None
            seen = verify(model, loss, captured, plan.cuts, call.resized(plan.rows), both,
                          whole_batches=average == "batch")  # fmt: skip
            weighing = Weighing("mean")
            if average == "batch":
                weighing = agreed(captured, call, [plan.rows] * plan.microbatches,
                                  place_of(model))  # fmt: skip
                if both is not None:
                    shares = functools.partial(weighing.shares, captured)
                    unseen = refuse_mixing(model, loss, captured, both, shares)
                    if unseen and replicas.first:
                        logger.warning("pipeline: whether the model mixes rows of microbatches was "
                                       "not compared: %s", unseen)  # fmt: skip
            if seen.unseen and replicas.first:
                logger.warning("pipeline: stages and model were not compared: %s", seen.unseen)
            told = weighing.kind, seen.evaluates, None
        except Exception as error:  # noqa: BLE001 - every rank raises it
            told = "", "", _as_known(error, "the first rank cannot compare stages and model")
    # Along each dimension: replicas with data of their own may have found something else.
    for group in replicas.dimensions:
        states: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, told, group=group)
        told = (max(s[0] for s in states), max(s[1] for s in states),
                next((s[2] for s in states if s[2] is not None), None))  # fmt: skip
    kind, evaluates, failed = told
    if failed is not None:
        raise failed
    return Weighing.of(captured, kind), evaluates


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _as_known(error: Exception, what: str) -> Exception:
    """An error that can be sent to all ranks."""
    if isinstance(error, EvenerError):
        return error
    return EvenerError(
        f"{what}: {type(error).__name__}: {error}",
        "see that the model runs alone with this example on every rank",
    )


def _has_parameters(captured: Captured, plan: Plan) -> None:
    """Raises UsageError where a rank would have no parameter: no optimizer can be made there."""
    named = {n for n, _ in captured.module.named_parameters(remove_duplicate=False)}
    holding = {
        plan.stages[s].rank
        for s, (begin, end) in enumerate(itertools.pairwise([0, *plan.cuts, len(captured.ops)]))
        for node in captured.ops[begin:end]
        if any(one.op == "get_attr" and str(one.target) in named for one in node.all_input_nodes)
    }
    if empty := sorted({stage.rank for stage in plan.stages} - holding):
        raise UsageError(
            f"rank {empty[0]} would have no parameter: the model has few places for a cut",
            "give fewer stages",
        )


def _captured_by_all(
    model: nn.Module, call: Example, loss: Any, place: torch.device,
    group: dist.ProcessGroup | None, done: Captured | None = None,
) -> tuple[Captured | None, list[Any]]:  # fmt: skip
    """This rank's capture (None: it failed), and of each rank the digest of its operations or what
    it failed with. All ranks are done when it returns: none disturbs what is measured next.
    `done`: the capture, where this rank has it already."""
    found = done
    said: Exception | None = None
    if found is None:
        try:
            with quiet_random(place):
                found = capture(model, call, loss=loss)
        except Exception as error:  # noqa: BLE001 - every rank raises it
            said = _as_known(error, f"rank {dist.get_rank(group)} cannot capture the model")
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, said if found is None else digest(found), group=group)
    return found, states


def _alike(states: list[Any]) -> None:
    """Raises what a rank failed with, or UsageError where two captured different operations."""
    for state in states:
        if isinstance(state, Exception):
            raise state
    if len(set(states)) > 1:
        raise UsageError(
            "the ranks captured different operations",
            "give every rank the same model, example and versions; plan again",
        )
