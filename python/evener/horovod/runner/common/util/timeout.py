"""A moment by which something must be done."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818 - upstream's name
    """It was not done by then."""


class Timeout:
    """`timeout` seconds from now. message: for the error; `{activity}` and `{timeout}` in it."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._end = time.time() + timeout

    def remaining(self) -> float:
        """Seconds that are left, 0 or more."""
        return max(0.0, self._end - time.time())

    def timed_out(self) -> bool:
        """Whether the moment has come."""
        return time.time() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the moment has come."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout))
