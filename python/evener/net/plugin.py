"""Where the plug-in is, and the variables that make NCCL load it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from evener.base import settings
from evener.base.given import given
from evener.errors import EvenerError
from evener.net.choice import Machine, why_not

NCCL_NAME = "Evener"
"""The plug-in's name for NCCL_NET."""
_FILE = "libnccl-net-evener.so"
# For the processes that rank 0 starts: they have its environment, and are not it.
_SAID = "_EVENER_NET_SAID"


class PluginError(EvenerError):
    """The plug-in is not there, or cannot be installed or removed."""


def plugin_path() -> Path:
    """The shared object of this installation. Raises PluginError where it was not built."""
    path = Path(__file__).parent.parent / "lib" / _FILE
    if not path.exists():
        raise PluginError(
            f"{path} does not exist: the NCCL plug-in was not built",
            "install a wheel of evener, or run `make setup` in a source tree",
        )
    return path


@given
def environment(
    env: Mapping[str, str] | None = None, machine: Machine | None = None
) -> dict[str, str]:
    """The variables that make NCCL use the plug-in, without those that `env` has already.

    `env`: the environment that the job will have (default: the process's); `machine`: what it will
    run on (default: this one). A user who chose a network (NCCL_NET, NCCL_NET_PLUGIN) keeps it: the
    answer is empty then, with EVENER_NET=off, and where `choice.why_not` has a reason.
    Raises PluginError where the plug-in was not built.
    """
    env = os.environ if env is None else env
    if _declined(env, machine):
        return {}
    told = {
        "NCCL_NET_PLUGIN": str(plugin_path()),
        # NCCL 2.28.3 to 2.29.7 forget the plug-in with the last communicator, and the next one
        # silently uses sockets (NVIDIA/nccl#1978).
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
    return {name: value for name, value in told.items() if name not in env}


def _declined(env: Mapping[str, str], machine: Machine | None = None) -> str:
    """Why NCCL's network is left alone, or nothing."""
    for name in ("NCCL_NET_PLUGIN", "NCCL_NET"):
        if env.get(name):
            return f"{name}={env[name]} is set"
    wish = _wish(env)
    if wish == "on":
        return ""
    if wish != "auto":
        return f"EVENER_NET={wish}"
    why = why_not(env, machine or Machine.here())
    return f"{why} (EVENER_NET=on would give it Evener's plug-in)" if why else ""


def _wish(env: Mapping[str, str]) -> str:
    setting = settings.EVENER_NET
    return env.get(setting.name, "").strip().lower() or str(setting.default)


@given
def adopt(env: MutableMapping[str, str], machine: Machine | None = None) -> str:
    """Put what `environment` says into `env`, and say in one line what was done and why."""
    try:
        told = environment(env, machine)
    except PluginError as error:
        return f"NCCL keeps its own network: {error.problem}"
    if not told:
        return f"NCCL's network is left as it is: {_declined(env, machine)}"
    env.update(told)
    return f"NCCL uses {told['NCCL_NET_PLUGIN']} (EVENER_NET={_wish(env)})"


def has_gpus() -> bool:
    """Whether this machine has an NVIDIA GPU, so that NCCL matters on it."""
    return Machine.here().gpus > 0


_imported: dict[str, str] = {}  # what `at_import` has set


def at_import() -> None:
    """What `import evener` does: `adopt` for this process and its children.

    Says so on rank 0 of a job, before NCCL is loaded, also where it was asked for and cannot be;
    without a job nothing is said.
    """
    before = dict(os.environ)
    asked = _wish(os.environ) not in ("auto", "off") and _SAID not in os.environ
    if _ours(os.environ) or (not asked and _declined(os.environ)):
        return
    line = adopt(os.environ)
    _imported.update({k: v for k, v in os.environ.items() if k not in before})
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    if (_imported or asked) and rank == "0":
        from evener.base.log import info0

        info0("%s", line)
        os.environ[_SAID] = "1"


def _ours(env: Mapping[str, str]) -> bool:
    """Whether a launcher has named the plug-in already."""
    return env.get("NCCL_NET") == NCCL_NAME or env.get("NCCL_NET_PLUGIN", "").endswith(_FILE)


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def as_given() -> dict[str, str]:
    """The process's environment without what `at_import` has set."""
    return {name: v for name, v in os.environ.items() if _imported.get(name) != v}


def withdraw() -> None:
    """Take back what `at_import` has set: for commands that decide for each job they start."""
    for name, value in _imported.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _imported.clear()
