"""Spread the experts of a model over ranks, save them as one model, and move them.

Each rank keeps an equal number of every layer's experts. The names stay: `state_dict()` gathers all
experts (so all ranks call it), `load_state_dict()` takes them all and keeps this rank's, and so a
checkpoint is that of the plain model, for any number of ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evener.base.given import given
from evener.comm import total_norm
from evener.comm.watch import Watch
from evener.comm.world.topology import host_identity, nodes_of
from evener.errors import UsageError
from evener.moe.lane import Lane
from evener.moe.layer import Experts
from evener.moe.parallel import MoEError, Parallel, Road, Shared, Trial
from evener.moe.route import Ranks, Way
from evener.moe.turns import InTurns
from evener.moe.wire import Form, Wire

_NUMBERS = itertools.count()  # of the calls of this process, which are those of all ranks
_MATRICES = ("gate_up_proj", "down_proj")


def layers(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The experts of a model, with their names."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, Experts))


@given
def spread(
    model: nn.Module, ep: int, *, route: str = "auto", chunks: int | str = 2,
    dispatch: Form = "exact", mean: bool = True,
) -> nn.Module:  # fmt: skip
    """Keep 1/ep of every layer's experts on each rank, in place; collective over all ranks.

    ep: how many ranks share the experts, neighbours by rank; a divisor of the job's ranks and of
    the number of experts. The model must be the same on all ranks, on its device. Make the
    optimizer afterwards. DistributedDataParallel leaves the experts alone; with ep smaller than the
    job call `average_gradients` after backward.

    route: `two` sends a token once to each node and spreads it inside, `flat` once to each rank,
    `pairs` once for each choice; `auto` tries the first two on the first batch. chunks: parts of a
    batch that travel and are computed in turns; `auto` times 1, 2 and 4 in the first passes and
    keeps the fastest (not with activation checkpointing, whose second forward pass must be as
    the first). dispatch: `int8` or `fp8` sends tokens, and
    gradients of outputs, in 8 bits, unless a batch would lose over 5%. mean: gradients of experts
    are those of the mean of the ranks' losses, as DDP's are; False: of their sum.

    Raises UsageError, with nothing changed, for what cannot be.
    """
    found = list(layers(model))
    if not found:
        raise UsageError(f"{type(model).__name__} has no experts of evener.moe",
                         "use evener.moe.MoE, or convert the model first")  # fmt: skip
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("torch.distributed has no default process group",
                         "call init_process_group() first")  # fmt: skip
    world = dist.get_world_size()
    if ep < 1 or world % ep:
        raise UsageError(f"ep={ep} does not divide the {world} ranks", "choose a divisor")
    for name, layer in found:
        if layer.parallel is not None:
            raise UsageError(f"{name} is spread already", "call spread once")
        if layer.num_experts % ep:
            raise UsageError(f"ep={ep} does not divide the {layer.num_experts} experts of {name}",
                             "choose a divisor")  # fmt: skip
    if route not in ("auto", "two", "flat", "pairs"):
        raise UsageError(f"route={route!r} is not known", "choose auto, two, flat or pairs")
    if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
        raise UsageError(f"chunks={chunks!r}", "give 1 or more, or auto")
    wire = Wire(dispatch)
    if ep == 1:
        return model
    total_norm.ask(asked)
    device = found[0][1].gate_up_proj.device
    ranks, replicas = _groups(ep, device)
    if route == "two" and ranks.outer is None:
        raise UsageError("route='two' needs two nodes or more of equally many ranks, two or more "
                         "each, and neighbours in one node", "choose auto or flat")  # fmt: skip
    way: Way | None = None if route == "auto" else route  # type: ignore[assignment]
    look = Watch(
        f"{next(_NUMBERS)}/{dist.get_rank() - ranks.rank}", ranks.rank, ranks.size,
        ranks.groups(),
        what="experts", error=MoEError,
        memory="give spread more chunks=, the layer a capacity=, or train with smaller batches",
    )  # fmt: skip
    weakref.finalize(model, look.close)
    trial = Trial() if chunks == "auto" else None
    first = chunks if isinstance(chunks, int) else 1
    shared = Shared([_road(ranks, device, look)], way, first, wire, look, replicas, mean, trial)
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for name, layer in found:
        layer.parallel = Parallel(shared, layer.num_experts, name)
        for matrix in _MATRICES:
            whole = getattr(layer, matrix)
            part = whole.detach()[layer.parallel.mine.to(device)].clone()
            setattr(layer, matrix, nn.Parameter(part, requires_grad=whole.requires_grad))
            ignored.append(f"{name}.{matrix}" if name else matrix)
        layer.register_state_dict_post_hook(_gather_state)
        layer.register_load_state_dict_pre_hook(_take_own)
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    _models.add(model)
    return model


@given
def interleave(module: nn.Module, parts: int = 2) -> nn.Module:
    """Let parts of each batch take turns in `module`, in place: while the tokens of one travel,
    another computes. Collective over all ranks; after `spread` or `convert(ep=...)`.

    module: a stack of layers that gives tensors, as the decoder of a model does (`model.model` of
    transformers), not the model with its loss. Inputs whose first dimension is the batch (that of
    the first tensor) are divided along it, others go whole to every part; outputs are put together
    along their first dimension. Rows must not depend on each other, so no batch norm. Only in
    training; each rank then needs `parts` rows or more. Sums are those of the whole batch;
    auxiliary losses and capacities are those of the parts. Checkpoint activations inside the
    module, not around it.

    Raises UsageError, with nothing changed, for what cannot be.
    """
    found = [layer.parallel for _, layer in layers(module) if layer.parallel is not None]
    if not found:
        raise UsageError(f"{type(module).__name__} has no experts that are spread over ranks",
                         "call spread or convert(ep=...) first; one rank has nothing to "
                         "hide")  # fmt: skip
    if not isinstance(parts, int) or parts < 2:
        raise UsageError(f"parts={parts!r}", "give 2 or more")
    if isinstance(module.forward, InTurns):
        raise UsageError(f"{type(module).__name__} takes turns already", "call interleave once")
    shared = found[0].shared
    if any(each.shared is not shared for each in found):
        raise UsageError("the layers were spread by several calls",
                         "spread the whole model at once")  # fmt: skip
    if shared.trial is not None:
        # Parts are chunks already, and would disturb the times of each other.
        shared.trial, shared.chunks = None, 1
    while len(shared.roads) < parts:
        device = shared.lane.device
        ranks, _ = _groups(shared.ranks.size, device, replicas=False)
        shared.roads.append(_road(ranks, device, shared.watch))
        shared.watch.groups += ranks.groups()
    module.forward = InTurns(module.forward, type(module).__name__, parts, module, shared.watch)
    return module


def _road(ranks: Ranks, device: torch.device, look: Watch) -> Road:
    lane = Lane(device)
    lane.failed = lambda: look.heard
    return Road(ranks, lane)


def _groups(
    ep: int, device: torch.device, replicas: bool = True
) -> tuple[Ranks, dist.ProcessGroup | None]:
    """The groups of this rank; every rank makes all of them, in one order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, host_identity())
    backend = "nccl" if device.type == "cuda" else "gloo"

    def made(members: Sequence[int]) -> Any:
        options = None
        if backend == "nccl":
            # First in line for multiprocessors: products take all of them at once.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        return dist.new_group(list(members), backend=backend, pg_options=options)

    mine: Any = None
    for start in range(0, world, ep):
        block = list(range(start, start + ep))
        nodes = nodes_of([hosts[r] for r in block])
        each = len(nodes[0])
        regular = [r for node in nodes for r in node] == list(range(ep)) and all(
            len(node) == each for node in nodes
        )
        # Irregular: each rank is a node of its own, so there is one level.
        count, each = (len(nodes), each) if regular else (ep, 1)
        two = count > 1 and each > 1
        own: dict[str, Any] = {"group": made(block), "outer": None, "inner": None}
        for kind, sets in (
            ("outer", [block[place::each] for place in range(each)]),
            ("inner", [block[node * each :][:each] for node in range(count)]),
        ):
            for members in sets if two else []:
                group = made(members)
                if rank in members:
                    own[kind] = group
        if rank in block:
            mine = Ranks(rank=rank - start, size=ep, nodes=count, each=each, **own)
    alike = None
    for place in range(ep) if world > ep and replicas else []:
        members = list(range(place, world, ep))
        group = made(members)
        if rank in members:
            alike = group
    for group in mine.groups():
        # Connect now: a wait for one that never connects does not end when the group is aborted.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return mine, alike


