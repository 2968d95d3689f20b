"""Where the plug-in is, and the variables that make NCCL load it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from evener.errors import EvenerError

NCCL_NAME = "Evener"
"""The plug-in's name for NCCL_NET."""


class PluginError(EvenerError):
    """The plug-in is not there, or cannot be installed or removed."""


def plugin_path() -> Path:
    """The shared object of this installation. Raises PluginError where it was not built."""
    path = Path(__file__).parent.parent / "lib" / "libnccl-net-evener.so"
    if not path.exists():
        raise PluginError(
            f"{path} does not exist: the NCCL plug-in was not built",
            "install a wheel of evener, or run `make setup` in a source tree",
        )
    return path


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that make NCCL use the plug-in, without those that `env` has already.

    `env`: the environment that the job will have (default: the process's). A user who chose a
    network (NCCL_NET, NCCL_NET_PLUGIN) keeps it: the answer is empty then.
    """
    env = os.environ if env is None else env
    if env.get("NCCL_NET_PLUGIN") or env.get("NCCL_NET"):
        return {}
    return {
        "NCCL_NET_PLUGIN": str(plugin_path()),
        # NCCL 2.28.3 to 2.29.7 forget the plug-in with the last communicator, and the next one
        # silently uses sockets (NVIDIA/nccl#1978).
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
