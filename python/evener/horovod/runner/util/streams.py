"""A pipe between threads: a file-like object that one writes and another reads."""

from __future__ import annotations

import threading
from typing import Any


class Pipe:
    """A pipe of str or bytes. It holds one write at a time: the next waits until it is read."""

    def __init__(self) -> None:
        self._held: Any = None
        self._closed = False
        self._change = threading.Condition()

    def write(self, buf: Any) -> int:
        """Wait until there is room. Raises RuntimeError where the pipe is closed."""
        with self._change:
            self._change.wait_for(lambda: self._held is None or self._closed)
            if self._closed and self._held is None:
                raise RuntimeError("the pipe is closed")
            if self._closed:
                raise RuntimeError("the pipe was closed before all was read")
            self._held = buf
            self._change.notify_all()
            return len(buf)

    def read(self, length: int = -1) -> Any:
        """What was written, `length` of it at most; None where the pipe is closed and empty."""
        with self._change:
            self._change.wait_for(lambda: self._held is not None or self._closed)
            if self._held is None:
                return None
            found, rest = self._held, self._held[:0]
            if 0 < length < len(found):
                found, rest = found[:length], found[length:]
            self._held = rest if len(rest) else None
            self._change.notify_all()
            return found

    def flush(self) -> None:
        """Nothing: what is written can be read at once."""

    def close(self) -> None:
        """No more is written; what is there can still be read."""
        with self._change:
            self._closed = True
            self._change.notify_all()
