"""Tensor parallelism inside a stage: torch's DTensors in the captured operations.

A stage's operations have the sizes of the whole model. So a parameter that is divided over ranks
becomes a DTensor, and torch finds for each operation how its result is divided. Tensors that cross
cuts are whole on every rank, and so are inputs. Attention runs on each rank's own heads.

How parameters are divided is a plan of torch's and transformers' form: patterns of module names to
"colwise" (rows of the matrix: its outputs are divided), "rowwise" (its columns: its inputs are), or
torch's ColwiseParallel() and RowwiseParallel(). Parameters that no pattern names are whole on every
rank. Results do not depend on the plan, but for rounding; the time that they take does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement

from evener.errors import UsageError
from evener.pipeline.split import Seeded, StageModule

Plan = Mapping[str, Any]


def plan_of(model: nn.Module, given: Plan | None) -> dict[str, str]:
    """Patterns to "colwise" or "rowwise": those given, else the model's own. Raises UsageError."""
    found = dict(given or getattr(model, "_tp_plan", None) or {})
    if not given and hasattr(model, "config"):
        base = getattr(model.config, "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        found = {f"{prefix}.{name}" if prefix else name: how for name, how in base.items()} | found
    ways = {}
    for name, how in found.items():
        word = how if isinstance(how, str) else type(how).__name__.removesuffix("Parallel").lower()
        if word.startswith(("colwise", "rowwise")):
            ways[name] = word[:7]
    if not ways:
        raise UsageError(
            f"how {type(model).__name__} is divided over tensor-parallel ranks is not known",
            'give tensor={"layers.*.up": "colwise", "layers.*.down": "rowwise", ...}',
        )
    return ways


class Sharding:
    """A stage's parameters over the ranks of `mesh` (one dimension)."""

    def __init__(self, mesh: DeviceMesh, plan: dict[str, str]) -> None:
        self.mesh, self.size = mesh, mesh.size()
        self._ways = [(re.compile(_pattern(name)), how) for name, how in plan.items()]
        self.divided = 0

    def placement(self, name: str, tensor: torch.Tensor) -> Placement:
        """How a parameter is divided; whole where its size does not go into the ranks."""
        module, _, last = name.rpartition(".")
        for pattern, how in self._ways:
            if not pattern.fullmatch(module):
                continue
            dim = 0 if how == "colwise" else tensor.dim() - 1
            if how == "rowwise" and (last == "bias" or tensor.dim() < 2):
                break
            if tensor.dim() and tensor.shape[dim] % self.size == 0:
                return Shard(dim)
        return Replicate()

    def apply(self, module: StageModule) -> None:
        """Divide a stage's parameters in place, and let its attention run on heads."""
        for name, parameter in list(module.named_parameters()):
            place = self.placement(name, parameter)
            self.divided += isinstance(place, Shard)
            path, _, last = name.rpartition(".")
            made = nn.Parameter(
                distribute_tensor(parameter.data, self.mesh, [place], src_data_rank=None),
                requires_grad=parameter.requires_grad,
            )
            module.get_submodule(path)._parameters[last] = made
            if not path:
                setattr(module.graph_module, last, made)
        graph: Any = module.graph_module
        for node in graph.graph.nodes:
            inner = node.target.target if isinstance(node.target, Seeded) else node.target
            if inner is torch.ops.aten.scaled_dot_product_attention.default:
                if isinstance(node.target, Seeded):
                    node.target.target = _Heads(inner)
                else:
                    node.target = _Heads(inner)
        graph.recompile()
        module.enter, module.leave = self._enter, self._leave

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def _leave(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Masks and constants of a stage are whole on every rank."""
        with implicit_replication():
            yield


class _Heads:
    """Attention on each rank's own heads (dimension 1), or on all of them."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.__name__, self.__module__ = "attention", __name__

    def __call__(self, q: Any, k: Any, v: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("attn_mask", mask)
        given = [x for x in (q, k, v, mask) if isinstance(x, DTensor)]
        if not given:
            return self.target(q, k, v, mask, *args, **kwargs)
        mesh = given[0].device_mesh
        split = all(isinstance(x, DTensor) and x.placements == (Shard(1),) for x in (q, k, v))
        place = [Shard(1)] if split else [Replicate()]

        def local(x: Any, where: list[Any]) -> Any:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            return x.redistribute(placements=where).to_local()

        if isinstance(mask, torch.Tensor):
            per_head = split and mask.dim() == 4 and mask.shape[1] > 1
            mask = local(mask, [Shard(1)] if per_head else [Replicate()])
        out = self.target(*(local(x, place) for x in (q, k, v)), mask, *args, **kwargs)
        return DTensor.from_local(out, mesh, place, run_check=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A divided tensor with all its values (all ranks of the mesh call it); others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a divided tensor; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether ranks have different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(isinstance(p, Shard) for p in tensor.placements)


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole tensor's values, or this rank's part of them."""
    if isinstance(tensor, DTensor):
        value = like(tensor, value)
    own(tensor).copy_(own(value))


def like(tensor: DTensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor, divided as another one is."""
    moved = value.to(tensor.device)
    return distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None)


def settle(parameter: nn.Parameter) -> None:
    """Give a gradient the division of its parameter: sums that are pending are made."""
    gradient = parameter.grad
    if (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)
            and gradient.placements != parameter.placements):  # fmt: skip
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"\d+")
