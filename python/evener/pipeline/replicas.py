"""Replicas of a pipeline: which ranks are one pipeline, and which hold the same stage.

A mesh of two dimensions, `data` and `pipeline`: its rows are pipelines, its columns the ranks whose
gradients are averaged. Tensor parallelism inside a stage is refused by name: it is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.pipeline.plan import Plan

_NAMES = {"data", "pipeline"}


@dataclass(frozen=True)
class Replicas:
    """pipeline: this rank's pipeline, None for all ranks; data: those with its stage, None where
    there is one replica. index: of this replica; members: all ranks, replica by replica.
    """

    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1
    members: tuple[int, ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Replicas:
        """Raises UsageError for a mesh that is none of these."""
        if mesh is None:
            return cls(group)
        if group is not None:
            raise UsageError("both group= and mesh= are given", "give one of them")
        names = mesh.mesh_dim_names or ()
        if {"tensor", "tp"} & set(names):
            raise UsageError("tensor parallelism inside a pipeline's stages is not there yet",
                             "give a mesh of data and pipeline")  # fmt: skip
        if set(names) != _NAMES:
            raise UsageError(
                f"a mesh with the dimensions {list(names)}",
                'init_device_mesh(device, (replicas, stages), mesh_dim_names=("data", "pipeline"))',
            )
        table = mesh.mesh if names[0] == "data" else mesh.mesh.t()
        count = int(table.shape[0])
        return cls(
            mesh.get_group("pipeline"), mesh.get_group("data") if count > 1 else None,
            mesh.get_local_rank("data"), count, tuple(table.flatten().tolist()),
        )  # fmt: skip

    def said(self, plan: Plan) -> str:
        """What was chosen, in one line."""
        return (
            f"{self.count} replica(s) x {plan.ranks} stages, {plan.schedule}, {plan.microbatches} "
            f"microbatches of {plan.rows} row(s) per replica; expected {plan.step_seconds:.3g} s "
            f"per step without the sums over replicas, bubble {plan.bubble:.0%}, stages "
            f"{plan.imbalance:.3f} (longest / mean)"
        )
