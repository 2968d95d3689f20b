"""Worlds of Horovod for TensorFlow that stay between programs, for twins that need ranks.

A rank is `python -m MODULE`, which calls `serve`: a question in JSON per line of its input, an
answer per line of its output. No torch is in it, and none may be.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from evener.base.ports import free_port


class World:
    """`size` processes. One that fails or hangs ends the world: a new one starts."""

    def __init__(self, size: int, module: str, timeout: float = 120) -> None:
        self.size, self.module, self.timeout = size, module, timeout
        self._ranks: list[subprocess.Popen[str]] = []
        self._log: Any = None
        atexit.register(self.stop)

    def run(self, question: Any) -> list[Any]:
        """Each rank's answer.

        Raises AssertionError with the first traceback of a rank, ChildProcessError where a rank
        died, TimeoutError.
        """
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(question) + "\n")
            rank.stdin.flush()
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(found) < self.size:
            waiting = {r.stdout: i for i, r in enumerate(self._ranks) if i not in found}
            ready, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                self.stop()
                raise TimeoutError(f"not finished after {self.timeout} s")
            for pipe in ready:
                line = pipe.readline()
                if not line:
                    died = self._died()
                    self.stop()
                    raise ChildProcessError(died)
                good, value = json.loads(line)
                if not good:
                    self.stop()
                    raise AssertionError(value)
                found[waiting[pipe]] = value
        return [found[rank] for rank in range(self.size)]

    def _died(self) -> str:
        self._log.seek(0)
        return f"a rank died: {self._log.read()[-3000:]}"

    def _start(self) -> None:
        port = free_port()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        for rank in range(self.size):
            environment = {
                **{name: value for name, value in os.environ.items() if name[:5] != "OMPI_"},
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "EVENER_TIMEOUT": "30",
                "OMP_NUM_THREADS": "1",
            }
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", self.module],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
            )

    def stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._ranks = []
        if self._log is not None:
            self._log.close()
            self._log = None


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer until the input ends. What the program prints goes to the errors' stream."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said = (True, answer(json.loads(line)))
        except BaseException:  # noqa: BLE001 - the parent raises it
            said = (False, traceback.format_exc())
        out.write(json.dumps(said) + "\n")
        out.flush()
