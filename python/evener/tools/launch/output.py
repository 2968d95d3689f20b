"""What ranks print: lines with a tag on the terminal, and files by rank.

A rank that prints into a full pipe waits, and with it the whole job. So whatever happens to a line
here (a full disk, a terminal that is gone or does not know UTF-8, bytes that are not text), the
next one is read: `follow` goes on until the stream ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO

# A rank may write for ever without ending a line; longer ones are parted.
_LONGEST_LINE = 1 << 20


def stamp() -> str:
    """The time, to stand before a line."""
    return datetime.now().astimezone().strftime("[%Y-%m-%d %H:%M:%S] ")


def follow(stream: IO[str], take: Callable[[str], None]) -> None:
    """Give every line of `stream` to `take` until the end. What `take` raises is said once."""
    said = False
    while True:
        try:
            line = stream.readline(_LONGEST_LINE)
        except (OSError, ValueError):  # closed under us
            return
        if not line:
            return
        try:
            take(line)
        except Exception as error:  # noqa: BLE001 - the ranks must not wait for a reader that died
            if not said:
                emit(sys.stderr, f"evener launch: a line was lost: {type(error).__name__}: {error}")
            said = True


def emit(stream: IO[str], line: str) -> None:
    """Write a line to the terminal (or where it was sent) if that is possible."""
    # A reader that closed the pipe (`| head`), or a full disk, does not end the training.
    with contextlib.suppress(OSError, ValueError):
        try:
            stream.write(f"{line}\n")
        except UnicodeEncodeError:
            known = getattr(stream, "encoding", None) or "ascii"
            stream.write(line.encode(known, "backslashreplace").decode(known) + "\n")
        stream.flush()


class Files:
    """rank.N/stdout and rank.N/stderr in a folder. Not for several threads at once."""

    def __init__(self, folder: Path | None, ranks: int) -> None:
        """folder: None keeps nothing. ranks: how many there may be, for the names' digits."""
        self.folder = folder
        self._digits = len(str(max(ranks - 1, 1)))
        self._files: dict[tuple[int, str], IO[bytes]] = {}
        self._lost: dict[tuple[int, str], int] = {}
        self._said = False
        self._closed = False

    def write(self, rank: int, name: str, text: str) -> None:
        """A line. Where it cannot be written, that is said once and the next line tries again."""
        if self.folder is None or self._closed:
            return
        key = rank, name
        lost = self._lost.get(key, 0)
        data = f"[evener launch: {lost} lines could not be written here]\n" if lost else ""
        path = self.folder / f"rank.{rank:0{self._digits}}" / name
        try:
            if key not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                # No buffer: what is in one when the disk is full would be tried for ever.
                self._files[key] = path.open("ab" if lost else "wb", buffering=0)
            self._put(self._files[key], f"{data}{text}\n".encode(errors="replace"))
            self._lost.pop(key, None)
        except OSError as error:
            self._lost[key] = lost + 1
            if file := self._files.pop(key, None):
                with contextlib.suppress(OSError):
                    file.close()
            if not self._said:
                self._said = True
                emit(
                    sys.stderr,
                    f"evener launch: {path} cannot be written ({os.strerror(error.errno or 0)}); "
                    "the job goes on, and lines are missing in the files",
                )

    @staticmethod
    def _put(file: IO[bytes], data: bytes) -> None:
        while data:
            data = data[file.write(data) or 0 :]

    def close(self) -> None:
        """Lines that come later are dropped."""
        self._closed = True
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


class Output:
    """Where the lines of an elastic job's workers go.

    Before a worker has a rank its lines are tagged with its host and slot; for the files they wait.
    """

    def __init__(
        self, tag: bool = True, folder: Path | None = None, ranks: int = 1, timestamps: bool = False
    ) -> None:
        """folder: also write rank.N/stdout and rank.N/stderr there. ranks: how many may come."""
        self._tag, self._files = tag, Files(folder, ranks)
        self._timestamps = timestamps
        self._ranks: dict[int, tuple[int, str]] = {}
        self._waiting: dict[int, list[tuple[str, str]]] = {}
        self._lock = threading.Lock()

    def rename(self, worker: int, rank: int, host: str) -> None:
        """From now on `worker` is `rank`."""
        with self._lock:
            self._ranks[worker] = (rank, host)
            for name, text in self._waiting.pop(worker, []):
                self._files.write(rank, name, text)

    def write(self, worker: int, name: str, text: str, where: str) -> None:
        """A line of `worker` on its `name` (stdout or stderr). where: what it is called so far."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        with self._lock:
            if worker in self._ranks:
                rank, host = self._ranks[worker]
                tag = f"[{rank}@{host}] "
                self._files.write(rank, name, text)
            else:
                tag = f"[{where}] "
                if self._files.folder is not None:
                    self._waiting.setdefault(worker, []).append((name, text))
            time = stamp() if self._timestamps else ""
            emit(stream, f"{time}{tag if self._tag else ''}{text}")

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._files.close()
