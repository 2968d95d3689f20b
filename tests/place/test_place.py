"""Placement: neighbours under one switch, equal local ranks on one rail, never worse."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.tools.fabric import FabricMap, parse_map
from evener.tools.place import place
from evener.tools.place.command import place as command


def fabric(wirings: list[list[str]], gpus: list[list[int]] | None = None) -> FabricMap:
    """A host a row: the switch of each of its rails; `gpus[h]` the rail of each GPU."""
    leaves = sorted({leaf for row in wirings for leaf in row})
    hosts = ""
    for number, row in enumerate(wirings):
        near = gpus[number] if gpus else range(len(row))
        hosts += f"  h{number}:\n    gpus: [{', '.join(f'n{rail}' for rail in near)}]\n    nics:\n"
        for rail, leaf in enumerate(row):
            hosts += f"      n{rail}: {{speed: 100G, switch: {leaf}, rail: {rail}}}\n"
    links = "".join(f"  - {{between: [{leaf}, spine], speed: 400G, count: 2}}\n" for leaf in leaves)
    return parse_map(
        f"version: 1\nhosts:\n{hosts}switches: [{', '.join(leaves)}, spine]\nlinks:\n{links}"
    )


def test_hosts_of_one_leaf_become_neighbours() -> None:
    plan = place(fabric([["A", "A"], ["B", "B"], ["A", "A"], ["B", "B"]]), 8)
    assert [host for host, _ in plan.after.hosts] == ["h0", "h2", "h1", "h3"]
    assert plan.before.ring.crossing_share == 1
    assert plan.after.ring.crossing_share == 0.5
    assert plan.after.ring.links["A", "spine"].weight == pytest.approx(1)
    assert plan.before.ring.links["A", "spine"].weight == pytest.approx(2)


def test_a_leaf_that_holds_the_job_takes_it() -> None:
    plan = place(fabric([["A", "A"], ["B", "B"], ["A", "A"], ["B", "B"]]), 4)
    assert [host for host, _ in plan.after.hosts] == ["h0", "h2"]
    assert plan.after.ring.crossing_share == plan.after.groups.crossing_share == 0
    assert all(use.weight == 0 for use in plan.after.ring.links.values())


def test_equal_local_ranks_share_a_rail() -> None:
    # Rail 0 on leaf A, rail 1 on B; the second host's GPUs are near the cards in reverse.
    plan = place(fabric([["A", "B"], ["A", "B"]], gpus=[[0, 0, 1, 1], [1, 1, 0, 0]]), 8)
    assert plan.before.groups.crossing_share == 1
    assert plan.after.groups.crossing_share == 0
    by_local: dict[int, set[int]] = {}
    for rank in plan.after.ranks:
        by_local.setdefault(rank.local_rank, set()).add(rank.rail)
    assert all(len(rails) == 1 for rails in by_local.values())
    assert plan.visible_devices() == {"h0": "0,1,2,3", "h1": "2,3,0,1"}


def test_what_cannot_be_helped_is_left_as_it_is() -> None:
    plan = place(fabric([["A", "A"], ["B", "B"]]), 4)
    assert plan.after == plan.before
    assert plan.hostfile() == "h0 slots=2\nh1 slots=2\n"


@pytest.mark.parametrize("ranks", [0, 5])
def test_more_ranks_than_gpus_are_refused(ranks: int) -> None:
    with pytest.raises(UsageError) as refused:
        place(fabric([["A", "A"], ["B", "B"]]), ranks)
    assert "4 GPUs on 2 hosts" in refused.value.problem


@given(
    st.lists(st.lists(st.sampled_from("ABC"), min_size=2, max_size=2), min_size=1, max_size=7),
    st.integers(1, 14),
)
def test_never_worse_than_the_maps_order(wirings: list[list[str]], ranks: int) -> None:
    ranks = min(ranks, 2 * len(wirings))
    plan = place(fabric(wirings), ranks)
    assert plan.after.cost <= plan.before.cost
    assert [rank.rank for rank in plan.after.ranks] == list(range(ranks))
    assert len({(rank.host, rank.gpu) for rank in plan.after.ranks}) == ranks


MAP = Path(__file__).parents[2] / "examples" / "asterfusion" / "map.yaml"


def test_the_command(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    shown = CliRunner().invoke(
        command, ["--map", str(MAP), "-np", "16", "--hostfile", str(hostfile)]
    )
    assert shown.exit_code == 0, shown.output
    assert hostfile.read_text() == "bm-2204kzq slots=8\nbm-2204qhn slots=8\n"
    assert "100% /  100%" in shown.output
    assert "Placement cannot help this cabling" in shown.output
    shown = CliRunner().invoke(command, ["--map", str(MAP), "-np", "16", "--json"])
    document = json.loads(shown.output)
    assert document["ranks"][9] == {
        "rank": 9,
        "host": "bm-2204qhn",
        "local_rank": 1,
        "gpu": 1,
        "card": "nic0",
        "rail": 0,
        "switch": "leaf1",
    }
