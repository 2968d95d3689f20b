"""Who am I: rank and size, from what the launcher left in the environment.

Every launcher has variables of its own and none of them is a standard. They are asked in a fixed
order (torchrun, horovodrun, Open MPI, MVAPICH, PALS, PMI with Hydra's local rank, a Slurm step);
the first family that gives both a rank and a size is believed whole. Values are never mixed between
families: a torchrun under srun has eight ranks where Slurm sees two tasks, and both are right.

`detect` is a pure function of the environment. It starts nothing and asks nobody, so it can be
called before anything else, and tested with plain dictionaries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from evener.errors import UsageError


class RankError(UsageError):
    """The launcher's variables contradict each other or are no numbers."""


@dataclass(frozen=True)
class Ranks:
    """The place of one process in its job.

    rank: 0 .. size-1. local_rank: its place among the ranks of its node, 0 .. local_size-1. The
    cross values are Horovod's: the place among the ranks that have this local rank on their nodes.
    None where the launcher did not say; `rendezvous` then finds it out from the peers.
    source: the family of variables that was believed, for messages.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    source: str = "explicit arguments"

    def __post_init__(self) -> None:
        _check_pair(self.source, "rank", self.rank, "size", self.size)
        if self.local_rank is not None:
            bound = self.size if self.local_size is None else self.local_size
            _check_pair(self.source, "local rank", self.local_rank, "local size", bound)
        if self.local_size is not None and not 1 <= self.local_size <= self.size:
            raise RankError(
                f"{self.source}: local size {self.local_size} of a job of {self.size} cannot be",
                "start the job anew with one launcher",
            )
        if self.cross_rank is not None and self.cross_size is not None:
            _check_pair(self.source, "cross rank", self.cross_rank, "cross size", self.cross_size)


@dataclass(frozen=True)
class _Family:
    """The variables of one launcher; for each value the names are tried in turn."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    cross_rank: str = ""
    cross_size: str = ""


_FAMILIES = (
    _Family("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Family(
        "horovodrun",
        "HOROVOD_RANK",
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
    ),
    _Family(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    # PALS gives the size only in the PMI variables that it sets beside its own.
    _Family(
        "PALS",
        "PALS_RANKID",
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _Family(
        "PMI",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Family("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
)

# Step ids from here on are not tasks of the user's: the batch script, an interactive shell, ...
_SLURM_SPECIAL_STEPS = 0xFFFF_FFF0


def detect(env: Mapping[str, str] | None = None) -> Ranks:
    """The place of this process, from `env` (default: the process's environment).

    A single process (rank 0 of 1) where no launcher left anything. Raises RankError where a value
    is no whole number, where rank and size contradict each other, or where a family's rank or size
    stands alone and no other family is complete.
    """
    # Set but empty is how a shell or a job template says unset.
    env = {k: v for k, v in (os.environ if env is None else env).items() if v.strip()}
    halves: list[RankError] = []
    for family in _FAMILIES:
        if family.name == "Slurm" and not _in_slurm_step(env):
            continue
        size_name = _first(env, family.size)
        if family.rank in env and size_name:
            return _read(family, size_name, env)
        if family.name == "Slurm" or (family.name == "PALS" and family.rank not in env):
            continue  # the size belongs to another family, or to the whole allocation
        if family.rank in env or size_name:
            halves.append(_half(family, env))
    if halves:
        raise halves[0]
    return Ranks(0, 1, 0, 1, 0, 1, source="a single process")


def _read(family: _Family, size_name: str, env: Mapping[str, str]) -> Ranks:
    rank, size = _number(env, family.rank), _number(env, size_name)
    _check_pair(family.name, family.rank, rank, size_name, size)
    local_rank_name = _first(env, family.local_rank)
    local_size_name = _first(env, family.local_size)
    local_rank = _number(env, local_rank_name) if local_rank_name else None
    local_size = _number(env, local_size_name) if local_size_name else None
    if local_rank is not None and local_size is not None:
        _check_pair(family.name, local_rank_name, local_rank, local_size_name, local_size)
    if local_size is not None and local_size > size:
        raise RankError(
            f"{family.name}: {local_size_name}={local_size} is more than {size_name}={size}",
            "start the job anew with one launcher, or unset what an older one left behind",
        )
    if local_rank is not None and local_rank >= size:
        _check_pair(family.name, local_rank_name, local_rank, size_name, size)
    cross: tuple[int | None, int | None] = (None, None)
    if family.cross_rank and family.cross_rank in env and family.cross_size in env:
        cross = _number(env, family.cross_rank), _number(env, family.cross_size)
        _check_pair(family.name, family.cross_rank, cross[0], family.cross_size, cross[1])
    elif family.name == "torchrun" and local_size is not None:
        cross = _torchrun_cross(env, size, local_size)
    elif family.name == "Slurm" and local_rank is not None:
        local_size, cross = _slurm_nodes(env, size, local_rank)
    return Ranks(rank, size, local_rank, local_size, *cross, source=family.name)


def _torchrun_cross(
    env: Mapping[str, str], size: int, local_size: int
) -> tuple[int | None, int | None]:
    if "GROUP_RANK" not in env or "GROUP_WORLD_SIZE" not in env:
        return None, None
    group, groups = _number(env, "GROUP_RANK"), _number(env, "GROUP_WORLD_SIZE")
    if groups * local_size != size:  # nodes of different sizes, or two agents on one host
        return None, None
    _check_pair("torchrun", "GROUP_RANK", group, "GROUP_WORLD_SIZE", groups)
    return group, groups


def _slurm_nodes(
    env: Mapping[str, str], size: int, local_rank: int
) -> tuple[int | None, tuple[int | None, int | None]]:
    """Local size and cross values from SLURM_STEP_TASKS_PER_NODE, for instance `4(x2),3`."""
    tasks: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None, (None, None)
        tasks += [int(match[1])] * min(int(match[2] or 1), size + 1)
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else len(tasks)
    if sum(tasks) != size or node >= len(tasks) or local_rank >= tasks[node]:
        return None, (None, None)
    peers = [count > local_rank for count in tasks]
    return tasks[node], (sum(peers[:node]), sum(peers))


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task that srun started, and not the batch script or an interactive shell,
    which carry SLURM_PROCID=0 and the allocation's SLURM_NTASKS just the same."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _SLURM_SPECIAL_STEPS


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in env), "")


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise RankError(
            f"{name}={env[name]!r} is not a whole number, 0 or more",
            f"unset {name}, or start the process by a launcher that sets it",
        )
    return int(text)


def _check_pair(source: str, rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise RankError(
            f"{source}: {rank_name}={rank} and {size_name}={size} contradict each other "
            f"(0 <= {rank_name} < {size_name})",
            "start the job anew with one launcher, or unset what an older one left behind",
        )


def _half(family: _Family, env: Mapping[str, str]) -> RankError:
    size_name = _first(env, family.size)
    have, lack = (family.rank, family.size[0]) if family.rank in env else (size_name, family.rank)
    return RankError(
        f"{have}={env[have]!r} is set but {lack} is not",
        f"set {lack} too, or unset {have} to run as a single process",
    )
