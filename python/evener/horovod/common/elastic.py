"""Elastic state and the loop around a training function: what is common to all frameworks.

A training function is called again whenever the set of ranks has changed, and goes on from its
state. What the state is after a change:

    a rank failed           back to the last commit, then rank 0's on every rank
    hosts were added        as it is, then rank 0's on every rank
    hosts were removed      as it is: all who stay have it

`commit` and `check_host_updates` are collective: all ranks raise at the same one. Where the notices
come from is `evener.comm.world.elastic`'s business; outside an elastic job there are none, and an
operation that failed is repeated in the same world.
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import sys
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any

from evener.base.log import info0, logger
from evener.comm.world import elastic
from evener.errors import EvenerError
from evener.horovod.common import current
from evener.horovod.common.exceptions import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NotInitializedError,
)

# Seconds for the launcher to say that the world is broken, before an error counts as the script's.
_PATIENCE = 3.0


class HostUpdateResult(IntFlag):
    """What happened to the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What training has to keep. A subclass says how it is saved, restored and synchronised."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None
    ) -> None:
        """bcast_object: gives rank 0's object on every rank. get_rank: accepted, not needed."""
        del get_rank
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Functions to call, without arguments, when ranks have come or gone."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when ranks have come or gone, before `sync`."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called from any thread: hosts were added or removed. timestamp: grows."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the state as it is now, for `restore`, once all ranks have come this far; and
        `check_host_updates`.
        """
        # What a rank keeps must be what all have computed: a peer that died in a collective leaves
        # garbage in the state. So first this rank's work, then the others' word, then the copy.
        self.settle()
        try:
            self.check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()
            raise
        self.save()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks, if rank 0 knows of new or removed hosts."""
        before, latest, changes = self._last_updated_timestamp, self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, changes = timestamp, changes | change
        # Rank 0 decides: notices reach the ranks at different moments.
        before, self._last_updated_timestamp, changes = self._bcast_object(
            (before, latest, int(changes))
        )
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def settle(self) -> None:
        """Wait for what was started on the state. HorovodInternalError where it failed."""

    def save(self) -> None:
        """Keep the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Back to what was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Put right what depends on the number of ranks. Called before `sync`."""


class ObjectState(State):
    """Attributes: one for each keyword argument, of any type that can be pickled."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def _kept(state: State) -> bool:
    """Save the state, so that a change costs no work where the last commit is long ago.

    False where that was too late, because a rank failed: the state is then the last commit's.
    """
    try:
        state.settle()
        state.save()
    except HorovodInternalError:
        _restore(state)
        return False
    return True


def _restore(state: State) -> None:
    """Back to the last commit, in a world that is broken.

    What is in flight is ended first: the restored values would else wait for it on the GPU, and
    this process with them.
    """
    try:
        current.state().end_collectives()
    except NotInitializedError:  # noqa: S110 - nothing has begun that could be in flight
        pass
    except EvenerError as error:  # abort.AbortError, which cannot be imported without torch
        # A thread is stuck inside the driver: an orderly end of the interpreter would wait for it.
        logger.error("%s", error)
        sys.stderr.flush()
        os._exit(1)
    state.restore()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func(state, ...)`, called again after each change of the ranks.

    reset: ends the old world and enters the new one.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        elastic.listen(state.on_hosts_updated)
        needs_sync = True
        try:
            while True:
                try:
                    if needs_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as interrupt:
                    kept = _kept(state)
                    needs_sync = not interrupt.skip_sync or not kept
                    logger.info("hosts have changed: entering the new world")
                except (RuntimeError, EvenerError) as error:
                    # NCCL's own error, or comm's in backward, means the same in a broken world.
                    # The launcher may know of it later than we do.
                    if not isinstance(error, HorovodInternalError) and not elastic.await_broken(
                        _PATIENCE
                    ):
                        raise
                    info0("back to the last commit: %s", elastic.broken() or error)
                    _restore(state)
                    needs_sync = True
                if not needs_sync:
                    elastic.keep_state()
                # What an exception's frames hold (groups, lanes) keeps connections open, by which
                # the peers learn that we have given up.
                gc.collect()
                reset()
                member = elastic.member()
                needs_sync = needs_sync or (member is not None and member.sync)
                state.on_reset()
        finally:
            elastic.unlisten(state.on_hosts_updated)

    return wrapper
