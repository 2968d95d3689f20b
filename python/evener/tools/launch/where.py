"""On which hosts a job runs: those of the command line, of a map, or of the batch system."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from evener.errors import UsageError
from evener.tools.launch import batch, placed
from evener.tools.launch.asked import Asked
from evener.tools.launch.hosts import Host
from evener.tools.place import Placement


@dataclass(frozen=True)
class Where:
    """`hosts`: None where none was named. `system`: the batch system that this runs in, or "".
    `by_mpirun`: mpirun knows the hosts from it. `from_system`: `hosts` are the batch system's.
    """

    hosts: list[Host] | None
    placement: Placement | None
    system: str
    by_mpirun: bool
    from_system: bool


def find(asked: Asked) -> Where:
    """Raises UsageError for hosts that are none, and where nothing says how many ranks."""
    hosts = asked.named_hosts()
    placement = placed.by_map(asked.map_file, asked.ranks) if asked.map_file else None
    if placement:
        hosts = placed.hosts(placement)
    system = batch.system(os.environ)
    by_mpirun = (
        hosts is None
        and bool(system)
        and asked.launcher != "torchrun"
        and not asked.is_elastic
        and (asked.launcher == "mpirun" or bool(shutil.which("mpirun")))
    )
    theirs = batch.hosts(os.environ) if hosts is None and not by_mpirun else []
    from_system = len(theirs) > 1  # one host's job may have more ranks than tasks
    if from_system:
        hosts = theirs
    if hosts is None and asked.ranks is None and not asked.is_elastic:
        raise UsageError("neither -np nor hosts were given", "say how many ranks: -np 4")
    return Where(hosts, placement, system, by_mpirun, from_system)
