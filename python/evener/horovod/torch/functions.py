"""Broadcasts of whole things: parameters, optimizer states, Python objects."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from evener.base import settings
from evener.base.given import ArgumentError
from evener.horovod.common import pickling
from evener.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_many,
    global_process_set,
    rank,
)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite parameters with rank `root_rank`'s, on every rank.

    params: a `state_dict()`, `named_parameters()`, or a list of tensors. Raises ValueError for
    anything else, HorovodInternalError where names, shapes or dtypes differ between ranks.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        named = [
            entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
            for index, entry in enumerate(params)
        ]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, not a tensor")
    broadcast_many(named, root_rank)


def check_optimizer(optimizer: Any, call: str) -> None:
    """Raise ArgumentError, which names `call`, where this is no optimizer of torch's kind."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ArgumentError(
            f"{call} was given a {type(optimizer).__name__} as optimizer",
            "give an optimizer of torch",
        )


class _Place:
    """Stands in a pickled state for a tensor that travels by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the options (learning rate, ...) of rank `root_rank`'s.

    Values are written into the groups and the state that exist: a scheduler that was made on the
    optimizer, or on the one that it wraps, goes on to reach them. As upstream's, an optimizer
    without a state gets one by a step with gradients of zeros, which counts in Adam's bias
    correction and lets weight decay move the parameters; every rank whose state is empty takes it
    where rank `root_rank` does, and none where that has a state. EVENER_HOROVOD_ZERO_STEP=0: no
    such step. Gradients are zeros afterwards. model: tells which parameters are of sparse
    embeddings.

    Raises ValueError for LBFGS, and where the groups differ from rank `root_rank`'s.
    """
    check_optimizer(optimizer, "hvd.broadcast_optimizer_state()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    steps = settings.EVENER_HOROVOD_ZERO_STEP.get()
    empty = not optimizer.state_dict()["state"]
    if empty:
        _zero_gradients(optimizer, model, anew=steps)
    root = rank() == root_rank
    # Told before it is taken: a class of a library's own may wait for the other ranks in its step.
    stepped = broadcast_object(empty and steps, root_rank)
    if stepped and empty:
        _step_alone(optimizer)
    tensors: list[torch.Tensor] = []
    content = _taken_apart(optimizer.state_dict(), tensors) if root else None
    skeleton = broadcast_object(content, root_rank)
    if stepped and not hasattr(optimizer, "_evener_base"):
        _note_zero_step(optimizer)
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), None)
    here: list[torch.Tensor] = []
    rebuilt = _put_together(skeleton, tensors if root else None, here, device)
    broadcast_many([(f"state {index}", tensor) for index, tensor in enumerate(here)], root_rank)
    if not root:
        put_in_place(optimizer, rebuilt)


# Optimizers whose state is that of the step with zeros, and of no other.
_ZERO_STEPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _note_zero_step(optimizer: torch.optim.Optimizer) -> None:
    """Until it steps, or loads a state."""

    def forget(stepped: torch.optim.Optimizer, *_: Any) -> None:
        _ZERO_STEPPED.discard(stepped)
        for hook in hooks:
            hook.remove()

    hooks = [
        optimizer.register_step_post_hook(forget),
        optimizer.register_load_state_dict_post_hook(forget),
    ]
    _ZERO_STEPPED.add(optimizer)


