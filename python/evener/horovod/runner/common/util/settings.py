"""What a launcher of upstream's was asked for: plain attributes."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "num_proc": None,
    "verbose": 0,
    "ssh_port": None,
    "ssh_identity_file": None,
    "extra_mpi_args": None,
    "tcp_flag": None,
    "binding_args": None,
    "key": None,
    "start_timeout": None,
    "output_filename": None,
    "run_func_mode": None,
    "nics": None,
    "elastic": False,
    "prefix_output_with_timestamp": False,
}


class BaseSettings:
    """An attribute for each argument; upstream's names, and their defaults."""

    def __init__(self, **given: Any) -> None:
        """Raises TypeError for a name that upstream's do not have."""
        if unknown := sorted(set(given) - set(_BASE)):
            raise TypeError(f"no such setting: {', '.join(unknown)}")
        self.__dict__.update({**_BASE, **given})


class Settings(BaseSettings):
    """Settings of a job whose hosts stay: `hosts` is `gpu1:2,gpu2:2`."""

    def __init__(self, hosts: str | None = None, **given: Any) -> None:
        super().__init__(**given)
        self.hosts = hosts
