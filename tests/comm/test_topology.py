"""Which rank talks to whom, for every shape of cluster."""

import socket
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.groups import Group, Route, Scaling
from evener.comm.transport import Carrier
from evener.comm.world.topology import Levels, host_identity, levels, nodes_of


def hosts(*sizes: int) -> list[str]:
    return [f"h{node}" for node, size in enumerate(sizes) for _ in range(size)]


def test_two_nodes_of_two() -> None:
    found = [levels(rank, hosts(2, 2)) for rank in range(4)]
    assert [f.inner for f in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [f.outer for f in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert "detected" in found[0].reason  # LIGHT_INTRA_SIZE is 8 unless set


def test_a_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert socket.gethostname() in host_identity()
    monkeypatch.setenv("NCCL_HOSTID", "one")
    assert host_identity() == "one"
    monkeypatch.setenv("EVENER_HOSTID", "two")
    assert host_identity() == "two"


def test_intra_size_cuts_a_node_into_inner_groups() -> None:
    found = levels(5, hosts(4, 4), intra_size=2)
    assert found.inner == (4, 5)
    assert found.outer == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("sizes", "algorithm", "intra_size", "why"),
    [
        ((4,), "auto", 8, "one node"),
        ((1, 1, 1), "2d", 8, "one rank per node"),
        ((4, 3), "2d", 2, "does not divide the 3 ranks"),
        ((2, 2), "flat", 8, "asked for"),
        ((4, 4), "2d", 3, "does not divide"),
        ((2, 2), "2d", 1, "one rank per node"),
    ],
)
def test_what_cannot_be_two_level_goes_flat_and_says_why(
    sizes: tuple[int, ...], algorithm: str, intra_size: int, why: str
) -> None:
    found = levels(0, hosts(*sizes), algorithm, intra_size)  # type: ignore[arg-type]
    assert not found.two_level
    assert found.outer == tuple(range(sum(sizes)))
    assert why in found.reason


def test_in_uneven_nodes_as_many_ranks_exchange_as_the_smallest_has() -> None:
    found = [levels(rank, hosts(3, 2)) for rank in range(5)]
    assert [f.inner for f in found] == [(0, 1, 2)] * 3 + [(3, 4)] * 2
    assert [f.outer for f in found] == [(0, 3), (1, 4), (2,), (0, 3), (1, 4)]
    assert [f.owns for f in found] == [True, True, False, True, True]
    assert {f.shards for f in found} == {2}
    assert "[3, 2], 2 of each in the exchange" in found[0].reason
    # The sizes of inner groups count, not those of nodes.
    assert levels(0, hosts(4, 2), intra_size=2).outer == (0, 2, 4)


def test_uneven_groups_go_flat_where_they_cannot_be_used() -> None:
    found = levels(0, hosts(2, 1), "2d", uneven=False)
    assert found.outer == (0, 1, 2) and "unequal numbers of ranks [2, 1]" in found.reason
    assert levels(0, hosts(2, 2), "2d", uneven=False).two_level


def test_ranks_dealt_round_robin_over_hosts() -> None:
    dealt = ["a", "b", "a", "b"]
    assert nodes_of(dealt) == [[0, 2], [1, 3]]
    assert levels(2, dealt).inner == (0, 2)
    assert levels(2, dealt).outer == (2, 3)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5)
    | st.integers(1, 6).map(lambda size: [size] * 3),
    intra_size=st.integers(1, 8),
    algorithm=st.sampled_from(["auto", "flat", "2d"]),
    seed=st.randoms(),
)
def test_groups_partition_the_ranks(
    sizes: list[int], intra_size: int, algorithm: str, seed: object
) -> None:
    """Every rank is in the groups it lists, all members list the same group, none is left out."""
    names = hosts(*sizes)
    seed.shuffle(names)  # type: ignore[attr-defined]
    found = [levels(rank, names, algorithm, intra_size) for rank in range(len(names))]  # type: ignore[arg-type]
    for rank, mine in enumerate(found):
        assert rank in mine.inner and rank in mine.outer
        assert (mine.sizes, mine.nodes) == (found[0].sizes, found[0].nodes)
        assert sum(mine.sizes) == len(names)
        assert mine.owns == (mine.inner.index(rank) < mine.shards)
        # A shard has one owner in each inner group, and those are who exchange it.
        assert len(mine.outer) == (len(mine.sizes) if mine.owns else 1)
        assert {found[o].inner.index(o) for o in mine.outer} == {mine.inner.index(rank)}
        assert all(found[other].inner == mine.inner for other in mine.inner)
        assert all(found[other].outer == mine.outer for other in mine.outer)
        if len(set(sizes)) > 1 and algorithm != "flat" and max(sizes) <= intra_size:
            assert mine.uneven and mine.two_level
        if mine.two_level:
            assert len({names[other] for other in mine.inner}) == 1


def two_levels(found: list[Levels], inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """What all ranks have in the end, and the entries that owners have given to other nodes.

    As the collectives do it, one rank after the other: by the groups that each rank says, and the
    shard that its route says.
    """
    routes = [route(levels, rank) for rank, levels in enumerate(found)]
    places = [each.place(len(inputs[0])) for each in routes]
    shards = [
        torch.stack([inputs[other] for other in levels.inner]).sum(0)[start:end]
        for levels, (start, end) in zip(found, places, strict=True)
    ]
    given = sum(len(shards[rank]) * (len(levels.outer) - 1) for rank, levels in enumerate(found))
    sums = [torch.stack([shards[other] for other in levels.outer]).sum(0) for levels in found]
    return [torch.cat([sums[other] for other in levels.inner]) for levels in found], given


def route(levels: Levels, rank: int) -> Route:
    """Without groups: only who owns what."""
    nobody = cast("dist.ProcessGroup", None)
    inner = Group(nobody, levels.inner.index(rank), len(levels.inner))
    outer = Group(nobody, levels.outer.index(rank), len(levels.outer))
    near = inner if levels.two_level else None
    total = Scaling(1.0, dist.ReduceOp.SUM, 1.0, 1.0)
    return Route(levels, near, outer, near, total, Carrier("gloo", "a picture of it"))


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    intra_size=st.integers(1, 8),
    length=st.integers(1, 5),
    seed=st.randoms(),
)
def test_all_ranks_have_the_sum_whatever_the_nodes(
    sizes: list[int], intra_size: int, length: int, seed: object
) -> None:
    names = hosts(*sizes)
    seed.shuffle(names)  # type: ignore[attr-defined]
    found = [levels(rank, names, "2d", intra_size) for rank in range(len(names))]
    numel = length * found[0].shards
    inputs = [torch.arange(numel) * (7 + rank) % 1009 for rank in range(len(names))]
    results, given = two_levels(found, inputs)
    for result in results:
        assert torch.equal(result, torch.stack(inputs).sum(0))
    # Each entry is exchanged once for each pair of inner groups, whoever owns it.
    groups = len(found[0].sizes)
    assert given == groups * (groups - 1) * numel
