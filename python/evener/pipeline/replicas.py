"""Which ranks are one pipeline, which hold the same stage, and which share the parts of one stage.

A mesh has the dimension `pipeline`, and may have `data` and `tensor`: ranks along `pipeline` are
the stages, along `data` replicas whose gradients are averaged, along `tensor` those over which a
stage's parameters are divided. The order of the dimensions is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.pipeline.plan import Plan

_NAMES = ("data", "tensor", "pipeline")


@dataclass(frozen=True)
class Replicas:
    """pipeline: this rank's pipeline, None for all ranks; data: those with its stage, None where
    there is one replica; tensor: those that share its stage, None where there are none. index: of
    this replica; part: this rank's place in `tensor`; members: all ranks, by replica, part, stage.
    """

    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1
    members: tuple[int, ...] = ()
    tensor: DeviceMesh | None = None
    part: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the first pipeline of all: it plans, and writes checkpoints."""
        return self.index == 0 and self.part == 0

    @property
    def parts(self) -> int:
        """Ranks over which a stage's parameters are divided."""
        return self.tensor.size() if self.tensor is not None else 1

    @property
    def dimensions(self) -> list[dist.ProcessGroup | None]:
        """A group along each dimension: what ranks agree on along one after the other, all know."""
        along = [self.data, self.tensor.get_group() if self.tensor is not None else None]
        return [self.pipeline, *(group for group in along if group is not None)]

    @classmethod
    def of(cls, mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Replicas:
        """Raises UsageError for a mesh of other dimensions."""
        if mesh is None:
            return cls(group)
        if group is not None:
            raise UsageError("both group= and mesh= are given", "give one of them")
        names = mesh.mesh_dim_names or ()
        if "pipeline" not in names or not set(names) <= set(_NAMES):
            raise UsageError(
                f"a mesh with the dimensions {list(names)}",
                'init_device_mesh(device, (replicas, stages), mesh_dim_names=("data", "pipeline")),'
                ' with "tensor" where a stage is divided too',
            )
        table = mesh.mesh
        for name in _NAMES:
            if name not in names:
                table, names = table.unsqueeze(0), (name, *names)
        table = table.permute(*(names.index(name) for name in _NAMES))
        count, parts = int(table.shape[0]), int(table.shape[1])
        there = mesh.mesh_dim_names or ()
        return cls(
            mesh.get_group("pipeline"),
            mesh.get_group("data") if count > 1 else None,
            mesh.get_local_rank("data") if "data" in there else 0,
            count,
            tuple(table.flatten().tolist()),
            mesh["tensor"] if parts > 1 else None,
            mesh.get_local_rank("tensor") if "tensor" in there else 0,
        )

    def said(self, plan: Plan) -> str:
        """What was chosen, in one line."""
        many = f"{self.count} replicas of " if self.count > 1 else ""
        divided = f" x {self.parts} tensor-parallel ranks" if self.tensor is not None else ""
        left_out = ["over replicas"] * (self.count > 1) + ["inside stages"] * bool(divided)
        without = f" without the sums {' and '.join(left_out)}" if left_out else ""
        return (
            f"{many}{plan.ranks} stages{divided}, {plan.schedule}, {plan.microbatches} "
            f"microbatches of {plan.rows} row{'s' if plan.rows > 1 else ''}; a step of "
            f"{plan.step_seconds * 1e3:,.1f} ms expected{without}, bubble {plan.bubble:.0%}, "
            f"longest stage {plan.imbalance:.2f} x the mean"
        )
