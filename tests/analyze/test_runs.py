"""Logs of real NCCL runs (tests/analyze/runs/README.md): all of it is read, and it is true."""

import json
from pathlib import Path

import pytest

from evener.analyze import collect, document, page, picture, run_checks
from evener.analyze.picture import Picture

RUNS = Path(__file__).with_name("runs")
NAMES = ("sockets", "evener", "two-nics", "one-host")
BETWEEN = NAMES[:3]  # two nodes of two GPUs


def read(name: str) -> Picture:
    folder = RUNS / name
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".log", ".txt", ".xml")]
    files = [path for path in files if not path.name.startswith("analysis")]
    if not files:
        pytest.skip(f"{name}: no logs here yet; benchmarks/nccl_runs.py makes them on four GPUs")
    return picture(collect(files))


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_known_and_nothing_raises(name: str) -> None:
    result = read(name)
    findings = run_checks(result)
    json.dumps(document(result, findings), allow_nan=False)
    assert page(result, findings).endswith("</html>\n")
    assert result.run.nccl_lines > 100
    samples = [text for text, _ in result.run.unknown_samples]
    assert result.run.unknown <= 0.02 * result.run.nccl_lines, samples
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
    assert bandwidth.mean == pytest.approx(bandwidth.table.average, rel=1e-3)


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


def test_sockets_with_one_stream_are_found() -> None:
    assert "network.one-stream" in {finding.id for finding in run_checks(read("sockets"))}


def test_the_plugin_is_seen() -> None:
    result = read("evener")
    assert any("Evener" in host.plugins for host in result.run.hosts.values())


def test_both_cards_are_seen() -> None:
    result = read("two-nics")
    for host in result.run.hosts.values():
        assert {card.name for card in host.cards.values()} >= {"eth0", "eth1"}
