"""FSDP2 in the benchmark: which parts of a model are sharded, in which precision, and how to look.

Each repeated block is a unit of FSDP2, and what is left is the root's, as most programs have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from evener.errors import UsageError
from evener.tools.bench.train import models

if TYPE_CHECKING:
    from evener.tools.bench.train.columns import Column
    from evener.tools.bench.train.plan import Options


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in module order.

    They are the children of every Sequential or ModuleList that holds two or more modules of one
    class, which have modules of their own. What lies in a block is not looked at.
    """
    found: list[nn.Module] = []
    for child in model.children():
        parts = list(child.children())
        lists = isinstance(child, nn.Sequential | nn.ModuleList)
        alike = len(parts) > 1 and len({type(part) for part in parts}) == 1
        if lists and alike and not _is_list(parts[0]) and any(True for _ in parts[0].children()):
            found += parts
        else:
            found += blocks(child)
    return found


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.Sequential, nn.ModuleList)


def require(name: str, columns: Iterable[Column]) -> None:
    """Raise UsageError where one of `columns` shards and the model `name` is not made for it."""
    column = next((column for column in columns if column.sharded), None)
    if column is None:
        return
    with torch.device("meta"):
        model = models.build(name)
    if not blocks(model):
        why = "no repeated blocks to shard"
    elif any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        why = "batch norms, whose statistics FSDP2 leaves to each rank"
    else:
        return
    raise UsageError(
        f"column {column.name}: model {name} has {why}",
        "take gpt2, bert-base or a transformer of torchvision, such as vit_b_16; on CPUs gpt-tiny "
        "or bert-tiny; or leave the column out",
    )


def shard(model: nn.Module, device: torch.device, options: Options) -> None:
    """`fully_shard` each block and the root over all ranks; "bf16" is FSDP2's own, no autocast."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inner, outer = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if options.amp == "bf16":
        inner = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        # The loss is taken in float32, as under autocast.
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter, where this rank may hold a part of it. Collective then."""
    from torch.distributed.tensor import DTensor

    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def owed(model: nn.Module, state: dict[str, Any]) -> dict[int, torch.Tensor]:
    """By the parameter's id what `state`, a `Sharded`'s, says is not sent yet. Collective."""
    named = dict(model.named_parameters())
    return {id(named[name]): whole(residual) for name, residual in state.items()}


def gathered(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every weight as this rank's forward gets it, a unit at a time. Collective."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            # Copies: FSDP2 frees these, which it cannot do while NumPy looks at them.
            for p in module.parameters():
                if not isinstance(p, DTensor):
                    yield p.detach().clone()
            module.reshard()
