"""Runs that hung: the right rank and the right kind, whatever form the evidence has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answers import ask, waiting
from tests import incidents as made

from evener.tools.analyze import collect, picture, terminal

# --- hangs ---


@pytest.mark.parametrize("style", made.STYLES)
@pytest.mark.parametrize("wrap", sorted(made.WRAPS))
def test_the_rank_that_is_silent(style: str, wrap: str, tmp_path: Path) -> None:
    lines = ["world size: 4", *waiting([0, 1, 3], style=style, op="ALLREDUCE")]
    said, findings = ask(tmp_path, made.WRAPS[wrap](lines))
    assert "rank 2 never joined ALLREDUCE 77" in said
    assert findings[0].id == "cause.missing-rank"
    assert findings[0].confidence == "inferred"


@pytest.mark.parametrize("style", ["2.3", "2.4", "2.6", "2.9"])
def test_the_rank_that_is_behind_by_its_own_numbers(style: str, tmp_path: Path) -> None:
    lines = waiting([0, 1, 2], 51, style=style) + made.watchdog(3, 50, style=style)
    said, findings = ask(tmp_path, lines)
    assert "rank 3 is behind" in said
    assert findings[0].confidence == "measured"


@pytest.mark.parametrize("style", made.STYLES)
def test_the_rank_that_ran_another_operation(style: str, tmp_path: Path) -> None:
    lines = waiting([0, 2, 3], 9, style=style) + made.watchdog(1, 9, "ALLGATHER", 1, style)
    said, findings = ask(tmp_path, lines)
    assert "rank 1 ran ALLGATHER where ranks 0, 2-3 ran ALLREDUCE" in said
    assert findings[0].id == "cause.mismatch"


def test_the_ranks_that_brought_another_size(tmp_path: Path) -> None:
    lines = waiting([0, 1, 4, 5, 6, 7], 9) + waiting([2, 3], 9, numel=99)
    said, _ = ask(tmp_path, lines)
    assert "ranks 2 and 3 brought other sizes" in said
    assert "99 elements" in said
    lines = waiting([0, 1, 2], 9, op="ALLTOALL") + waiting([3], 9, op="ALLTOALL", numel=99)
    assert "other sizes" not in ask(tmp_path, lines)[0]


def test_two_ranks_that_differ_are_not_told_apart(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path, made.watchdog(0, 9, "ALLGATHER") + made.watchdog(1, 9, "ALLREDUCE")
    )
    assert findings[0].id == "cause.mismatch"
    assert "ranks 0 and 1 ran different collectives" in said
    assert "No majority" in findings[0].detail


def test_everybody_inside_is_not_blamed_on_a_rank(tmp_path: Path) -> None:
    said, findings = ask(tmp_path, ["world_size=4", *waiting(range(4))])
    assert findings[0].id == "cause.inside"
    assert "all 4 ranks" in said
    assert "dmesg" in findings[0].command


def test_most_ranks_silent_is_not_decided(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path, ["torchrun --nnodes=2 --nproc-per-node=8 t.py", *waiting([3, 9])]
    )
    assert findings[0].id == "run.hung"
    assert "2 ranks of 16" in said
    assert "not decided" in said


def test_one_wait_counts_once_however_many_lines_tell_it(tmp_path: Path) -> None:
    said, _ = ask(tmp_path, ["world size 64", *waiting([1, 2], style="2.9")])
    assert "2 ranks of 64" in said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["[rank0]:[E1 P.cpp:1] Rank 0",
             "\t - [0] Timeout at collective: ALLREDUCE, #15",
             "\t   - [5] finished collective #11, but didn't join collective #12 (count from 1)"],
            ("rank 5", "12"),
        ),
        (["RuntimeError: [Rank 0]: Ranks 2, 6 failed to pass monitoredBarrier in 600000 ms"],
         ("ranks 2 and 6",)),
        (["RuntimeError: Rank 3 failed to pass monitoredBarrier in 30000 ms"], ("rank 3",)),
    ],
)  # fmt: skip
def test_reports_that_name_the_ranks(
    lines: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    said, findings = ask(tmp_path, lines)
    assert findings[0].id == "cause.missing-rank"
    assert all(word in said for word in words)


def test_the_check_of_torch_names_two(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path,
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 4 is running "
        "collective: "
        "CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[5]), but Rank "
        "0 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=12, "
        "OpType=BROADCAST).Collectives "
        "differ in the following aspects: Op type: ALLREDUCEvs BROADCAST",
    )
    assert findings[0].id == "cause.mismatch"
    assert "ranks 0 and 4" in said


@pytest.mark.parametrize("old", [True, False])
def test_heartbeats_alone(old: bool, tmp_path: Path) -> None:
    lines = [line for r, n in enumerate((40, 40, 31, 40)) for line in made.heartbeat(r, n, old=old)]
    said, findings = ask(tmp_path, lines)
    assert "rank 2 stopped first" in said
    assert "watchdog" in said
    assert findings[0].confidence == "inferred"
    same = [line for rank in range(4) for line in made.heartbeat(rank, 40)]
    said = ask(tmp_path, same)[0]
    assert "watchdog is stuck on ranks 0-3 for 480 s: what blocks it is not decided" in said
    assert "timed out" not in said  # no collective is known that did


# --- flight recorders ---


ALL = {"0": ("default_pg", [0, 1, 2, 3])}
FORMS = ("pickle", "pickle4", "json")
VERSIONS = ("1.5", "2.1", "2.3", "2.5", "2.10")


def dumps(
    tmp_path: Path, per_rank: dict[int, list[dict]], groups: dict = ALL, **more: str
) -> object:
    version, form = more.get("version", "2.10"), more.get("form", "pickle")
    mine = {rank: {name: g for name, g in groups.items() if rank in g[1]} for rank in per_rank}
    texts = [
        made.dumped(made.recorder(entries, mine[rank], version), form)
        for rank, entries in per_rank.items()
    ]
    end = ".json" if form == "json" else ""
    names = tuple(f"nccl_trace_rank_{rank}{end}" for rank in per_rank)
    return ask(tmp_path, *texts, names=names)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_dump_without_the_operation(version: str, form: str, tmp_path: Path) -> None:
    frames = [("torch/distributed/distributed_c10d.py", 10), ("app/step.py", 31)]
    per_rank = {
        rank: [made.entry(1), made.entry(2)]
        + ([] if rank == 3 else [made.entry(3, "_all_gather_base", 8, "scheduled", frames=frames)])
        for rank in range(4)
    }
    said, findings = dumps(tmp_path, per_rank, version=version, form=form)  # type: ignore[misc]
    assert "rank 3 never joined _all_gather_base 3" in said
    assert "app/step.py:31" in findings[0].detail
    assert findings[0].confidence == "measured"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_dump_with_another_size(version: str, odd: int, tmp_path: Path) -> None:
    per_rank = {
        rank: [made.entry(1), made.entry(2, size=8 if rank == odd else 64, state="started")]
        for rank in range(4)
    }
    said, _ = dumps(tmp_path, per_rank, version=version)  # type: ignore[misc]
    assert f"rank {odd} brought other sizes" in said


def test_a_dump_with_another_operation_or_type(tmp_path: Path) -> None:
    per_rank = {
        rank: [
            made.entry(1),
            made.entry(2, "broadcast" if rank == 0 else "all_reduce", state="started"),
        ]
        for rank in range(4)
    }
    assert "rank 0 ran broadcast" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]
    per_rank = {
        rank: [made.entry(2, dtype="Half" if rank == 1 else "Float", state="started")]
        for rank in range(4)
    }
    assert "rank 1 brought another type" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]


def test_dumps_in_which_everybody_is_inside(tmp_path: Path) -> None:
    per_rank = {r: [made.entry(1), made.entry(2, state="started")] for r in range(4)}
    assert "all 4 ranks" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]
    per_rank.pop(3)
    said, findings = dumps(tmp_path, per_rank)  # type: ignore[misc]
    assert "rank 3 never joined all_reduce 2" in said
    assert "timed out" not in said  # no dump says so
    assert "rank 3 left no dump" in findings[0].detail
    per_rank.pop(2)
    assert "not decided" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]


def test_the_wait_goes_on_in_another_group(tmp_path: Path) -> None:
    groups = {**ALL, "1": ("tp", [2, 3])}
    at = 5_000_000
    per_rank = {
        0: [made.entry(1), made.entry(2, state="scheduled", created=at)],
        1: [made.entry(1), made.entry(2, state="scheduled", created=at)],
        2: [made.entry(1), made.entry(7, group="1", desc="tp", state="scheduled", created=at)],
        3: [made.entry(1), made.entry(6, group="1", desc="tp")],
    }
    said, _ = dumps(tmp_path, per_rank, groups)  # type: ignore[misc]
    assert "rank 3 never joined" in said
    assert "ranks 2" not in said


def test_a_deadlock_of_two_groups(tmp_path: Path) -> None:
    groups = {"1": ("a", [0, 1]), "2": ("b", [0, 1])}
    per_rank = {
        0: [made.entry(1, group="1", desc="a", state="scheduled")],
        1: [made.entry(1, group="2", desc="b", state="scheduled")],
    }
    said, findings = dumps(tmp_path, per_rank, groups)  # type: ignore[misc]
    assert findings[0].id == "cause.deadlock"
    assert "ranks 0 and 1" in said


def test_a_message_that_was_never_sent(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", [0, 1])}
    per_rank = {
        0: [made.entry(1), made.entry(2, "recv 0<-1", state="scheduled", p2p=True)],
        1: [made.entry(1)],
    }
    assert "rank 1 never joined recv 0<-1" in dumps(tmp_path, per_rank, groups)[0]  # type: ignore[index]


# --- RAS and Inspector ---


def ras(counts: dict[int, int], op: str = "AllReduce", named: str = "few") -> dict[str, object]:
    del named
    return {
        "nccl_version": "2.28.7",
        "communicators": [
            {
                "hash": "0xabc", "size": len(counts), "ranks_count": len(counts),
                "missing_ranks_count": 0, "missing_ranks": [],
                "ranks": [
                    {"rank": r, "host": "n", "pid": 7, "collective_counts": {op: c, "Broadcast": 3}}
                    for r, c in counts.items()
                ],
            }
        ],
        "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
    }  # fmt: skip


def test_ras_once_and_twice(tmp_path: Path) -> None:
    counts = {rank: 20 if rank != 5 else 19 for rank in range(8)}
    one = json.dumps(ras(counts))
    said, findings = ask(tmp_path, one)
    assert "Rank 5 is 1 AllReduce behind" in said
    assert "no proof" in findings[0].detail
    said, findings = ask(tmp_path, one, one)
    assert findings[0].severity == "problem"
    assert "stands still" in said
    moved = json.dumps(ras({r: c + 9 for r, c in counts.items()}))
    _, findings = ask(tmp_path, one, moved)
    assert findings[0].severity == "note"


def test_ras_names_the_dead(tmp_path: Path) -> None:
    document = ras({0: 5, 1: 5})
    document["communicators"][0]["missing_ranks"] = [  # type: ignore[index]
        {"rank": 2, "host": "n-3", "status": {"unresponsive": True, "considered_dead": True}}
    ]
    said, _ = ask(tmp_path, json.dumps(document, indent=1))
    assert "rank 2 is dead" in said.lower()
    text = """Job summary
