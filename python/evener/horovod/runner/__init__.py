"""`horovod.runner`: `run` for functions (function.py), `horovodrun` for commands (launch.py)."""

from __future__ import annotations

from evener.horovod.runner.function import run

__all__ = ["run"]