def contents(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a DistributedOptimizer takes over of the one that it wraps.

    A scheduler that knows that one has replaced its `step`, which stays behind. The step with zeros
    does too: upstream's wrapper begins without a state, so that for Adam in the order of most
    scripts (broadcast, then wrap) the first step is the first. A state that was loaded, or trained,
    goes along; upstream's loses it.
    """
    taken = {name: value for name, value in vars(optimizer).items() if name != "step"}
    if optimizer in _ZERO_STEPPED:
        taken["state"] = collections.defaultdict(dict)
    return taken


def _step_alone(optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimizer itself: nothing is reduced."""
    base = getattr(optimizer, "_evener_base", None)
    if base is None:
        optimizer.step()
    else:
        base.step(optimizer)


def put_in_place(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """As `optimizer.load_state_dict(values)`, but the groups and the state stay the objects they
    are, and tensors of the state keep their dtypes: who holds them sees what is new.

    Raises ValueError where `values` has other groups.
    """
    groups, state = optimizer.param_groups, optimizer.state
    sizes = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in values["param_groups"]]
    if sizes != theirs:
        raise ValueError(
            f"the optimizer has groups of {sizes} parameters, the state to load of {theirs}"
        )
    parameters: dict[Any, torch.Tensor] = {}
    for mine, other in zip(groups, values["param_groups"], strict=True):
        parameters.update(zip(other["params"], mine["params"], strict=True))
    if set(values) - {"state", "param_groups"}:
        # More than torch's optimizers keep: its class knows where that belongs.
        optimizer.load_state_dict(values)
        optimizer.param_groups, optimizer.state = groups, state
    for mine, other in zip(groups, values["param_groups"], strict=True):
        for key, value in other.items():
            if key != "params":
                mine[key] = _placed(mine.get(key), value)
    wanted = {parameters.get(key, key): value for key, value in values["state"].items()}
    for key in [key for key in state if key not in wanted]:
        del state[key]
    for key, value in wanted.items():
        state[key] = _placed(state.get(key), value)


def _placed(old: Any, new: Any) -> Any:
    """`new`, in the tensors and dictionaries of `old` where these fit."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        same = (old.shape, old.dtype, old.layout) == (new.shape, new.dtype, new.layout)
        if same and old is not new:
            with torch.no_grad():
                old.copy_(new)
        return old if same else new
    if isinstance(old, dict) and isinstance(new, dict):
        placed = {key: _placed(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(placed)
        return old
    return new


def _zero_gradients(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, anew: bool
) -> None:
    """Gradients of zeros where there are none; everywhere where `anew`."""
    sparse = {
        id(parameter)
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }
    sparse_adam = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or (parameter.grad is not None and not anew):
                continue
            if sparse_adam or id(parameter) in sparse:
                if anew:
                    parameter.grad = torch.zeros_like(parameter).detach().to_sparse(1)
            else:
                parameter.grad = torch.zeros_like(parameter)


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(value)
    if isinstance(value, dict):
        return {key: _taken_apart(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_taken_apart(entry, tensors) for entry in value)
    return value


def _put_together(
    value: Any,
    tensors: list[torch.Tensor] | None,
    here: list[torch.Tensor],
    device: torch.device | None,
) -> Any:
    """`value` with tensors for places: the root's own, in order, or new ones. All go to `here`."""
    if isinstance(value, _Place):
        if tensors is not None:
            here.append(tensors[len(here)])
        else:
            where = device if device is not None and value.device == device.type else value.device
            here.append(torch.empty(value.shape, dtype=value.dtype, device=where))
        return here[-1]
    if isinstance(value, dict):
        return {k: _put_together(entry, tensors, here, device) for k, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_together(entry, tensors, here, device) for entry in value)
    return value


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Rank `root_rank`'s object on every rank; the root gets its own back, others a copy.

    The object must be picklable (by cloudpickle where that is installed). Only ranks of this job
    can send one: unpickling runs code.
    """
    root = rank() == root_rank
    data = pickling.dumps(obj) if root else b""
    length = broadcast_(
        torch.tensor([len(data)]), root_rank, _named(name, "size"), process_set=process_set
    )
    content = torch.empty(int(length.item()), dtype=torch.uint8)
    if root:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    broadcast_(content, root_rank, _named(name, "data"), process_set=process_set)
    return obj if root else pickling.loads(content.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """All ranks' objects, in rank order. Each must be picklable."""
    data = torch.frombuffer(bytearray(pickling.dumps(obj)), dtype=torch.uint8)
    sizes = allgather(torch.tensor([data.numel()]), _named(name, "size"), process_set)
    everything = allgather(data, _named(name, "data"), process_set).numpy().tobytes()
    found, start = [], 0
    for length in sizes.tolist():
        found.append(pickling.loads(everything[start : start + length]))
        start += length
    return found


def _named(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
