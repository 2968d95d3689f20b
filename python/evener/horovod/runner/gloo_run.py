"""Upstream's launcher of its own, by its names: `evener launch --horovod` does the work."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from evener.horovod.common.exceptions import NotServedError
from evener.horovod.runner.common.util.env import is_exportable
from evener.horovod.runner.launch import start_job
from evener.horovod.runner.util import network

_FIX = "use evener launch --horovod, or horovod.run"


def gloo_run(
    settings: Any,
    nics: Collection[str] | None,
    env: Mapping[str, str],
    server_ip: str,
    command: Sequence[str],
) -> None:
    """Start settings.num_proc ranks of `command` on settings.hosts, and wait for them.

    env: the ranks' variables. server_ip: no server is needed. Raises RunError where they fail.
    """
    del server_ip
    arguments = ["--horovod", "-np", str(settings.num_proc), "-H", settings.hosts]
    if nics:
        arguments += ["--network-interface", ",".join(nics)]
    options = {
        "-p": settings.ssh_port,
        "-i": settings.ssh_identity_file,
        "--output-dir": settings.output_filename,
    }
    for option, value in options.items():
        arguments += [] if value is None else [option, str(value)]
    arguments += ["--timestamps"] * bool(settings.prefix_output_with_timestamp)
    arguments += ["-v"] * (settings.verbose > 1)
    for name in sorted(env):
        if is_exportable(name):
            arguments += ["-x", name]
    start_job([*arguments, *command], {**os.environ, **env})


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
