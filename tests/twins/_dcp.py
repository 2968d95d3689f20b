"""torch.distributed.checkpoint of several ranks in one process: its own planners and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

State = dict[str, Any]


def save(states: list[State], folder: Path) -> None:
    """What `dcp.save` does where each rank gives its state."""
    writers = [FileSystemWriter(folder, sync_files=False) for _ in states]
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, writer, planner in zip(plans, writers, planners, strict=True)
    ]
    writers[0].finish(metadata, results)


def load(state: State, folder: Path, make: Callable[[], DefaultLoadPlanner]) -> None:
    """What `dcp.load` does on one rank, into `state`."""
    reader, planner = FileSystemReader(folder), make()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
