"""Faults that happen later: one thread that sleeps until the next one is due."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from evener.errors import EvenerError
from evener.tools.lab.faults import Action, Event

logger = logging.getLogger("evener.lab")


class Timeline:
    """A queue of faults by time; `stop` ends it, and what has not happened never will."""

    def __init__(
        self, fault: Callable[[str, str], None], do: Callable[[str, Action], None]
    ) -> None:
        """`fault` does an event's action, flaps too; `do` one that needs no timeline."""
        self._fault = fault
        self._do = do
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._flapping: dict[str, object] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="evener-lab-faults", daemon=True)
        self._thread.start()

    def add(self, events: list[Event]) -> None:
        """Let `events` happen, counted from now."""
        now = time.monotonic_ns()
        for event in events:
            self._at(now + event.at_ns, lambda event=event: self._happen(event))  # type: ignore[misc]

    def flap(self, target: str, period_ns: int) -> None:
        """Take `target` down now, up after `period_ns`, and so on until `settle`."""
        token = object()
        self._flapping[target] = token

        def toggle(kind: str) -> None:
            if self._flapping.get(target) is token:
                self._do(target, Action(kind))
                other = "up" if kind == "down" else "down"
                self._at(time.monotonic_ns() + period_ns, lambda: toggle(other))

        toggle("down")

    def settle(self, target: str) -> None:
        """No more flapping of `target`."""
        self._flapping.pop(target, None)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _at(self, when: int, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._queue, (when, next(self._order), action))
            self._changed.notify()

    def _happen(self, event: Event) -> None:
        self._fault(event.target, event.action)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                due = self._queue[0][0] if self._queue else None
                wait = None if due is None else (due - time.monotonic_ns()) / 1e9
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                action = heapq.heappop(self._queue)[2]
            try:
                action()
            except EvenerError as error:
                if not self._stopped:
                    logger.error("a fault on the timeline failed: %s", error)
