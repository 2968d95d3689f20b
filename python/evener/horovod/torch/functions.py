"""Broadcasts of whole things: parameters, optimizer states, Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


class _Place:
    """Stands in a pickled state for a tensor that travels by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the options (learning rate, ...) of rank `root_rank`'s.

    The state is loaded as by `load_state_dict`; no step is taken to create it, so parameters do
    not change. As after upstream's, parameters of an optimizer without a state have gradients
    afterwards, of zeros. model: tells which parameters are of sparse embeddings, and get none.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    if not state["state"]:
        _zero_gradients(optimizer, model)
    tensors: list[torch.Tensor] = []
    skeleton = broadcast_object(
        _taken_apart(state, tensors) if rank() == root_rank else None, root_rank
    )
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), None)
    here: list[torch.Tensor] = []
    rebuilt = _put_together(skeleton, tensors if rank() == root_rank else None, here, device)
    broadcast_many([(f"state {index}", tensor) for index, tensor in enumerate(here)], root_rank)
    if rank() != root_rank:
        # The base class's: a wrapped optimizer's own would also forget gradients in flight.
        optimizer.load_state_dict(rebuilt)
    if not state["state"]:
        # As after upstream's: gradients are there, and zero.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    sparse = {
        id(module.weight)
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse:
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
