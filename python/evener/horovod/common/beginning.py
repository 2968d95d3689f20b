"""What `init` does in every framework: values, arguments, meeting anew; and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from evener.base import settings
from evener.base.log import logger, once
from evener.comm.world import elastic
from evener.comm.world.ranks import Ranks
from evener.errors import EvenerError
from evener.horovod.common.exceptions import NotBuiltError, NotInitializedError
from evener.horovod.common.unread import unread

# Seconds for the launcher to say that a member has died.
_PATIENCE = 3.0

E = TypeVar("E")


class Begun(Generic[E]):
    """The place of this process and the engine, between `init` and `shutdown`."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._engine: E | None = None

    @property
    def ranks(self) -> Ranks:
        """Raises NotInitializedError before init."""
        if self._ranks is None:
            raise NotInitializedError
        return self._ranks

    @property
    def engine(self) -> E:
        """Raises NotInitializedError before init."""
        if self._engine is None:
            raise NotInitializedError
        return self._engine

    @property
    def initialized(self) -> bool:
        """Between `init` and `shutdown`."""
        return self._engine is not None


def until_met(enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Call `enter` until the ranks have met. `leave` ends what came only half of its way."""
    for setting in settings.registry().values():
        setting.get()  # a value that cannot be is refused here, not in the first step
    while True:
        try:
            enter()
            break
        except (RuntimeError, EvenerError) as error:
            # In an elastic job a member may die while the others connect: they meet anew.
            launcher_gone = isinstance(error, elastic.ElasticError)
            if launcher_gone or not elastic.await_broken(_PATIENCE):
                raise
            logger.info("meeting anew, %s: %s", elastic.broken(), error)
            leave()
    for line in unread(os.environ):  # now that log lines know their rank
        once(line)


def communicator(comm: Any) -> Any:
    """mpi4py's communicator, where `init(comm=...)` got one. ValueError for what is no list."""
    mpi = comm if hasattr(comm, "Get_rank") and hasattr(comm, "bcast") else None
    if comm is not None and mpi is None and not isinstance(comm, Iterable):
        raise ValueError(f"init(comm={comm!r}): give a list of ranks, or mpi4py's communicator")
    return mpi


def refuse_a_part(comm: Any, size: int) -> None:
    """NotBuiltError where a list of ranks is not all of them."""
    if comm is None or communicator(comm) is not None:
        return
    if list(comm) not in ([], list(range(size))):
        raise NotBuiltError("hvd.init(comm=...) with a part of the ranks")
