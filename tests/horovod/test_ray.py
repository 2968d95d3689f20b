"""horovod.ray on a real Ray cluster of one host; and what is said where Ray is not installed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from evener.errors import UsageError
from evener.horovod.common.exceptions import NotServedError

# Ray starts several processes of its own, each of which imports torch.
pytestmark = pytest.mark.timeout(400)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("evener.horovod.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotServedError, match=r"horovod\.ray needs Ray(.|\n)*fix: pip install ray"):
        __import__("evener.horovod.ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    hosts = {f"node:host-{number}": 1.0 for number in range(3)}
    with pytest.MonkeyPatch.context() as patch:
        # Ray's own is 15: beside other tests its workers would get almost no time.
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, resources=hosts, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


def test_interfaces_are_those_that_the_settings_name() -> None:
    """As Ray Train's Horovod trainer asks for them."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from evener.horovod.ray.runner import MiniSettings
    from evener.horovod.ray.utils import detect_nics, nics_to_env_var

    named = detect_nics(MiniSettings(nics={"lo", "eth1"}), all_host_names=["a"], node_workers=[1])
    variables = nics_to_env_var(named)
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "eth1,lo"
    assert nics_to_env_var(detect_nics(MiniSettings(), ["a", "b"])) == {}


def test_hosts_that_come_and_go_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's TestDiscovery, which programs import."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from evener.horovod.ray.elastic import TestDiscovery

    nodes = [
        {"Alive": True, "Resources": {"CPU": 2}, "NodeManagerAddress": f"host-{number}"}
        for number in range(4)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    discovery = TestDiscovery(min_hosts=2, max_hosts=3, change_frequency_s=0, verbose=False)
    seen = [discovery.find_available_hosts_and_slots() for _ in range(200)]
    assert {len(hosts) for hosts in seen} == {2, 3}
    assert {host for hosts in seen for host in hosts} == {f"host-{number}" for number in range(4)}
    assert all(slots == 2 for hosts in seen for slots in hosts.values())
    with pytest.raises(ValueError, match="ray stop"):
        TestDiscovery(1, 2, 1, _graceful=False)


class Model:
    """Lives in a worker."""

    def __init__(self, start: int) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.total = hvd, start

    def add(self, factor: int) -> list[Any]:
        import torch
        from horovod.ray import ray_logger

        value = torch.tensor([factor * (self.hvd.rank() + 1)])
        self.total += int(self.hvd.allreduce(value, op=self.hvd.Sum).item())
        ray_logger.log({"rank": self.hvd.rank(), "total": self.total})
        return [self.total, self.hvd.local_rank(), os.environ["HOROVOD_RANK"], os.environ["MINE"]]


def test_objects_live_in_a_fixed_number_of_workers(cluster: Any) -> None:
    from evener.horovod.ray import RayExecutor

    with pytest.raises(ValueError, match="Both `num_workers` and `num_hosts`"):
        RayExecutor(RayExecutor.create_settings(), num_workers=1, num_hosts=1)
    wide = RayExecutor(
        RayExecutor.create_settings(placement_group_timeout_s=0.5), num_workers=1, cpus_per_worker=9
    )
    with pytest.raises(TimeoutError, match="no room for 1 bundles"):
        wide.start()
    wide.shutdown()

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    executor.start(Model, executable_args=[10], extra_env_vars={"MINE": "yes"})
    logged: list[dict[str, int]] = []
    assert executor.execute(lambda model: model.add(2), callbacks=[logged.append]) == [
        [16, 0, "0", "yes"],
        [16, 1, "1", "yes"],
    ]
    assert sorted(entry["rank"] for entry in logged) == [0, 1]
    assert executor.run(pow, args=[2, 5]) == [32, 32]
    assert cluster.get(executor.run_remote(pow, args=[3, 2])) == [9, 9]
    assert executor.execute_single(lambda model: model.total) == 16
    executor.shutdown()


def train() -> tuple[int, int]:
    import horovod.torch as hvd
    import torch
    from horovod.ray import ray_logger

    hvd.init()
    state = hvd.elastic.TorchState(torch.nn.Linear(2, 2), None, step=0)

    @hvd.elastic.run
    def steps(state: Any) -> tuple[int, int]:
        while state.step < 5 or hvd.size() < 2:
            state.step += int(hvd.allreduce(torch.ones(1), name="go").item())
            if state.step == 3 and hvd.size() == 1:
                ray_logger.log({"more": True})
            state.commit()
        time.sleep(0.5 * hvd.rank())
        return hvd.rank(), hvd.size()

    return steps(state)  # type: ignore[no-any-return]


def test_an_elastic_job_takes_in_a_host(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del cluster
    from evener.horovod.ray import RayExecutor
    from evener.horovod.ray.job import RayJob, RayJobError
    from evener.horovod.runner.elastic import driver
    from evener.horovod.runner.elastic.discovery import FixedHosts

    monkeypatch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.1)
    settings = RayExecutor.create_settings()
    settings.discovery = hosts = FixedHosts({"host-0": 1})
    executor = RayExecutor(settings, min_workers=1, max_workers=2, override_discovery=False)
    executor.start()

    def more(_: Any) -> None:
        hosts.set({"host-0": 1, "host-1": 1})

    end_all = RayJob._end_all

    def slowly(job: RayJob, workers: list[Any]) -> None:
        end_all(job, workers)
        time.sleep(2)  # rank 1 ends while rank 0 is put away: its result counts too

    monkeypatch.setattr(RayJob, "_end_all", slowly)
    assert executor.run(train, callbacks=[more]) == [(0, 2), (1, 2)]
    with pytest.raises(RayJobError, match=r"no worker is left(.|\n)*by zero"):
        executor.run(lambda: 1 // 0)
    with pytest.raises(UsageError, match="elastic"):
        executor.run_remote(train)
    executor.shutdown()


def test_slots_are_what_workers_need(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.horovod.ray.elastic import RayHostDiscovery

    def node(name: str, alive: bool, **resources: float) -> dict[str, Any]:
        return {"NodeManagerAddress": name, "Alive": alive, "Resources": resources}

    nodes = [node("a", True, CPU=8, GPU=4), node("b", True, CPU=8), node("c", False, CPU=8)]
    monkeypatch.setattr(cluster, "nodes", lambda: nodes)
    find = RayHostDiscovery(use_gpu=True, cpus_per_slot=1, gpus_per_slot=2)
    assert find.find_available_hosts_and_slots() == {"a": 2, "b": 0}
    find = RayHostDiscovery(cpus_per_slot=3)
    assert find.find_available_hosts_and_slots() == {"a": 2, "b": 2}
