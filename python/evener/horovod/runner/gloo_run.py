"""Upstream's launcher of its own; jobs are started by `evener launch --horovod`."""

from __future__ import annotations

from typing import Any

from evener.horovod.common.exceptions import NotServedError
from evener.horovod.runner.util import network

_FIX = "use evener launch --horovod, or horovod.run"


def gloo_run(*_: Any, **__: Any) -> None:
    """Raises NotServedError."""
    raise NotServedError("horovod.runner.gloo_run.gloo_run is not served", _FIX)


def gloo_run_elastic(*_: Any, **__: Any) -> None:
    """Raises NotServedError."""
    raise NotServedError("horovod.runner.gloo_run.gloo_run_elastic is not served", _FIX)


def launch_gloo(*_: Any, **__: Any) -> None:
    """Raises NotServedError."""
    raise NotServedError("horovod.runner.gloo_run.launch_gloo is not served", _FIX)


def launch_gloo_elastic(*_: Any, **__: Any) -> None:
    """Raises NotServedError."""
    raise NotServedError("horovod.runner.gloo_run.launch_gloo_elastic is not served", _FIX)


__all__ = ["gloo_run", "gloo_run_elastic", "launch_gloo", "launch_gloo_elastic", "network"]
