"""Which nodes a Ray cluster has now, and how many workers each has room for."""

from __future__ import annotations

import ray

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
