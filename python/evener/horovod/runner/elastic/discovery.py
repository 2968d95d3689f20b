"""Who says which hosts there are."""

from __future__ import annotations

import subprocess
from typing import Any


class HostDiscovery:
    """Says which hosts there are now."""

    def find_available_hosts_and_slots(self) -> dict[str, Any]:
        """Slots by host."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A script that prints a line `HOST` or `HOST:SLOTS` for each; `slots` where it says none."""

    def __init__(self, discovery_script: str, slots: Any) -> None:
        self._discovery_script, self._default_slots = discovery_script, slots

    def find_available_hosts_and_slots(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in self._execute_discovery_script().split("\n"):
            host, colon, slots = line.strip().partition(":")
            if host:
                found[host] = int(slots) if colon else self._default_slots
        return found

    def _execute_discovery_script(self) -> str:
        done = subprocess.run(self._discovery_script, shell=True, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"{self._discovery_script} ended with status {done.returncode}: {done.stderr}"
            )
        return done.stdout


class FixedHosts(HostDiscovery):
    """Hosts that are given."""

    def __init__(self, host_slots: dict[str, Any]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> dict[str, Any]:
        return self._host_slots

    def set(self, host_slots: dict[str, Any]) -> None:
        """Others from now on."""
        self._host_slots = host_slots
