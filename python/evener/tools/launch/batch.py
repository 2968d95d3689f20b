"""The hosts that a batch system gave this job, where the user names none.

Slurm says them in SLURM_JOB_NODELIST, in a short form that is expanded here (scontrol would do it
too, but is not in every container); PBS and LSF in a file with a line per slot.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from evener.errors import UsageError
from evener.tools.launch.hosts import Host

# Variables by which a batch system tells mpirun which hosts it may use.
SYSTEMS = {"SLURM_JOB_ID": "Slurm", "PBS_NODEFILE": "PBS", "LSB_DJOB_HOSTFILE": "LSF"}
_MOST_HOSTS = 100_000
_PART = r"(?:\[[^\[\]]*\]|[^,\[\]])+"


def system(env: Mapping[str, str]) -> str:
    """The batch system whose job this is; "" where there is none."""
    return next((name for variable, name in SYSTEMS.items() if env.get(variable)), "")


def hosts(env: Mapping[str, str]) -> list[Host]:
    """The job's hosts with their slots; empty where no batch system names any.

    A host's slots are its tasks, or its GPUs where these are more: a job of one task and eight GPUs
    per node is meant for eight ranks. Raises UsageError for a list that cannot be read.
    """
    if nodes := env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST"):
        names = expand(nodes)
        tasks = _tasks(env.get("SLURM_TASKS_PER_NODE", ""), len(names))
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        least = int(gpus) if gpus.isdecimal() else 1
        return [Host(name, max(count, least)) for name, count in zip(names, tasks, strict=True)]
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if path := env.get(variable):
            try:
                lines = Path(path).read_text(encoding="utf-8").split()
            except OSError as error:
                raise UsageError(
                    f"{variable}={path} cannot be read: {error.strerror}", "name the hosts by -H"
                ) from error
            return [Host(name, count) for name, count in Counter(lines).items()]
    return []


def expand(text: str) -> list[str]:
    """`gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7 and login. Raises UsageError."""
    names: list[str] = []
    whole = re.fullmatch(rf"{_PART}(,{_PART})*", text)
    for part in re.findall(_PART, text) if whole else []:
        pieces = [list(_choices(piece)) for piece in re.split(r"(\[[^\]]*\])", part) if piece]
        names += map("".join, itertools.islice(itertools.product(*pieces), _MOST_HOSTS))
    if not names or any(not re.fullmatch(r"[\w.-]+", name) for name in names):
        raise UsageError(f"Slurm's list of hosts {text!r} is not understood", "name them by -H")
    return names


def _choices(piece: str) -> Iterator[str]:
    if not piece.startswith("["):
        yield piece
        return
    for entry in piece[1:-1].split(","):
        first, dash, last = entry.partition("-")
        if not dash:
            yield entry
        elif first.isdecimal() and last.isdecimal() and int(last) - int(first) < _MOST_HOSTS:
            yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
        else:
            yield "?"  # refused by `expand`


def _tasks(text: str, count: int) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1; of `count` hosts."""
    found: list[int] = []
    for entry in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match:
            found += [int(match[1])] * int(match[2] or 1)
    return found if len(found) == count else [1] * count
