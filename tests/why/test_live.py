"""Verdicts of ranks seen from outside, from documents as the watch writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evener.tools.analyze import Finding, collect, picture, run_checks


def _rank(rank: int, **more: Any) -> dict[str, Any]:
    process = {"state": more.pop("state", "S"), **more.pop("process", {})}
    frames = more.pop("frames", [])
    return {
        "evener_seen": 1, "rank": rank, "world": 3, "host": "gpu1", "pid": 100 + rank, "step": 9,
        "threads": [{"name": "MainThread", "main": True, "frames": frames}] if frames else [],
        "stacks_from": "py-spy" if frames else "", "process": process, **more,
    }  # fmt: skip


def _dump(rank: int, *operations: tuple[int, str, str]) -> dict[str, Any]:
    return {
        "version": "2.10", "rank": rank, "pg_status": {},
        "pg_config": {"0": {"desc": "", "ranks": [0, 1, 2]}},
        "entries": [
            {
                "process_group": ["0", ""], "collective_seq_id": seq, "profiling_name": op,
                "state": state, "input_sizes": [[4]], "time_created_ns": seq * 10**9 + rank,
            }
            for seq, op, state in operations
        ],
    }  # fmt: skip


def _first(folder: Path, *documents: dict[str, Any]) -> Finding:
    for number, document in enumerate(documents):
        (folder / f"{number}.json").write_text(json.dumps(document))
    return run_checks(picture(collect([folder]), None))[0]


_WAITS = ["/v/torch/distributed/distributed_c10d.py:3068 all_reduce", "/w/train.py:9 step"]


def test_a_rank_in_its_loader_is_told_from_one_that_is_elsewhere(tmp_path: Path) -> None:
    open_, done = (5, "nccl:all_reduce", "scheduled"), (4, "nccl:all_reduce", "completed")
    dumps = [_dump(0, done, open_), _dump(1, done), _dump(2, done, open_)]
    loading = ["/v/torch/utils/data/dataloader.py:1200 _next_data", "/w/train.py:7 epoch"]
    (tmp_path / "a").mkdir()
    found = _first(
        tmp_path / "a", *dumps, _rank(0), _rank(1, frames=loading, place="data loader"), _rank(2)
    )
    assert found.id == "cause.data-loader"
    assert "rank 1 on gpu1 waits for its data loader, at w/train.py:7 (epoch)" in found.title
    (tmp_path / "b").mkdir()
    found = _first(
        tmp_path / "b", *dumps, _rank(0), _rank(1, frames=["/w/train.py:31 evaluate"]), _rank(2)
    )
    assert found.id == "cause.missing-rank"
    assert "rank 1" in found.title
    assert "w/train.py:31 (evaluate)" in found.title


def test_states_of_the_kernel_come_before_any_reasoning(tmp_path: Path) -> None:
    open_ = (5, "nccl:all_reduce", "scheduled")
    for number, (state, id_) in enumerate(
        [("T", "cause.suspended"), ("X", "cause.dead-rank"), ("D", "cause.blocked")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = _first(folder, _dump(0, open_), _dump(2, open_), _rank(0, frames=_WAITS),
                       _rank(1, state=state), _rank(2, frames=_WAITS))  # fmt: skip
        assert found.id == id_
        assert found.title.startswith("rank 1 is ")


def test_who_says_nothing_while_the_others_lost_it_ended_first(tmp_path: Path) -> None:
    lost = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n'
    lost += "RuntimeError: [/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:5000\n"
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.stderr").write_text(lost)
    # What the launcher noticed first is a rank that only lost the other.
    watch = {"evener_watch": 1, "moving": False, "ranks": 3, "exits": [{"rank": 1, "status": 1}]}
    found = _first(tmp_path, *(_rank(rank, state="Z") for rank in range(3)), watch)
    assert found.id == "cause.dead-rank"
    assert found.title.startswith("rank 2 ended without a word (process 102 on gpu1")
    for oom in ([2], [0, 1, 2]):  # a cgroup of its own, and one for all
        found = _first(tmp_path, *(_rank(rank) for rank in range(3)), {**watch, "oom": oom})
        assert (found.id, found.title[:17]) == ("cause.killed", "rank 2 was killed")
    (tmp_path / "rank1.stderr").unlink()
    (tmp_path / "alone").mkdir()
    (tmp_path / "rank0.stderr").rename(tmp_path / "alone" / "log")
    # Both say that the process that ended first is not in these files.
    assert _first(tmp_path / "alone").id in {"run.lost-peer", "run.gloo-peer"}


def test_connections_that_are_sent_again_name_the_rank_that_all_of_them_have(
    tmp_path: Path,
) -> None:
    def edge(local: str, remote: str, again: int) -> dict[str, Any]:
        return {"local": local, "remote": remote, "unacked": 900, "again": again}

    found = _first(
        tmp_path,
        _rank(0, frames=_WAITS, sockets=[edge("10.0.0.1:1", "10.0.0.2:1", 4)]),
        _rank(1, frames=_WAITS, sockets=[edge("10.0.0.2:1", "10.0.0.1:1", 0),
                                         edge("10.0.0.2:2", "10.0.0.3:2", 5)]),
        _rank(2, frames=_WAITS, sockets=[edge("10.0.0.3:2", "10.0.0.2:2", 3)]),
    )  # fmt: skip
    assert found.id == "cause.link"
    assert "the network of rank 1 on gpu1 is cut" in found.title


def test_names_that_one_rank_alone_submitted_to_horovod(tmp_path: Path) -> None:
    found = _first(
        tmp_path,
        _rank(0, frames=_WAITS, pending={"horovod": ["grad.7"]}),
        _rank(1, frames=_WAITS, pending={"horovod": ["only.here"]}),
        _rank(2, frames=_WAITS, pending={"horovod": ["grad.7"]}),
    )
    assert found.id == "cause.mismatch"
    assert "rank 1 ran only.here where ranks 0 and 2 ran grad.7" in found.title


def test_a_job_that_moves_is_not_called_hung(tmp_path: Path) -> None:
    """There is always a rank that has not issued the newest operation."""
    (tmp_path / "watch.json").write_text('{"evener_watch": 1, "moving": true}')
    done = [(n, "nccl:all_reduce", "completed") for n in range(20)]
    found = [_dump(0, *done, (20, "nccl:all_reduce", "scheduled")), _dump(1, *done),
             _dump(2, *done)]  # fmt: skip
    for number, document in enumerate([*found, _rank(0), _rank(1), _rank(2)]):
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    assert run_checks(picture(collect([tmp_path]), None)) == []


def test_the_rank_that_always_comes_last_is_slow(tmp_path: Path) -> None:
    (tmp_path / "watch.json").write_text('{"evener_watch": 1, "moving": true}')
    dumps = [_dump(rank, *[(n, "nccl:all_reduce", "completed") for n in range(20)])
             for rank in range(3)]  # fmt: skip
    for entry in dumps[2]["entries"]:
        entry["time_created_ns"] += 4 * 10**8
    first = _first(
        tmp_path, *dumps, _rank(0, up_s=60.0, loader_s=0.0), _rank(1, up_s=60.0, loader_s=1.0),
        _rank(2, up_s=60.0, loader_s=30.0),
    )  # fmt: skip
    assert first.id == "cause.slow-rank"
    assert "rank 2 on gpu1 is slow" in first.title
    assert "data loader" in first.title


def test_a_late_start_makes_no_slow_rank(tmp_path: Path) -> None:
    (tmp_path / "watch.json").write_text('{"evener_watch": 1, "moving": true}')
    dumps = [_dump(rank, *[(n, "nccl:all_reduce", "completed") for n in range(40)])
             for rank in range(3)]  # fmt: skip
    dumps[1]["entries"][0]["time_created_ns"] += 30 * 10**9
    for number, document in enumerate([*dumps, _rank(0), _rank(1), _rank(2)]):
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    assert run_checks(picture(collect([tmp_path]), None)) == []


def test_documents_of_any_shape_are_read(tmp_path: Path) -> None:
    """What a hostile or broken bundle holds must not raise."""
    for number, value in enumerate([None, [], {}, "x", -1, 1e300, [[1]], {"a": [None]}]):
        document = {"evener_seen": 1} | dict.fromkeys(
            ["rank", "world", "host", "pid", "threads", "process", "pending", "sockets", "cards",
             "marks", "memory", "looks", "clock_off_s", "place_s"], value,
        )  # fmt: skip
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    (tmp_path / "w.json").write_text('{"evener_watch": 1, "exits": [1, {}], "ranks": "x"}')
    run_checks(picture(collect([tmp_path]), None))
