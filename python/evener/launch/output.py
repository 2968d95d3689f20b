"""The output of workers whose ranks change: lines with a tag on the terminal, files by rank."""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import IO


def stamp() -> str:
    """The time, to stand before a line."""
    return datetime.now().astimezone().strftime("[%Y-%m-%d %H:%M:%S] ")


class Output:
    """Where the lines of an elastic job's workers go.

    Before a worker has a rank its lines are tagged with its host and slot; for the files they wait.
    """

    def __init__(
        self, tag: bool = True, folder: Path | None = None, ranks: int = 1, timestamps: bool = False
    ) -> None:
        """folder: also write rank.N/stdout and rank.N/stderr there. ranks: how many may come."""
        self._tag, self._folder, self._digits = tag, folder, len(str(max(ranks - 1, 1)))
        self._timestamps = timestamps
        self._ranks: dict[int, tuple[int, str]] = {}
        self._waiting: dict[int, list[tuple[str, str]]] = {}
        self._files: dict[tuple[int, str], IO[str]] = {}
        self._lock = threading.Lock()

    def rename(self, worker: int, rank: int, host: str) -> None:
        """From now on `worker` is `rank`."""
        with self._lock:
            self._ranks[worker] = (rank, host)
            for name, text in self._waiting.pop(worker, []):
                self._keep(rank, name, text)

    def write(self, worker: int, name: str, text: str, where: str) -> None:
        """A line of `worker` on its `name` (stdout or stderr). where: what it is called so far."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        with self._lock:
            if worker in self._ranks:
                rank, host = self._ranks[worker]
                tag = f"[{rank}@{host}] "
                self._keep(rank, name, text)
            else:
                tag = f"[{where}] "
                if self._folder is not None:
                    self._waiting.setdefault(worker, []).append((name, text))
            with contextlib.suppress(BrokenPipeError):
                time = stamp() if self._timestamps else ""
                stream.write(f"{time}{tag if self._tag else ''}{text}\n")
                stream.flush()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files.values():
                file.close()

    def _keep(self, rank: int, name: str, text: str) -> None:
        if self._folder is None:
            return
        if (rank, name) not in self._files:
            path = self._folder / f"rank.{rank:0{self._digits}}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[rank, name] = path.open("w", encoding="utf-8")
        self._files[rank, name].write(f"{text}\n")
        self._files[rank, name].flush()
