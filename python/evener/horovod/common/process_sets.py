"""Process sets: parts of the ranks that run collectives among themselves.

A set gets its number from `hvd.init(process_sets=...)` or `hvd.add_process_set()`, the same on all
ranks; before, and after it was removed, `process_set_id` is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evener.horovod.common import current
from evener.horovod.common.exceptions import NotBuiltError


class ProcessSet:
    """The processes of an operation.

    ranks: global ranks, in order. process_set_id: its number, None where the set is not in use.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """Raises ValueError for what is no list of ranks."""
        if not isinstance(ranks_or_comm, Iterable):
            raise NotBuiltError(
                "hvd.ProcessSet of an MPI communicator", "give a list of ranks: hvd.ProcessSet([0])"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks!r}): give a list of ranks, which are integers")
        self.ranks = sorted(ranks)

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """The number of its processes; None where it is not in use."""
        if self.process_set_id is None:
            return None
        return len(_engine().set_of(self.process_set_id).ranks)

    def rank(self) -> int | None:
        """This process's place in it; None where it is not in use, or this process not in it."""
        if self.process_set_id is None:
            return None
        place: int | None = _engine().set_of(self.process_set_id).place
        return place

    def included(self) -> bool | None:
        """Whether this process belongs to it; None where its ranks are not known yet."""
        if self is global_process_set:
            return True
        return None if self.ranks is None else _rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def _engine() -> Any:
    return current.state().engine


def _rank() -> int:
    return current.state().ranks.rank


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def checked(process_set: ProcessSet | Sequence[int], size: int) -> list[int]:
    """Its ranks. Raises ValueError for what cannot be a set in a job of `size`."""
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = given.ranks or []
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if not ranks or wrong or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"a process set of ranks {ranks} cannot be in a job of {size}: give different ranks, "
            f"0 to {size - 1}"
        )
    return ranks


def at_init(process_sets: Any, size: int) -> list[list[int]]:
    """The ranks of the sets that exist from the start, numbered from 1; sets each one's number."""
    global_process_set.ranks = list(range(size))
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise ValueError(f"init(process_sets={process_sets!r}): give a list of hvd.ProcessSet")
    made: list[list[int]] = [list(range(size))]
    for process_set in process_sets:
        ranks = checked(process_set, size)
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(ranks)
        if ranks in made:
            process_set._invalidate()  # another object stands for it
            continue
        process_set.process_set_id = len(made)
        made.append(ranks)
    return made[1:]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set. Collective over all ranks, with the same ranks in it.

    Raises ValueError where a set of these ranks exists, or they cannot be a set;
    HorovodInternalError where the ranks give different ones.
    """
    engine = _engine()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = checked(process_set, len(engine.sets[0].ranks))
    number = engine.add_set(ranks)
    if number < 0:
        raise ValueError(f"a process set of ranks {ranks} exists already: use that one")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; whether it was there. Collective over all ranks."""
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    engine = _engine()
    process_set._invalidate()
    return bool(engine.remove_set(number))


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """All process sets: number to ranks."""
    return {number: list(made.ranks) for number, made in _engine().sets.items()}
