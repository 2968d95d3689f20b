"""What Evener prints about itself: one logger, levels from EVENER_LOG, one line a choice.

    from evener.base.log import logger, info0
    info0("2-D all-reduce off: nodes of %d and %d ranks", 2, 1)

A choice that every rank makes alike is said once: `info0` prints at `info` on rank 0 (or where no
rank is known yet) and at `debug` on the others. Where the application has set up Python's logging,
and shows them, the records go there; otherwise they go to stderr. Nothing is read or opened at
import: a front door calls `begin`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from evener.base import settings

_rank: int | None = None
_names_checked = False
_said: set[str] = set()


class _Level(logging.Filter):
    """EVENER_LOG, read when something is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        least: int = getattr(logging, settings.EVENER_LOG.get().upper())
        return record.levelno >= least


class _Stderr(logging.Handler):
    """Writes `evener 3: text` to stderr, unless the application handles logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if _make().propagate and any(_shows(h, record) for h in logging.getLogger().handlers):
            return
        who = "evener" if _rank is None else f"evener {_rank}"
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        try:
            _write(f"{who}: {level}{record.getMessage()}\n")
        except Exception:  # noqa: BLE001 - logging must not end a training job
            self.handleError(record)


def _write(line: str) -> None:
    """One write a line: lines of several processes then do not run into each other. A progress bar
    of tqdm's that stands on the last line is drawn again below it."""
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    try:
        # Without its lock: one that a dead process holds must not stop a rank.
        tqdm.write(line, file=sys.stderr, end="", nolock=True)
    except (AttributeError, RuntimeError):  # no tqdm here, or a thread makes a bar just now
        sys.stderr.write(line)
    sys.stderr.flush()


def _shows(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether this handler of the application's shows the record to a person."""
    hides = isinstance(handler, (logging.NullHandler, logging.FileHandler))
    return not hides and handler.level <= record.levelno


def _make() -> logging.Logger:
    made = logging.getLogger("evener")
    if not made.handlers:
        made.setLevel(logging.DEBUG)
        handler = _Stderr()
        # On the handler, not the logger: records of `evener.comm` and the like come here too.
        handler.addFilter(_Level())
        made.addHandler(handler)
    return made


logger = _make()


def begin(rank: int | None = None) -> None:
    """Speak from EVENER_LOG on, also to the application's handlers; as `rank`, where it is given.

    An application that has set the level of the logger "evener" keeps it.
    """
    if rank is not None:
        set_rank(rank)
    if logger.level == logging.DEBUG:
        logger.setLevel(settings.EVENER_LOG.get().upper())


def set_rank(rank: int | None) -> None:
    """The rank that stands in front of every line from now on.

    Rank 0 also warns, once, of variables with a name like Evener's own that have no effect.
    """
    global _rank, _names_checked
    _rank = rank
    if not rank and not _names_checked:
        _names_checked = True
        for line in settings.misspelt(os.environ):
            logger.warning("%s", line)


def info0(message: str, *values: object) -> None:
    """Log at `info` on rank 0, at `debug` on the others."""
    logger.log(logging.DEBUG if _rank else logging.INFO, message, *values)


def once(line: str) -> None:
    """`info0`, once in a process."""
    if line not in _said:
        _said.add(line)
        info0("%s", line)


def say_idle(why: str, *those: settings.Setting[Any]) -> None:
    """Say, once each, which of these variables the user has set, and that they have no effect."""
    for setting in those:
        if setting.is_set() and setting.get() != setting.default:
            once(f"{setting.name}={setting.show(setting.get())} has no effect: {why}")
