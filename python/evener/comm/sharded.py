"""Evener under a model that FSDP2 shards over all ranks: who gathers and who reduces.

Weights travel as exact differences (`comm.mirrors`), gradients as FSDP2 sends them or in INT8
(`comm.shards`). Both come in by FSDP2's public setters, one object for each of its units; units
whose group is another one (`reshard_after_forward=` a number gathers in the node) stay as they are.

Where each node has a whole copy of the model (HSDP), `comm.replicas` does the work instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evener.base import torch_names
from evener.comm.mirrors import Lane, MirroredGather, Traffic, free
from evener.comm.shards import QuantizedReduceScatter
from evener.errors import UsageError

logger = logging.getLogger("evener.fsdp")

MODES = ("exact", "int8")
MIRRORS = ("host", "gpu", "off")
# Of the memory that a host has free; the rest is the data loader's and everybody else's.
_MOST_OF_HOST = 0.8


class Sharded:
    """What `evener.fsdp.accelerate` puts into a model that has no replicas, as `model.evener`.

    `traffic`: what the gathers moved so far on this rank. `close()` gives the model back.
    """

    def __init__(
        self, units: Sequence[tuple[str, Any]], mode: str, mirror: str, device: torch.device
    ) -> None:
        """Collective. Raises UsageError where the arguments, ranks or the memory forbid it."""
        if mode not in MODES:
            raise UsageError(
                f"mode={mode!r} is no form for a model that is sharded over all ranks",
                f"take one of {', '.join(MODES)}; the others average replicas (a 2-D mesh)",
            )
        if mirror not in MIRRORS:
            raise UsageError(f"mirror={mirror!r}", f"take one of {', '.join(MIRRORS)}")
        self.mode, self.traffic = mode, Traffic()
        self._undo: list[Callable[[], None]] = []
        group = units[0][1].mesh_info.shard_process_group
        _require_agreement(group, (mode, mirror, len(units), free(group)))
        # All that can be refused is refused before anything changes.
        modules = [_module_of(name, unit) for name, unit in units]
        for _, unit in units:
            torch_names.fsdp_require_comms(unit)
        size, lane = 0, None
        if mirror != "off":
            size = sum(_gathered_bytes(unit) for _, unit in units)
            _require_memory(size, mirror, device, group)
            lane = Lane(group, device)
            self._undo.append(lane.close)
        for index, ((name, unit), module) in enumerate(zip(units, modules, strict=True)):
            if lane is not None:
                self._set(
                    unit,
                    "_all_gather_comm",
                    module.set_custom_all_gather,
                    MirroredGather(name, group, lane, self.traffic, mirror == "host"),
                )
            if mode == "int8":
                self._set(
                    unit,
                    "force_sum_reduction_for_comms",
                    module.set_force_sum_reduction_for_comms,
                    True,
                )
                self._set(
                    unit,
                    "_reduce_scatter_comm",
                    module.set_custom_reduce_scatter,
                    QuantizedReduceScatter(index),
                )
        if group.rank() == 0:
            weights = "weights whole"
            if mirror != "off":
                place = "the GPU" if mirror == "gpu" and device.type != "cpu" else "host memory"
                weights = f"weights as exact differences (a copy of {_bytes(size)} in {place})"
            logger.info("FSDP2, %d units: %s; gradients %s", len(units), weights, mode)

    def _set(self, unit: Any, name: str, setter: Callable[[Any], None], value: Any) -> None:
        before = getattr(unit, name)
        setter(value)
        self._undo.append(lambda: setattr(unit, name, before))

    def close(self) -> None:
        """Give every unit what it had."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _module_of(name: str, unit: Any) -> Any:
    for module in unit.modules:
        if hasattr(module, "set_custom_all_gather"):
            return module
    raise UsageError(
        f"{name} has no set_custom_all_gather in torch {torch.__version__}",
        "use torch 2.9 or newer, and shard with torch.distributed.fsdp.fully_shard",
    )


def _gathered_bytes(unit: Any) -> int:
    """Bytes of a unit's gathered weights, all ranks' rows with their padding."""
    world = unit.mesh_info.shard_process_group.size()
    total = 0
    for parameter in unit.fsdp_params:
        dtype = torch_names.fsdp_gather_dtype(unit, parameter)
        total += parameter.padded_sharded_param_size.numel() * world * dtype.itemsize
    return total


def _require_memory(size: int, mirror: str, device: torch.device, group: Any) -> None:
    """Refuse a mirror that does not fit before the first step, on all ranks alike."""
    if device.type == "cuda" and mirror == "gpu":
        free, _ = torch.cuda.mem_get_info(device)
        allowed, where = float(free), f"free on {device}"
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        allowed, where = _host_free() * _MOST_OF_HOST / ranks, "of host memory for this rank"
    fits = torch.tensor(float(size <= allowed), device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN, group=group)
    if not fits.item():
        raise UsageError(
            f"a copy of the gathered weights takes {_bytes(size)}, and on at least one rank it "
            f"does not fit (here {_bytes(allowed)} {where})",
            "pass mirror='off' (gathers as FSDP2 does), or mirror='host' or 'gpu', whichever "
            "has room",
        )


def _host_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _require_agreement(group: Any, chosen: tuple[Any, ...]) -> None:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, chosen, group=group)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise UsageError(
                f"ranks chose differently (mode, mirror, units, models released): rank 0 "
                f"{every[0]}, rank {rank} {other}",
                "call evener.fsdp.accelerate() and release() on every rank, with equal arguments",
            )


def refuse_for_replicas(given: dict[str, Any], module: nn.Module) -> None:
    """Arguments that only replicas have, given for a model that has none."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}= was given for a {type(module).__name__} that is sharded over all of its "
                "ranks",
                f"leave {name}= out, or give fully_shard() a 2-D mesh (replicate, shard)",
            )
