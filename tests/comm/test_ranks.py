"""Rank detection: the order of the families, never a mixture, contradictions refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.world.ranks import RankError, Ranks, detect

# In the order in which they are believed: rank, size, local rank, and what makes the family count.
FAMILIES = [
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", {}),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", {}),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        {},
    ),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", {}),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", {}),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", {"SLURM_STEP_ID": "0"}),
]


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.integers(1, 512))
    rank = draw(st.integers(0, size - 1))
    return rank, size, draw(st.integers(0, rank))


@given(st.dictionaries(st.sampled_from(range(len(FAMILIES))), places(), min_size=1))
def test_the_first_complete_family_is_believed_whole(present: dict[int, tuple]) -> None:
    env: dict[str, str] = {}
    for index, (rank, size, local) in present.items():
        _, rank_name, size_name, local_name, more = FAMILIES[index]
        env |= {rank_name: str(rank), size_name: str(size), local_name: str(local)} | more
    first = min(present)
    found = detect(env)
    assert (found.rank, found.size, found.local_rank) == present[first]
    assert found.source == FAMILIES[first][0]


NAMES = [name for family in FAMILIES for name in family[1:4]] + [
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "PALS_RANKID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
]
VALUES = st.one_of(st.integers(-1, 9).map(str), st.sampled_from(["", "x", "٣", "2(x2)", "2,1"]))


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_gives_a_place_that_can_be_or_is_refused_by_name(
    env: dict[str, str],
) -> None:
    try:
        found = detect(env)
    except RankError as refused:
        assert any(f"{name}={value}" in str(refused) for name, value in env.items()) or any(
            f"{name}={value!r}" in str(refused) for name, value in env.items()
        )
        return
    assert 0 <= found.rank < found.size
    if found.local_rank is not None and found.local_size is not None:
        assert 0 <= found.local_rank < found.local_size <= found.size
    if found.cross_rank is not None and found.cross_size is not None:
        assert 0 <= found.cross_rank < found.cross_size


def test_nothing_means_a_single_process() -> None:
    assert detect({}) == Ranks(0, 1, 0, 1, 0, 1, "a single process")


def test_a_batch_script_is_no_step() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert detect(batch).size == 1
    assert detect({**batch, "SLURM_STEP_ID": "4294967291"}).size == 1
    assert detect({**batch, "SLURM_STEP_ID": "3"}).size == 8


@pytest.mark.parametrize(
    ("rank", "local", "node", "expected"),
    [
        (0, 0, 0, (0, 2, 0, 3)),
        (1, 1, 0, (1, 2, 0, 2)),
        (3, 1, 1, (1, 2, 1, 2)),
        (4, 0, 2, (0, 1, 2, 3)),
    ],
)
def test_slurm_says_how_many_tasks_a_node_has(
    rank: int, local: int, node: int, expected: tuple[int, int, int, int]
) -> None:
    found = detect(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "5",
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        }
    )
    assert (found.local_rank, found.local_size, found.cross_rank, found.cross_size) == expected


def test_torchrun_gives_cross_values_only_where_its_nodes_are_alike() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert (detect(env).cross_rank, detect(env).cross_size) == (1, 2)
    uneven = env | {"WORLD_SIZE": "5"}
    assert (detect(uneven).cross_rank, detect(uneven).cross_size) == (None, None)


def test_pals_has_its_size_from_pmi() -> None:
    found = detect({"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (found.source, found.rank, found.size, found.local_rank) == ("PALS", 5, 8, 1)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "1"}, ["RANK='1'", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE='4'", "RANK"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'"]),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "0"}, ["HOROVOD_RANK=0", "HOROVOD_SIZE=0"]),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            ["LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"],
        ),
    ],
)
def test_contradictions_are_refused_with_names_and_values(
    env: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(RankError) as refused:
        detect(env)
    for name in named:
        assert name in str(refused.value)
    assert refused.value.exit_code == 2


def test_half_a_family_gives_way_to_a_whole_one() -> None:
    found = detect({"RANK": "7", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    assert (found.source, found.rank) == ("Open MPI", 1)


def test_explicit_ranks_are_checked_too() -> None:
    with pytest.raises(RankError, match="rank=4 and size=4"):
        Ranks(4, 4)
