"""Whole logs as each NCCL version writes them: hosts, rings, cards, what cannot be known."""

from dataclasses import replace
from pathlib import Path

import pytest
from nccl_logs import VERSIONS, Job, job, rank_lines, ring_line

from evener.tools.analyze import Picture, collect, picture, run_checks
from evener.tools.analyze.report.verdict import facts


def read(tmp_path: Path, *texts: str) -> Picture:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text(text)
    return picture(collect(paths))


def found(result: Picture) -> set[str]:
    return {finding.id for finding in run_checks(result)}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_job(version: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job(version)))
    world = result.world
    assert world is not None
    assert len(result.run.communicators) == 1
    assert (world.size, world.channels) == (8, 4)
    assert world.hosts() == ["node-a", "node-b"]
    assert len(world.distinct_rings()) == 1
    assert [(p.source, p.destination, p.channels) for p in result.pairs] == [
        (3, 4, [0, 1, 2, 3]),
        (7, 0, [0, 1, 2, 3]),
    ]
    # Every NET edge is one edge, though both ends log it.
    assert len(world.edges) == 8
    assert all(
        edge.send_card == edge.receive_card == edge.channel % 2 for edge in world.edges.values()
    )
    assert set(world.trees) == {0, 1, 2, 3}
    assert result.rails()[:2] == ("aligned", "measured")
    assert {route.source.name for route in result.routes} == {"mlx5_0", "mlx5_1"}
    assert list(result.run.versions) == [version]
    assert result.run.unknown == 0, result.run.unknown_samples
    assert found(result) <= {"rings.repeated"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "prefix", ["[1,{rank}]<stdout>:", "{rank}: ", "[default{rank}]:", "[1,{rank}]<stdout>: ", "   "]
)
def test_launchers(version: str, prefix: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job(version, prefix=prefix)))
    assert result.world is not None
    assert result.world.hosts() == ["node-a", "node-b"]
    assert len(result.pairs) == 2
    assert result.run.unknown == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_cards_that_differ_are_crossed_rails(version: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job(version, crossed=True)))
    assert result.rails()[:2] == ("crossed", "measured")
    assert "rails.crossed" in found(result)


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_differ_are_no_crossed_rails(version: str, tmp_path: Path) -> None:
    # Leaves at local 3, arrives at local 1: the card is the same, so the rail is.
    order = (0, 1, 2, 3, 5, 6, 7, 4)
    result = read(tmp_path, job(Job(version, orders=(order,))))
    assert [(p.source, p.destination) for p in result.pairs] == [(3, 5), (4, 0)]
    assert result.rails()[0] == "aligned"


@pytest.mark.parametrize("version", VERSIONS)
def test_without_gpudirect(version: str, tmp_path: Path) -> None:
    assert "network.gpudirect-off" in found(read(tmp_path, job(Job(version, direct=False))))


@pytest.mark.parametrize("version", ["2.18.3", "2.28.9"])
def test_proxies(version: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job(version, proxy=True)))
    assert "network.pxn" in found(result)
    assert {edge.proxy for edge in result.world.edges.values()} == {2, 6}


@pytest.mark.parametrize("version", VERSIONS)
def test_sockets_with_one_stream(version: str, tmp_path: Path) -> None:
    one = Job(version, network="Socket", cards=("eth0",), direct=False)
    assert "network.one-stream" in found(read(tmp_path, job(one)))


@pytest.mark.parametrize("version", ["2.10.3", "2.28.9"])
def test_a_network_whose_name_has_a_space(version: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job(version, network="AWS Libfabric")))
    assert {network for host in result.run.hosts.values() for network, _ in host.used} == {
        "AWS Libfabric"
    }
    assert result.run.unknown == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_ring_is_never_closed(version: str, tmp_path: Path) -> None:
    long = Job(version, hosts=tuple(f"h{i}" for i in range(8)), gpus=8)
    # Rank 0's lines only, and none that names neighbours.
    lines = [line for line in rank_lines(long, 0) if "Ring " not in line and " via " not in line]
    result = read(tmp_path, "\n".join(lines))
    world = result.world
    assert world is not None
    assert world.size == 64
    ring = world.rings[0]
    assert not ring.whole
    assert 15 < len(ring.ranks) < 64
    assert ring.ranks == tuple(range(len(ring.ranks)))
    assert (ring.ranks[-1], 0) not in ring.hops()
    assert {"coverage.cut-rings", "coverage.missing-ranks"} <= found(result)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_ring_is_completed_by_what_each_rank_says(version: str, tmp_path: Path) -> None:
    long = Job(version, hosts=tuple(f"h{i}" for i in range(8)), gpus=8)
    result = read(tmp_path, job(long))
    assert all(ring.whole and len(ring.ranks) == 64 for ring in result.world.rings.values())
    assert len(result.pairs) == 8
    assert "coverage.cut-rings" not in found(result)


