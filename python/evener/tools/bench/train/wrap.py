"""What a column's `wrap` does to a model. One function a kind; `WRAPPERS` is their table."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from evener.tools.bench.train.columns import Column
    from evener.tools.bench.train.plan import Options

    Wrapped = tuple[nn.Module, torch.optim.Optimizer]
    Wrapper = Callable[
        [nn.Module, torch.optim.Optimizer, torch.device, Column, Options], nn.Module | Wrapped
    ]


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> Wrapped:
    """The model as the column trains it, and what steps it; the default process group exists (but
    for "none")."""
    made = WRAPPERS[column.wrap](model, optimizer, device, column, options)
    return made if isinstance(made, tuple) else (made, optimizer)


def _none(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> nn.Module:
    del optimizer, device, column, options
    return model


def _ddp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> DistributedDataParallel:
    from torch.nn.parallel import DistributedDataParallel

    del optimizer, column, options
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _hook(name: str) -> Wrapper:
    def apply(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        column: Column,
        options: Options,
    ) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = _ddp(model, optimizer, device, column, options)
        wrapped.register_comm_hook(None, getattr(default_hooks, name))
        return wrapped

    return apply


def _powersgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    wrapped = _ddp(model, optimizer, device, column, options)
    # Error feedback needs plain steps first; two is the least that it takes.
    state = powersgd.PowerSGDState(
        None, matrix_approximation_rank=int(column.options["rank"]), start_powerSGD_iter=2
    )
    wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
    return wrapped


def _evener(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> nn.Module:
    from evener.ddp import accelerate

    wrapped = _ddp(model, optimizer, device, column, options)
    given: dict[str, Any] = dict(column.options)
    given["ratio"] = options.topk_ratio
    overlapped = optimizer if given.pop("overlap", False) else None
    return accelerate(wrapped, overlapped, **given)


def _horovod(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> Wrapped:
    # By name, as a script has it: the package cannot list it, for programs without torch.
    hvd = importlib.import_module("evener.horovod.torch")
    del device, column, options
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return model, wrapped


def _fsdp2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    column: Column,
    options: Options,
) -> Wrapped:
    from evener.tools.bench.train import sharded

    sharded.shard(model, device, options)
    if column.options:
        from evener import fsdp

        fsdp.accelerate(model, mode=str(column.options["form"]))
    # Its parameters are other ones now.
    return model, type(optimizer)(model.parameters(), **optimizer.defaults)


WRAPPERS: dict[str, Wrapper] = {
    "none": _none,
    "ddp": _ddp,
    "hook:fp16": _hook("fp16_compress_hook"),
    "hook:bf16": _hook("bf16_compress_hook"),
    "powersgd": _powersgd,
    "evener": _evener,
    "horovod": _horovod,
    "fsdp2": _fsdp2,
}
