"""`evener launch` names a rank that stands still, and `evener why` does; a launched job is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evener.tools.analyze.command import analyze
from evener.tools.why import process
from evener.tools.why.command import why
from evener.watch.inside import VARIABLE

_TRAIN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 10:
        print("trains", flush=True)
"""


def _wait(condition: Any, seconds: float, said: Path | None = None) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said.read_text() if said else "in vain"
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_a_stopped_rank_is_named_by_launch_and_by_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    out = tmp_path / "said"
    with out.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", "evener", "launch", "-np", "2", "--no-tag", sys.executable,
             "train.py"],
            cwd=tmp_path, stdout=file, stderr=file,
            env={**os.environ, "EVENER_WATCH_FLOOR": "3"},
        )  # fmt: skip
    try:
        _wait(lambda: out.read_text().count("trains") == 2, 150, out)
        known = [process.variables(pid) for pid in process.family(job.pid)]
        folder = next(Path(one[VARIABLE]) for one in known if VARIABLE in one)
        ran = CliRunner().invoke(why, [str(folder), "--json"])
        (moving,) = json.loads(ran.output)["jobs"]
        assert ran.exit_code == 0, moving
        assert moving["moving"]
        assert [row["rank"] for row in moving["ranks"]] == [0, 1]
        pid = moving["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        _wait(lambda: "kept" in out.read_text(), 90, out)
        assert f"rank 1 is stopped (process {pid}" in out.read_text()
        ran = CliRunner().invoke(why, [str(pid)])
        assert ran.exit_code == 1
        assert "rank 1 is stopped" in ran.output
        (bundle,) = tmp_path.glob("evener-why-*.zip")
        ran = CliRunner().invoke(analyze, ["-q", str(bundle)])
        assert "ank 1 is stopped" in ran.output
        os.kill(pid, signal.SIGCONT)
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(40)
    assert out.read_text().count("kept") == 1
    assert not folder.exists()


@pytest.mark.timeout(300)
def test_ranks_of_another_host_are_seen_by_ssh(tmp_path: Path, sshd: list[str]) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    out = tmp_path / "said"
    with out.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", "evener", "launch", "-H", "127.0.0.2:2", *sshd, "--no-tag",
             "--start-timeout", "60", sys.executable, "train.py"],
            cwd=tmp_path, stdout=file, stderr=file,
            env={**os.environ, "EVENER_WATCH_FLOOR": "3"},
        )  # fmt: skip
    pid = 0
    try:
        _wait(lambda: out.read_text().count("trains") == 2, 150, out)
        ran = CliRunner().invoke(why, ["127.0.0.2", *sshd, "--json"])
        found = json.loads(ran.output)["jobs"]
        (one,) = [one for one in found if _is_of(one["ranks"][0]["pid"], tmp_path)]
        assert one["moving"], one
        assert [row["step"] > 0 for row in one["ranks"]] == [True, True]
        pid = one["ranks"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        _wait(lambda: "kept" in out.read_text(), 90, out)
        assert f"rank 0 is stopped (process {pid}" in out.read_text()
        ran = CliRunner().invoke(why, ["127.0.0.2", *sshd])
        assert ran.exit_code == 1
        assert f"rank 0 is stopped (process {pid}" in ran.output
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)
        job.send_signal(signal.SIGINT)
        job.wait(40)
    ran = CliRunner().invoke(why, ["127.0.0.2", "--rsh", "sh -c 'echo no route >&2; exit 255'"])
    assert "127.0.0.2: neither a job or process here, nor a host that answers (no route)" in str(
        ran.exception
    )


def _is_of(pid: int, folder: Path) -> bool:
    try:
        return str(folder) in str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return False  # of another job of this machine, which has ended meanwhile


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_why_without_a_job_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.tools.why.look.watched", dict)
    ran = CliRunner().invoke(why, [])
    assert "no rank was found" in str(ran.exception)


def test_stacks_of_a_process_that_evener_does_not_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [{"name": "held", "filename": "/w/train.py", "line": 4, "short_filename": "train.py"}]
    spied = [{"pid": 1, "thread_name": "MainThread", "frames": frames}]
    spy = tmp_path / "py-spy"  # what py-spy 0.4 prints
    spy.write_text(f"#!/bin/sh\ncat << 'END'\n{json.dumps(spied)}\nEND\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    one = subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"})
    try:
        _wait(lambda: "RANK=1" in _text(Path(f"/proc/{one.pid}/environ")), 10)
        ran = CliRunner().invoke(why, ["--pid", str(one.pid)])
        assert ran.exit_code == 1
        assert "none makes progress: rank 1: w/train.py:4 (held)" in ran.output
        assert "rank 0" not in ran.output
    finally:
        one.kill()
        one.wait()


def test_why_tells_of_a_process_that_evener_does_not_watch() -> None:
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    one = subprocess.Popen(["sleep", "60"], env=env)
    try:
        _wait(lambda: "RANK=1" in _text(Path(f"/proc/{one.pid}/environ")), 10)
        one.send_signal(signal.SIGSTOP)
        _wait(lambda: ") T " in _text(Path(f"/proc/{one.pid}/stat")), 10)
        ran = CliRunner().invoke(why, ["--pid", str(one.pid)])
        assert ran.exit_code == 1
        assert f"rank 1 is stopped (process {one.pid}" in ran.output
    finally:
        one.kill()
        one.wait()
