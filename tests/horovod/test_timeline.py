"""The timeline: upstream's event names, valid JSON, what each collective was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import evener.horovod.torch as hvd
from evener.horovod.timeline import Timeline
from tests import worlds


def writes(rank: int, _size: int, folder: str) -> None:
    hvd.init()
    for number in range(3):
        hvd.allreduce(torch.ones(5), name="first")
        if number == 2:
            hvd.stop_timeline()
            hvd.start_timeline(f"{folder}/second.{rank}", mark_cycles=False)
        handles = [hvd.allreduce_async(torch.ones(4), name=f"fused{i}") for i in range(4)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.broadcast(torch.ones(2, dtype=torch.float16), 0, name="weights")
        hvd.alltoall(torch.ones(2), name="all")
    hvd.stop_timeline()
    hvd.shutdown()


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The events, and the names of each tensor's, in order."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8")) if event]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    by_name: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "B":
            by_name[names[event["pid"]]].append(event["name"])
    return events, by_name


def test_timeline(tmp_path: Path) -> None:
    env = {
        "HOROVOD_TIMELINE": str(tmp_path / "first"),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_CYCLE_TIME": "50",
    }
    worlds.run([2], writes, str(tmp_path), env=env)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second.0"]
    events, by_name = read(tmp_path / "first")
    assert by_name["allreduce.first"][:4] == [
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
        "QUEUE",
        "GLOO_ALLREDUCE",
    ]
    assert "NEGOTIATE_BROADCAST" in by_name["broadcast.weights"]
    assert "ALLTOALL" in by_name["alltoall.all"]
    fused = by_name["allreduce.fused0"]
    assert {"MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"} <= set(fused)
    assert any(event.get("name") == "CYCLE_START" for event in events)
    ends = [event["args"] for event in events if event["ph"] == "E" and "args" in event]
    assert {end["bytes"] for end in ends} >= {20, 16, 4, 8}
    assert all({"bucket", "algorithm", "dtype", "shape"} <= set(end) for end in ends)
    # What begins on a track ends there, and time does not run backwards.
    open_events: dict[int, int] = {}
    for event in events:
        open_events[event["pid"]] = open_events.get(event["pid"], 0) + {"B": 1, "E": -1}.get(
            event["ph"], 0
        )
        assert open_events[event["pid"]] >= 0
    assert set(open_events.values()) == {0}
    second, _ = read(tmp_path / "second.0")
    assert not any(event.get("name") == "CYCLE_START" for event in second)


def trains(_rank: int, _size: int, path: str) -> None:
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(4):
        if step == 1:
            hvd.start_timeline(path, mark_cycles=False)
        if step == 3:
            hvd.stop_timeline()
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    hvd.shutdown()


def test_gradient_buckets_are_on_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    worlds.run([2, 2], trains, str(path), env={"LIGHT_2D_ALLREDUCE": "1"})
    events, by_name = read(path)
    (bucket,) = (name for name in by_name if name.startswith("bucket 0"))
    stages = ["GLOO_REDUCESCATTER", "GLOO_ALLREDUCE", "GLOO_ALLGATHER"]
    # Recording begins with the step after the timeline's start.
    assert [name for name in by_name[bucket] if name != "QUEUE"] == ["ALLREDUCE", *stages]
    (end,) = (e["args"] for e in events if e["ph"] == "E" and "form" in e.get("args", {}))
    numel = 8 * 16 + 16 + 16 * 4 + 4
    assert end["bytes"] >= 4 * numel
    assert (end["algorithm"], end["form"], end["bucket"]) == ("2d", "exact", 0)
    times = [e["ts"] for e in events if e.get("name") in stages]
    assert times == sorted(times)


def test_a_full_disk_ends_the_timeline_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(lambda: 1.0)
    timeline.start("/dev/full", mark_cycles=True)
    assert timeline.active
    for number in range(10_000):
        timeline._write(name=f"event {number}", ph="i", pid=0)
    timeline._flush()
    timeline.stop()
    assert not timeline.active
    assert caplog.text.count("the timeline /dev/full ends here: No space left") == 1
    timeline.start("/dev/full", mark_cycles=False)  # what is still in the buffer fails at the end
    timeline.stop()
    assert caplog.text.count("ends here") == 2
