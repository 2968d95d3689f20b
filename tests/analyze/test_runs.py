"""Logs of real NCCL runs (tests/analyze/runs/README.md): all of it is read, and it is true."""

import json
from pathlib import Path

import pytest

from evener.tools.analyze import collect, document, page, picture, run_checks
from evener.tools.analyze.picture import Picture

RUNS = Path(__file__).with_name("runs")
NAMES = ("sockets", "evener", "two-nics", "one-host")
BETWEEN = NAMES[:3]  # two nodes of two GPUs


def read(name: str) -> Picture:
    folder = RUNS / name
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".log", ".txt", ".xml")]
    files = [path for path in files if not path.name.startswith("analysis")]
    return picture(collect(files))


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_known_and_nothing_raises(name: str) -> None:
    result = read(name)
    findings = run_checks(result)
    json.dumps(document(result, findings), allow_nan=False)
    assert page(result, findings).rstrip().endswith("</html>")
    assert result.run.nccl_lines > 100
    samples = [text for text, _ in result.run.unknown_samples]
    assert result.run.unknown == 0, samples
    assert len(result.run.versions) == 1


@pytest.mark.parametrize("name", NAMES)
def test_ranks_rings_and_figures(name: str) -> None:
    result = read(name)
    world, bandwidth = result.world, result.bandwidth
    assert world is not None
    assert bandwidth is not None
    assert (world.size, len(world.members)) == (4, 4)
    assert world.rings
    assert all(ring.whole and sorted(ring.ranks) == [0, 1, 2, 3] for ring in world.rings.values())
    assert bandwidth.collective == "all_reduce"
    assert bandwidth.ranks == 4
    # The table has two decimals, its average is of what was rounded.
    assert bandwidth.mean == pytest.approx(bandwidth.table.average, abs=0.005)


@pytest.mark.parametrize("name", BETWEEN)
def test_pairs_between_the_nodes(name: str) -> None:
    result = read(name)
    world = result.world
    assert world is not None
    assert world.hosts() == ["node0", "node1"]
    # Each ring leaves either node once.
    for ring in world.rings.values():
        assert sum(world.apart(*hop) for hop in ring.hops()) == 2
    assert result.pairs
    assert all(
        route.source.known == route.destination.known == "measured" for route in result.routes
    )
    network = {"evener": "Evener"}.get(name, "Socket")
    assert {edge.network for edge in world.edges.values()} == {network}
    assert result.tree_pairs


def test_one_host_has_no_pair() -> None:
    result = read("one-host")
    assert not result.pairs
    assert result.world is not None
    assert any("P2P" in name for name in result.world.transports)


# What an operator is told of each run, and nothing else. In a lab the cards are virtual.
FOUND = {
    "sockets": {"network.one-stream", "rings.repeated", "bandwidth.above-line-rate"},
    "evener": {"bandwidth.above-line-rate"},
    "two-nics": {"network.one-stream", "rings.repeated", "bandwidth.share-of-line"},
    "one-host": {"bandwidth.share-of-line"},
}


@pytest.mark.parametrize("name", NAMES)
def test_findings(name: str) -> None:
    findings = run_checks(read(name))
    assert {finding.id for finding in findings} == {*FOUND[name], "settings.no-nvls"}
    worst = {finding.severity for finding in findings}
    assert ("problem" in worst) == ("network.one-stream" in FOUND[name])
    for finding in findings:
        assert "NCCL_IB" not in finding.command  # there is no RDMA card in these runs


def test_one_device_over_all_cards_has_no_rail() -> None:
    status, confidence, why = read("evener").rails()
    assert (status, confidence) == ("unknown", "measured")
    assert "spreads" in why


@pytest.mark.parametrize("name", ["sockets", "two-nics"])
def test_rails_of_sockets_are_measured(name: str) -> None:
    assert read(name).rails()[:2] == ("aligned", "measured")


@pytest.mark.parametrize("name", BETWEEN)
def test_algorithms_that_nccl_chose(name: str) -> None:
    tree_pairs = {(pair.source, pair.destination) for pair in read(name).tree_pairs}
    assert tree_pairs == {(0, 2), (2, 0)}


def test_the_plugin_is_seen() -> None:
    result = read("evener")
    assert any("Evener" in host.plugins for host in result.run.hosts.values())


def test_both_cards_are_seen() -> None:
    result = read("two-nics")
    for host in result.run.hosts.values():
        assert {card.name for card in host.cards.values()} >= {"eth0", "eth1"}
