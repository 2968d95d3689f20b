"""Which nodes a Ray cluster has now, and how many workers each has room for."""

from __future__ import annotations

import random
import time

import ray

from evener.base.log import logger
from evener.horovod.runner.elastic.discovery import HostDiscovery


class NodeDiscovery(HostDiscovery):
    """Slots by the address of each living node, from what a worker needs."""

    def __init__(self, use_gpu: bool, cpus: float, gpus: float) -> None:
        self._needs = {"CPU": cpus, **({"GPU": gpus} if use_gpu else {})}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = {}
        for node in ray.nodes():
            # Ray calls it Alive; programs that stand in for it say alive.
            if not node.get("Alive", node.get("alive")):
                continue
            there = node["Resources"]
            found[node["NodeManagerAddress"]] = min(
                int(there.get(name, 0) // amount) for name, amount in self._needs.items() if amount
            )
        return found


class ChangingHosts(NodeDiscovery):
    """Hides a node or shows it again every `change_frequency_s`: for trying an elastic job.

    At least `min_hosts` nodes are shown, where there are as many, and `max_hosts` at most after
    some changes. Upstream calls it TestDiscovery.
    """

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus: float = 1,
        gpus: float = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus, gpus)
        if not _graceful:
            raise ValueError("_graceful=False would end nodes: end one with `ray stop` there")
        self._bounds, self._every, self._verbose = (
            (min_hosts, max_hosts),
            change_frequency_s,
            verbose,
        )
        self._hidden: set[str] = set()
        self._changed = time.monotonic()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = super().find_available_hosts_and_slots()
        self._hidden &= found.keys()
        if time.monotonic() - self._changed >= self._every:
            self._changed = time.monotonic()
            self._change(sorted(found.keys() - self._hidden))
        return {host: slots for host, slots in found.items() if host not in self._hidden}

    def _change(self, shown: list[str]) -> None:
        least, most = self._bounds
        hides = len(shown) >= most or (len(shown) > least and random.random() < 0.5)
        if hides and len(shown) > least:
            self._hidden.add(random.choice(shown))
        elif self._hidden:
            self._hidden.remove(random.choice(sorted(self._hidden)))
        if self._verbose:
            logger.warning("hidden hosts: %s", ", ".join(sorted(self._hidden)) or "none")