===========

Errors
======

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
"""
    said, _ = ask(tmp_path, text)
    assert "rank 21" in said.lower()


def test_a_rank_that_is_late_in_most(tmp_path: Path) -> None:
    lines = []
    for seq in range(20):
        for rank in range(4):
            micros = 5000 if rank == 2 and seq % 5 else 9000 + 10 * rank
            lines.append(
                json.dumps(
                    {
                        "header": {"id": "0x1", "rank": rank, "n_ranks": 4, "nnodes": 1},
                        "metadata": {"hostname": "n-1", "pid": 7 + rank},
                        "coll_perf": {
                            "coll": "AllReduce",
                            "coll_sn": seq,
                            "coll_exec_time_us": micros,
                            "coll_msg_size_bytes": 1 << 20,
                        },
                    }
                )
            )
    said, findings = ask(tmp_path, lines)
    assert "rank 2" in said.lower()
    assert findings[0].id == "cause.straggler"
    even = [line.replace(": 5000", ": 9000") for line in lines]
    _, findings = ask(tmp_path, even)
    assert not findings


def test_a_finding_on_speed_is_never_the_reason(tmp_path: Path) -> None:
    from nccl_logs import Job, job

    text = job(Job("2.21.5", direct=False)).splitlines() + waiting([0, 1], 5)
    said, findings = ask(tmp_path, text)
    assert "collective did not end" in said
    assert "GPUDirect" not in said
    assert any(f.id == "network.gpudirect-off" and not f.root for f in findings)
    shown = terminal(picture(collect([tmp_path / "0.log"])), findings)
    assert shown.index("Also seen") < shown.index("GPUDirect")


@pytest.mark.parametrize(
    "text",
    [
        "epoch 3 took 71 s, timed out requests: 0\n",
        "saving checkpoint; rank 0 waits at the barrier\n",
        "[rank0]:[W214 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
        "destroyed before we destruct ProcessGroupNCCL.\n",
        "WARNING: out of memory killer is disabled in this image\n",
        "W0220 19:02:31 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment "
        "variable for "
        "each process to be 1 in default\n",
    ],
)
def test_harmless_lines_are_no_reason(text: str, tmp_path: Path) -> None:
    from nccl_logs import Job, job

    said, findings = ask(tmp_path, job(Job("2.28.9")) + text)
    assert not [f for f in findings if f.root], said


@pytest.mark.parametrize(
    "more",
    [" [missing ranks: 1, 4]\n", "\nMissing ranks:\n1: [grad_0, grad_1]\n4: [grad_0]\n",
     "\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:1: [grad_0]\n[1,0]<stderr>:4: [grad_0]\n"],
)  # fmt: skip
def test_horovods_stall_names_ranks_and_is_no_end(more: str, tmp_path: Path) -> None:
    line = (
        "[1,0]<stderr>:[x: W stall_inspector.cc:105] One or more tensors were submitted to be "
        "reduced, "
        "gathered or broadcasted by subset of ranks"
    )
    said, findings = ask(tmp_path, line + more)
    assert [f.id for f in findings] == ["run.stalled"]
    assert "ranks 1 and 4" in said


def test_gloo_tells_by_exceptions(tmp_path: Path) -> None:
    late = made.GONE[5]
    lines = ["world size 4", *[x for r in (0, 1, 3) for x in made.traceback(r, late)]]
    said, _ = ask(tmp_path, lines)
    assert "rank 2 never joined" in said
    lines = ["world size 4", *[x for r in (0, 1) for x in made.traceback(r, late)]]
    lines += [x for r in (2, 3) for x in made.traceback(r, made.GONE[1])]
    said, _ = ask(tmp_path, lines)
    assert "never joined" not in said


def test_a_rank_that_ran_ahead(tmp_path: Path) -> None:
    lines = waiting([0, 1, 2], 100) + made.watchdog(3, 101, "ALLGATHER")
    said, findings = ask(tmp_path, lines)
    assert "rank 3 left the order" in said
    assert findings[0].confidence == "inferred"


def test_the_size_of_a_group_is_read_off_what_it_gathers(tmp_path: Path) -> None:
    """Two of eight ranks: that the one between them is missing is not known."""
    lines = [x for r in (0, 2) for x in made.watchdog(r, 5, "ALLGATHER", 1, numel_out=8)]
    assert "not decided" in ask(tmp_path, lines)[0]
    lines = [x for r in (0, 2) for x in made.watchdog(r, 5, "ALLGATHER", 1, numel_out=3)]
    assert "rank 1 never joined ALLGATHER 5" in ask(tmp_path, lines)[0]


def test_messages_have_numbers_of_their_own(tmp_path: Path) -> None:
    lines = ["world_size: 3", *made.watchdog(1, 7, "RECV"), *made.watchdog(0, 8, "SEND")]
    lines += made.watchdog(2, 7, "RECV")
    said, findings = ask(tmp_path, lines)
    assert findings[0].id == "run.hung"
    assert "not decided" in said


def test_one_silent_rank_among_several_groups(tmp_path: Path) -> None:
    lines = ["world_size=8", *waiting([0, 1, 2], 50, group="mesh_shard", style="2.6")]
    lines += waiting([4, 5, 6, 7], 91, group="mesh_replicate", style="2.6")
    said, findings = ask(tmp_path, lines)
    assert "rank 3 never joined a collective" in said
    assert findings[0].confidence == "inferred"
    lines = [x for x in lines if "rank2" not in x]
    said, _ = ask(tmp_path, lines)
    assert "6 ranks of 8" in said
    assert "not decided" in said


@pytest.mark.parametrize(
    "group", ["[PG 0 (default_pg) Rank 3]", "[PG ID 0 PG GUID 0(default_pg) Rank 3]"]
)
def test_a_rank_that_was_told_of_the_hang_says_what_it_enqueued(group: str, tmp_path: Path) -> None:
    told = (
        f"[rank3]:[E909 09:55:47.0 ProcessGroupNCCL.cpp:1709] {group} Received a dump signal due "
        "to a collective timeout from rank 1 and we will try our best to dump the debug info. Last "
        "enqueued NCCL work: 76, last completed NCCL work: 76."
    )
    said, found = ask(tmp_path, [*waiting([0, 1, 2]), told])
    assert "rank 3 is behind" in said
    assert found[0].confidence == "measured"
