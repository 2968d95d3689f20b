"""`horovod.runner`: `run` for functions (function.py), `horovodrun` for commands (launch.py)."""

from __future__ import annotations

from typing import Any

from evener.horovod.runner.function import run


class _HorovodArgs:
    """What `horovod.runner.launch._run` is asked for: an attribute for each option, None if unset.

    By upstream's name: launchers of others fill one in.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


__all__ = ["_HorovodArgs", "common", "elastic", "run"]
