"""Where on the cluster the workers of a fixed job go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from evener.horovod.ray.worker import BaseHorovodWorker


def create_placement_group(
    resources_per_bundle: dict[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[Any, list[dict[str, float]]]:
    """(a placement group of this many bundles, the bundles).

    Raises TimeoutError where the cluster has no room for it within `pg_timeout` seconds.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = ray.util.placement_group(bundles, strategy=pg_strategy)
    if not ray.wait([group.ready()], timeout=pg_timeout)[0]:
        ray.util.remove_placement_group(group)
        raise TimeoutError(
            f"no room for {num_bundles} bundles of {resources_per_bundle} within {pg_timeout:g} s; "
            f"free are {ray.available_resources()}"
        )
    return group, bundles


@dataclass
class Strategy:
    """Places workers: `hosts` nodes with `per_host` each, or `workers` of them anywhere.

    current: use the placement group in which this process runs, if there is one.
    """

    workers: int | None
    hosts: int | None
    per_host: int
    cpus: float
    gpus: float
    timeout: float
    current: bool
    placement_group: Any = None
    _created_placement_group: bool = False

    def create_workers(self) -> list[Any]:
        """The actors, those of one node one after the other. Raises TimeoutError without room."""
        each = 1 if self.hosts is None else self.per_host
        bundles = self.hosts if self.hosts is not None else self.workers
        if not bundles or each < 1:
            raise ValueError("give num_workers, or num_hosts with num_workers_per_host")
        here = ray.util.get_current_placement_group()
        if self.current and here is not None and self.hosts is None:
            self.placement_group = here
        else:
            wanted = {"CPU": self.cpus * each, "GPU": self.gpus * each}
            wanted = {name: amount for name, amount in wanted.items() if amount}
            spread = "PACK" if self.hosts is None else "STRICT_SPREAD"
            self.placement_group, _ = create_placement_group(wanted, bundles, self.timeout, spread)
            self._created_placement_group = True
        actor: Any = ray.remote(BaseHorovodWorker)
        made = [
            actor.options(
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.placement_group,
                    # In a group of others' any bundle with room will do.
                    index // each if self._created_placement_group else -1,
                ),
            ).remote(world_rank=index, world_size=bundles * each)
            for index in range(bundles * each)
        ]
        nodes = ray.get([worker.node_id.remote() for worker in made])
        order = list(dict.fromkeys(nodes))
        places = sorted(range(len(made)), key=lambda index: order.index(nodes[index]))
        return [made[index] for index in places]

    def shutdown(self) -> None:
        """Give the placement group back, if it was made here."""
        if self._created_placement_group:
            ray.util.remove_placement_group(self.placement_group)
            self._created_placement_group = False
