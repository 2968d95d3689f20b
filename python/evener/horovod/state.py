"""What lives between `hvd.init()` and `hvd.shutdown()`: the place of this process, the engine."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from evener.base import settings
from evener.comm.world import abort, rendezvous
from evener.comm.world.ranks import Ranks
from evener.comm.world.world import World
from evener.horovod.common import beginning, current
from evener.horovod.common import process_sets as process_sets_module
from evener.horovod.common.exceptions import NotBuiltError
from evener.horovod.engine import Engine, serve_others


def _tell(ranks: Ranks) -> None:
    """Put this process's place where programs look for it, whatever launcher started it."""
    if ranks.source == "a single process":
        return
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    places = {f"HOROVOD_{name.upper()}": getattr(ranks, name) for name in names}
    os.environ.update({name: str(value) for name, value in places.items() if value is not None})


class State(beginning.Begun[Engine]):
    """One for the process: `STATE`."""

    def __init__(self) -> None:
        super().__init__()
        self._world: World | None = None
        # Called at shutdown, while the groups still exist: reducers of optimizers.
        self._closers: weakref.WeakKeyDictionary[Any, Callable[[], None]]
        self._closers = weakref.WeakKeyDictionary()
        self._at_exit = False

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Collective. Does nothing where it is done already."""
        if self._engine is not None:
            return
        current.begin(self)
        beginning.until_met(lambda: self._enter(comm, process_sets), self.leave)
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self._on_exit)

    def _enter(self, comm: Any, process_sets: Any) -> None:
        # Not torch.distributed's default group: that one is the program's (`comm.world`).
        ranks, self._world = rendezvous.make_world(mpi=beginning.communicator(comm))
        try:
            beginning.refuse_a_part(comm, ranks.size)
        except NotBuiltError:
            self.leave()
            raise
        sets = process_sets_module.at_init(process_sets, ranks.size)
        self._engine = Engine(ranks, self._world, settings.EVENER_TIMEOUT.get(), sets)
        self._ranks = ranks
        _tell(ranks)

    def shutdown(self) -> None:
        """End the engine and the groups. Does nothing where nothing runs."""
        if self._engine is None:
            return
        engine, self._engine, self._ranks = self._engine, None, None
        for close in list(self._closers.values()):
            close()
        self._closers.clear()
        engine.close()
        del engine
        self.leave()

    def leave(self) -> None:
        """End the groups, also where `init` came only half of its way."""
        world, self._world = self._world, None
        if world is not None:
            rendezvous.end_world(world)

    def end_collectives(self) -> None:
        """End what is under way, and wait for the GPU to be at rest. abort.AbortError where it is
        not: a thread is stuck inside the driver."""
        abort.end_collectives()
        abort.wait_for_gpu()

    def at_shutdown(self, owner: Any, close: Callable[[], None]) -> None:
        """Call `close` at shutdown, if `owner` still lives then."""
        self._closers[owner] = close

    def _on_exit(self) -> None:
        # After an error the peers may be stuck in a collective with us: ending tells them, waiting
        # for the groups to close would not.
        if getattr(sys, "last_value", None) is None:
            self.shutdown()
            serve_others()


STATE = State()