def gathered(layer: Experts, tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' rows of something that is laid out as a layer's matrices, in the experts' order.

    Collective over the ranks that share the experts.
    """
    parallel = layer.parallel
    assert parallel is not None
    ranks, own = parallel.shared.ranks, tensor.detach().contiguous()
    own = own.to(parallel.shared.lane.device)
    everyone = own.new_empty(ranks.size * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(everyone, own, group=ranks.group)
    whole = torch.empty_like(everyone)
    whole[parallel.held.to(whole.device)] = everyone
    return whole


def _gather_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, Experts)
    for name in _MATRICES:
        if prefix + name in state:
            state[prefix + name] = gathered(module, state[prefix + name])


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, Experts) and module.parallel is not None
    for name in _MATRICES:
        given = state.get(prefix + name)
        if given is not None and given.shape[0] == module.num_experts:
            state[prefix + name] = given[module.parallel.mine.to(given.device)]


def _of_parameters(model: nn.Module) -> dict[int, tuple[str, Experts | None]]:
    """Each parameter's name, and the layer whose experts it holds if they are spread."""
    owners = {
        id(getattr(layer, matrix)): layer
        for _, layer in layers(model) if layer.parallel is not None for matrix in _MATRICES
    }  # fmt: skip
    return {id(p): (name, owners.get(id(p))) for name, p in model.named_parameters()}


@given
def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by the parameters' names, with all experts. Collective.

    For `load_optimizer_state`, with any number of ranks.
    """
    known = _of_parameters(model)
    states: dict[str, Any] = {}
    for parameter in _parameters(optimizer):
        if id(parameter) not in known:
            raise UsageError(
                "the optimizer has parameters that are not the model's",
                "make it from model.parameters(), after spread or convert",
            )
        name, layer = known[id(parameter)]
        state = optimizer.state.get(parameter, {})
        states[name] = {
            key: gathered(layer, value) if layer is not None and _alike(value, parameter) else value
            for key, value in state.items()
        }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {"states": states, "groups": groups}


@given
def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Give an optimizer what `optimizer_state` gave."""
    known = _of_parameters(model)
    made = optimizer.state_dict()
    if len(made["param_groups"]) != len(state["groups"]):
        raise UsageError(
            f"the state has {len(state['groups'])} groups, this optimizer "
            f"{len(made['param_groups'])}",
            "make it as it was made before",
        )
    for at, parameter in enumerate(_parameters(optimizer)):
        name, layer = known[id(parameter)]
        saved = state["states"].get(name, {})
        parallel = None if layer is None else layer.parallel
        own_state: dict[str, Any] = {}
        for key, value in saved.items():
            if isinstance(value, torch.Tensor):
                mine = parallel is not None and value.dim() == 3
                value = (
                    value[parallel.mine.to(value.device)] if mine and parallel else value.clone()
                )
            own_state[key] = value
        made["state"][at] = own_state
    for own, group in zip(made["param_groups"], state["groups"], strict=True):
        own.update(group)
    optimizer.load_state_dict(made)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _alike(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


@given
@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Average the gradients of spread experts over their replicas, after backward. Collective.

    Needed where ep is smaller than the number of ranks; else it does nothing.
    """
    for _, layer in layers(model):
        if layer.parallel is None or (group := layer.parallel.shared.replicas) is None:
            continue
        for matrix in (layer.gate_up_proj, layer.down_proj):
            if matrix.grad is None:
                matrix.grad = torch.zeros_like(matrix)
            dist.all_reduce(matrix.grad, group=group)
            matrix.grad /= dist.get_world_size(group)


@given
@torch.no_grad()
def clip_gradients(model: nn.Module, most: float) -> torch.Tensor:
    """torch's clip_grad_norm_ for a model with spread experts: the norm of all of it. Collective.

    Gives the norm before. Gradients of the other parameters must be equal on all ranks by now.
    """
    known = _of_parameters(model)
    device = next(model.parameters()).device
    own, spread_out = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    shared: Shared | None = None
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        layer = known[id(parameter)][1]
        square = parameter.grad.double().square().sum()
        if layer is None or layer.parallel is None:
            own += square
        else:
            spread_out += square
            shared = layer.parallel.shared
    if shared is not None:
        dist.all_reduce(spread_out, group=shared.ranks.group)
    norm = (own + spread_out).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def asked(
    gradients: Sequence[torch.Tensor], norm_type: float, plain: total_norm.Plain
) -> torch.Tensor | None:
    """For torch's clip_grad_norm_: the norm of all of a model with spread experts."""
    here = {id(gradient) for gradient in gradients}
    for model in list(_models):
        if not any(p.grad is not None and id(p.grad) in here for p in model.parameters()):
            continue
        of_experts = {
            id(matrix.grad): layer.parallel.shared
            for _, layer in layers(model)
            if layer.parallel is not None
            for matrix in (layer.gate_up_proj, layer.down_proj)
        }
        others = [g for g in gradients if id(g) not in of_experts]
        mine = [(g, 1.0) for g in gradients if id(g) in of_experts]
        shared = next(iter(of_experts.values()))
        told = torch.tensor(
            [total_norm.partial(mine, norm_type)], dtype=torch.float64, device=shared.lane.device
        )
        everyone = [torch.empty_like(told) for _ in range(shared.ranks.size)]
        dist.all_gather(everyone, told, group=shared.ranks.group)
        parts = [float(one) for one in everyone]
        if others:
            parts.append(total_norm.partial([(plain(others), 1.0)], norm_type))
        kind = torch.promote_types(gradients[0].dtype, torch.float32)
        found = total_norm.whole(parts, norm_type)
        return torch.tensor(found, device=gradients[0].device, dtype=kind)
    return None


def loads(found: Iterable[tuple[str, Experts]]) -> list[torch.Tensor]:
    """How many choices each expert had, over all ranks, float64 on the CPU. Collective."""
    counted = [layer.load.double().cpu() for _, layer in found]
    if counted and dist.is_available() and dist.is_initialized():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counted)
        counted = [torch.stack(parts).sum(0) for parts in zip(*everyone, strict=True)]
    return counted
