"""A twin in a process of its own, so that a program that hangs or crashes ends it and is named.

The process leads a group, which is ended as a whole: worker processes of a twin never stay behind.
What they print goes to a file, of which the last lines are shown where the process died.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.twins import harness
from tests.twins.harness import Program, Result, Twin

# Until a twin's module is imported, on a busy machine.
_IMPORT = 300.0
# For a twin to close what it has open, before its group is killed.
_LAST = 20.0


class Alone:
    """One twin's process. After a program that hung or crashed the next search starts a new one."""

    def __init__(self, name: str, make: Callable[[], Twin] | None = None) -> None:
        self.name, self._make = name, make or partial(harness.twin, name)
        self._process: Any = None
        self._pipe: Any = None
        self._printed: Any = None
        self._limit = _IMPORT
        self.programs_per_round = 0
        self.faults: list[str] = []
        self.skipped = ""

    def start(self) -> None:
        """Start it, and learn what the twin says of itself; raises RuntimeError where it cannot."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._printed = tempfile.NamedTemporaryFile(prefix="evener-twin-")  # noqa: SIM115
        args = (there, self._make, self._printed.name)
        self._process = context.Process(target=_serve, args=args)
        self._process.start()
        there.close()
        try:
            told = self._next(_IMPORT)
            self.programs_per_round, self._limit, self.faults, self.skipped = told
        except (TimeoutError, EOFError, ConnectionError) as error:
            printed = self._last_lines()
            self.close(0.0)
            raise RuntimeError(f"tests.twins.{self.name} does not start: {printed}") from error

    def search(
        self,
        seed: int,
        count: int,
        fault: str = "",
        ran: Callable[[int], None] = lambda _: None,
    ) -> Result:
        """As harness.search; `ran` is told how many programs have begun, again and again."""
        self.start()
        began, programs, program = time.monotonic(), 0, None
        try:
            self._pipe.send((seed, count, fault))
            while True:
                until = time.monotonic() + self._limit
                while not self._pipe.poll(min(1.0, max(0.0, until - time.monotonic()))):
                    ran(programs)
                    if time.monotonic() >= until:
                        raise TimeoutError(f"not finished after {self._limit:.0f} s")
                kind, value = self._pipe.recv()
                if kind == "result":
                    result: Result = value
                    return result
                programs, program = programs + 1, value
                ran(programs)
        except (TimeoutError, EOFError, ConnectionError) as error:
            said = str(error) if isinstance(error, TimeoutError) else "the process died"
            said = f"{said}; {self._last_lines()}".removesuffix("; ")
            self.close(0.0)
            found = Result(self.name, seed, programs, time.monotonic() - began, program, said)
            # No difference, as far as anyone can see.
            return replace(found, broken=said) if fault else found
        except BaseException:  # interrupted: nothing that it runs is waited for
            self.close(0.0)
            raise

    def close(self, last: float = _LAST) -> None:
        """End it and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        process.join(last)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            process.join(2.0)
        process.kill()
        process.join()
        self._printed.close()

    def _last_lines(self) -> str:
        return str(self._printed.read().decode(errors="replace")[-1000:].strip())

    def _next(self, limit: float) -> Any:
        if not self._pipe.poll(limit):
            raise TimeoutError
        return self._pipe.recv()


def _serve(pipe: Connection, make: Callable[[], Twin], printed: str) -> None:
    os.setsid()
    with Path(printed).open("ab", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    # As after an end of the pipe: what a twin has open is closed at exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tested = make()
    pipe.send((tested.programs_per_round, tested.limit, list(tested.faults), tested.skipped))

    def begins(program: Program) -> None:
        try:
            pipe.send(("program", program))
        except OSError:  # the search was stopped
            sys.exit(1)

    while True:
        try:
            seed, count, fault = pipe.recv()
        except (EOFError, ConnectionError):
            return
        if fault:
            result = harness.find(tested, fault, seed, count, begins)
        else:
            result = harness.search(tested, seed, count, begins)
        pipe.send(("result", result))
