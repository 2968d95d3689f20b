"""Threads end before the interpreter does.

A thread that is still in torch's code when the interpreter ends is cut off in the middle of C++,
which ends the process with "terminate called without an active exception". So whoever starts a
thread is registered here until it is closed, and what is open when a program ends is closed then:
an optimizer step that was begun is finished, and a checkpoint that was begun is written.
"""

from __future__ import annotations

import atexit
import logging
from typing import Protocol

logger = logging.getLogger("evener.zero")


class Closes(Protocol):
    """Has threads."""

    def close(self) -> None:
        """Finish what was begun, and end the threads."""


_open: list[Closes] = []
_registered = False


def opened(one: Closes) -> None:
    """`one` has threads from now on."""
    global _registered
    if not _registered:
        # Called in the reverse order of registration: torch registered its own before.
        atexit.register(_close_all)
        _registered = True
    _open.append(one)


def closed(one: Closes) -> None:
    """It has none any more."""
    _open[:] = [each for each in _open if each is not one]


def _close_all() -> None:
    # The loader waits for the optimizer's lanes, which were opened before it.
    while _open:
        one = _open.pop()
        try:
            one.close()
        except Exception as error:  # noqa: BLE001  # the program ends; others must be closed, too
            logger.warning("at the end of the program: %s", error)