def test_a_cut_number_is_dropped() -> None:
    from evener.tools.analyze.parse import rings

    line = ring_line(Job("2.28.9", hosts=("a",) * 40, gpus=8), 0).encode()
    read = rings.channel(line)
    assert read is not None
    assert read.cut
    assert read.ranks == tuple(range(len(read.ranks)))
    half = rings.channel(b"Channel 00/02 : 0 1 2 3 1...")
    assert half is not None
    assert half.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("version", VERSIONS)
def test_several_communicators(version: str, tmp_path: Path) -> None:
    one = Job(version)
    other = replace(one, hosts=("node-a",), channels=2, comm_id="0x2f00d")
    # The second one is made by the same processes and threads after the first.
    lines = []
    for rank in range(one.ranks):
        lines += rank_lines(one, rank)
        if rank < 4:
            lines += rank_lines(other, rank)
    result = read(tmp_path, "\n".join(lines))
    sizes = sorted((c.size, c.channels, len(c.hosts())) for c in result.run.communicators)
    assert sizes == [(4, 2, 1), (8, 4, 2)]
    assert result.world.size == 8
    assert len(result.pairs) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_host_whose_log_is_missing(version: str, tmp_path: Path) -> None:
    whole = Job(version)
    result = read(tmp_path, "\n".join(line for r in range(4) for line in rank_lines(whole, r)))
    assert "coverage.missing-ranks" in found(result)
    # Where the other ranks are is not guessed from their numbers.
    assert result.pairs == [] or all({p.source, p.destination} & {0, 1, 2, 3} for p in result.pairs)
    assert result.rails()[0] == "unknown"


def test_one_file_a_host(tmp_path: Path) -> None:
    whole = Job("2.28.9")
    texts = [
        "\n".join(line for r in range(h * 4, h * 4 + 4) for line in rank_lines(whole, r))
        for h in range(2)
    ]
    result = read(tmp_path, *texts)
    assert len(result.run.communicators) == 1
    assert result.rails()[0] == "aligned"


def test_warnings_and_settings(tmp_path: Path) -> None:
    text = job(
        Job(
            "2.28.9",
            cards=("mlx5_1", "mlx5_10"),
            env=("NCCL_IB_HCA set to mlx5_1", "NCCL_P2P_DISABLE set by environment to 1."),
        )
    )
    text += "[2026-01-01 10:00:00] node-a:1000:1500 [0] misc/socket.cc:50 NCCL WARN lost a peer\n"
    assert {"coverage.nccl-warning", "settings.hca-prefix", "settings.switched-off"} <= found(
        read(tmp_path, text)
    )


def test_communicators_that_no_line_tells_apart_are_counted(tmp_path: Path) -> None:
    """A group per node and one of all, before NCCL named them: three communicators, not two."""
    lines = []
    for host, pids in (("a", (1, 2)), ("b", (3, 4))):
        for rank, pid in enumerate(pids):
            world = rank + 2 * (host == "b")
            for pointer, place, size in (("0x1", world, 4), ("0x2", rank, 2)):
                init = (
                    f"comm {pointer} rank {place} nranks {size} cudaDev {rank} busId {rank + 1}000"
                )
                lines.append(f"{host}:{pid}:{pid}9 [{rank}] NCCL INFO {init} - Init COMPLETE\n")
    path = tmp_path / "log"
    path.write_text("".join(lines))
    found = picture(collect([path]))
    assert sorted((comm.size, comm.copies) for comm in found.run.communicators) == [(2, 2), (4, 1)]
    assert ("analyzed", "the largest of 3 communicators") in facts(found)
