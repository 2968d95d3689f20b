"""`evener launch --map`: hosts, order, cards and GPUs from the map, shown by --dry-run."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.errors import UsageError
from evener.tools.launch import placed
from evener.tools.launch.command import launch
from evener.tools.launch.plan import Wishes, mpirun, torchrun


def fabric(tmp_path: Path, wirings: list[str], cards: str = "mlx5_", gpus: str = "01") -> Path:
    """A host a row: the leaf of each of its two cards; `gpus`: the card of each GPU."""
    near = ", ".join(f"{cards}{number}" for number in gpus)
    text = "version: 1\nhosts:\n"
    for number, row in enumerate(wirings):
        text += f"  host{number}:\n    gpus: [{near}]\n    nics:\n"
        for rail, leaf in enumerate(row):
            text += f"      {cards}{rail}: {{speed: 100G, switch: {leaf}, rail: {rail}}}\n"
    leaves = sorted(set("".join(wirings)))
    text += f"switches: [{', '.join(leaves)}, spine]\nlinks:\n"
    text += "".join(f"  - {{between: [{leaf}, spine], speed: 100G}}\n" for leaf in leaves)
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def planned(path: Path, ranks: int | None, given: dict[str, str] | None = None) -> tuple:
    placement = placed.by_map(path, ranks)
    env, notes = placed.environments(placement, given or {})
    return placed.hosts(placement), env, notes


def test_hosts_of_one_leaf_follow_one_another(tmp_path: Path) -> None:
    hosts, env, notes = planned(fabric(tmp_path, ["AA", "BB", "AA", "BB"]), None)
    assert [host.name for host in hosts] == ["host0", "host2", "host1", "host3"]
    assert {host.slots for host in hosts} == {2}
    assert env["host2"] == {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}
    assert not notes


def test_only_cards_near_the_jobs_gpus_are_named(tmp_path: Path) -> None:
    hosts, env, _ = planned(fabric(tmp_path, ["AA", "AA"], cards="eth"), 3)
    assert [host.slots for host in hosts] == [2, 1]
    assert env == {
        "host0": {"NCCL_SOCKET_IFNAME": "=eth0,eth1"},
        "host1": {"NCCL_SOCKET_IFNAME": "=eth0"},
    }


def test_gpus_are_ordered_by_rail(tmp_path: Path) -> None:
    path = fabric(tmp_path, ["AB", "AB"], gpus="10")
    # The second host's GPUs are near the cards as the first's: nothing to order.
    assert all("CUDA_VISIBLE_DEVICES" not in one for one in planned(path, 4)[1].values())
    text = path.read_text().replace("gpus: [mlx5_1, mlx5_0]", "gpus: [mlx5_0, mlx5_1]", 1)
    path.write_text(text)
    _, env, _ = planned(path, 4)
    assert env["host1"]["CUDA_VISIBLE_DEVICES"] == "1,0"
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=0 is set"):
        planned(path, 4, {"CUDA_VISIBLE_DEVICES": "0"})


def test_what_the_user_set_is_kept_and_said(tmp_path: Path) -> None:
    _, env, notes = planned(fabric(tmp_path, ["AA", "AA"]), 4, {"NCCL_IB_HCA": "=mlx5_7"})
    assert env == {"host0": {}, "host1": {}}
    assert notes == ["NCCL_IB_HCA==mlx5_7 is kept as you set it"]


def test_engines_set_it_for_each_host(tmp_path: Path) -> None:
    hosts, env, _ = planned(fabric(tmp_path, ["AA", "AA"], cards="eth"), 3)
    wishes = Wishes(command=("python", "t.py"), host_env=env)
    plan = torchrun(hosts, wishes, {}, set(), "")
    assert [c.env["NCCL_SOCKET_IFNAME"] for c in plan.commands] == ["=eth0,eth1", "=eth0"]
    with pytest.raises(UsageError, match="use --torchrun"):
        mpirun(hosts, 3, wishes, {}, set(), 4, False, "")
    hosts, env, _ = planned(fabric(tmp_path, ["AA", "AA"], cards="eth"), 4)
    wishes = Wishes(command=("python", "t.py"), host_env=env)
    plan = mpirun(hosts, 4, wishes, {}, set(), 4, False, "")
    assert "NCCL_SOCKET_IFNAME==eth0,eth1" in plan.commands[0].argv


def test_cards_of_both_kinds_are_refused(tmp_path: Path) -> None:
    path = fabric(tmp_path, ["AA", "AA"])
    path.write_text(path.read_text().replace("mlx5_1", "eth1"))
    with pytest.raises(UsageError, match="RDMA devices and interfaces"):
        planned(path, 4)


def test_dry_run_shows_places_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    path = fabric(tmp_path, ["AA", "BB", "AA", "BB"])
    shown = CliRunner().invoke(launch, ["--map", str(path), "--torchrun", "--dry-run", "true"])
    assert shown.exit_code == 0, shown.output
    assert "# rank 2: host2, local rank 0, GPU 0, nearest card mlx5_0 (rail 0, A)" in shown.output
    assert "100% in the map's order, 50% as placed" in shown.output
    assert "NCCL_IB_HCA==mlx5_0,mlx5_1" in shown.output


def test_a_map_and_hosts_are_refused(tmp_path: Path) -> None:
    path = fabric(tmp_path, ["AA", "AA"])
    for other in (["-H", "a:1"], ["--hostfile", str(path)], ["--network-interface", "eth0"]):
        with pytest.raises(UsageError, match="--map and"):
            CliRunner().invoke(launch, ["--map", str(path), *other, "true"], catch_exceptions=False)
