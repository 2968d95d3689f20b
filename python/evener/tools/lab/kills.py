"""Nodes that die and come back while a launch runs: one at random in each period."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from evener.base.units import parse_time, show_time
from evener.errors import UsageError

_SHORTEST = 3 * 10**9
logger = logging.getLogger("evener.lab")


def parse_period(text: str) -> int:
    """Nanoseconds, three seconds at least. Raises UsageError."""
    period = parse_time(text, "kill")
    if period < _SHORTEST:
        raise UsageError(f"kill={text} is below 3s", "a node needs a second to come back: 3s or up")
    return period


class Kills:
    """When a node dies and when it is back; `launch.run_slots` asks and does it.

    In each period of `period_ns` one node, drawn from `seed`, dies; a third of a period later it is
    back, so at most one is away. `kill` ends all processes of a node.
    """

    def __init__(self, period_ns: int, seed: int, kill: Callable[[str], None]) -> None:
        self.away: str | None = None
        self._period = period_ns / 1e9
        self._random = random.Random(seed)
        self._kill = kill
        self._began = time.monotonic()
        self._round = 1

    @property
    def due(self) -> float:
        """When something happens next, in seconds of the monotonic clock."""
        late = 1 / 3 if self.away is not None else 0
        return self._began + (self._round + late) * self._period

    def die(self, nodes: list[str]) -> str:
        """Kill one of `nodes`, by SIGKILL as `kill -9` does: its connections end at once."""
        self.away = self._random.choice(nodes)
        self._kill(self.away)
        back = show_time(int(self._period / 3 * 1e9) // 10**6 * 10**6)
        logger.info("%s: killed, and back in %s", self.away, back)
        return self.away

    def skip(self) -> None:
        """No node dies in this period."""
        self._round += 1

    def come_back(self) -> str:
        """The node that is back now."""
        assert self.away is not None
        node, self.away = self.away, None
        self._round += 1
        logger.info("%s: back", node)
        return node
