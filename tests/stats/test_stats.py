"""Records of all pillars: their files, and what `evener stats` makes of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.comm.scripts import heard
from tests.net.test_net_command import RECORD as NET

from evener.base import records
from evener.base.records import StatsFile
from evener.cli import evener
from evener.errors import UsageError
from evener.tools.stats import show

BUCKET = {
    "name": "w", "bytes": 4_000_000, "algorithm": "2d", "compressor": "topk", "carrier": "gloo",
    "bytes_sent": 40_000, "predicted_ms": None, "measured_ms": 3.5, "residual_ratio": 1.5,
    "cosine": 0.987,
}  # fmt: skip
COMM = {"steps": 120, "step_ms": 41.5, "buckets": [BUCKET, {**BUCKET, "cosine": None}]}
ZERO = {
    "steps": 7, "skipped": 1, "step_ms": 900.0, "updated": {"host": 5, "stream": 0},
    "tiers": [{"name": "gpu", "bytes": None, "used": None, "peak": 3 * 10**9},
              {"name": "host", "bytes": 8 * 10**9, "used": 6 * 10**9, "peak": 7 * 10**9}],
}  # fmt: skip

LOCAL = {
    "steps": 640, "rounds": 10, "every": 64, "overlap": 16, "step_ms": 21.5, "exchange_ms": 30.25,
    "bytes_sent": 2_500_000, "drift": 0.75,
}  # fmt: skip

HUB = {
    "round": 12,
    "steps": 768,
    "nodes": 1,
    "every": 64,
    "drift": 1.25,
    "bytes_received": 5_000_000,
    "bytes_sent": 7_000_000,
    "members": [
        {
            "name": "far",
            "slot": 1,
            "place": "in",
            "bytes_received": 3_000_000,
            "bytes_sent": 2_000_000,
        }
    ],
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks that write all there is, and files of others."""
    for rank in (1, 0):
        head = {"version": 1, "pid": 9, "rank": rank, "host": f"node{rank}", "time": time.time()}
        for pillar, content in (("comm", COMM), ("zero", ZERO), ("net", NET["net"])):
            record = {**head, pillar: content}
            (tmp_path / f"{pillar}-node{rank}-r{rank}-9.json").write_text(json.dumps(record))
    (tmp_path / "config.json").write_text('{"version": 1, "model": "mine"}')
    (tmp_path / "half.json").write_text('{"version": 1,')
    (tmp_path / "list.json").write_text("[]")
    return tmp_path


def stats(*arguments: str) -> Result:
    return CliRunner().invoke(evener, ["stats", *arguments], catch_exceptions=False)


def test_all_pillars_are_shown_together(job: Path) -> None:
    for pillar, content in (("hub", HUB), ("local", LOCAL)):
        head = {"version": 1, "pid": 7, "rank": 0, "host": "node0", "time": time.time()}
        (job / f"{pillar}-node0-r0-7.json").write_text(json.dumps({**head, pillar: content}))
    shown = stats(str(job)).stdout
    assert "3 processes on 2 hosts" in shown
    at = [shown.index(f"{pillar}:") for pillar in ("comm", "local", "hub", "zero", "net")]
    assert at == sorted(at)
    assert "round 12, step 768, 1 nodes in, every 64 steps, drift 1.25; 5.0 MB received" in shown
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert "node0 0 far in 1 3.0 2.0" in rows
    assert "node0 0 640 10 64 16 21.5 30.2 2.50 0.75" in rows
    assert "node0 0 2 x 2d topk 120 41.5 8.0 0.1 7.0 0.9870" in rows
    assert "node1 1 7 1 900.0 3.00 6.00 8.00" in rows
    assert "node0 0 eth0 45.0 0.0 1 1 9 1" in rows


def test_what_is_over_is_said_to_be(job: Path) -> None:
    found = records.read(job)
    assert "the job is over" in show.summary(found, time.time() + 60)
    found[0]["time"] -= 60  # its other records are new
    assert show.summary(found, time.time()).endswith("0 s old")


def test_json_and_prometheus(job: Path) -> None:
    found = json.loads(stats(str(job), "--json").stdout)
    assert [record["rank"] for record in found] == [0, 0, 0, 1, 1, 1]
    text = stats(str(job), "--prometheus").stdout
    process = 'host="node0",pid="9",rank="0"'
    assert f"evener_comm_steps_total{{{process}}} 120\n" in text
    bucket = 'bucket="0",algorithm="2d",form="topk"'
    assert f"evener_comm_bucket_cosine{{{process},{bucket}}} 0.98" in text
    assert f'evener_zero_tier_used_bytes{{{process},tier="host"}} 6000000000\n' in text
    assert f'evener_net_nic_sent_bytes_total{{{process},nic="eth0"}} 45000000\n' in text
    assert 'bucket="1"} ' not in text
    assert "predicted" not in text, "a figure that is not known has no sample"
    # The format: https://prometheus.io/docs/instrumenting/exposition_formats/
    label = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
    kinds = set()
    for line in text.splitlines():
        if line.startswith("#"):
            kinds.add(line.split()[2])
        else:
            match = re.fullmatch(rf"(\w+)\{{{label}(?:,{label})*\}} -?[\d.e+-]+", line)
            assert match, line
            assert match[1] in kinds
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"]
    assert len(samples) == len(set(samples)), "a series stands there twice"


def test_a_record_of_another_version_is_left_out_and_said(job: Path) -> None:
    path = job / "comm-node0-r0-9.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with heard() as said:
        for _ in range(2):
            assert len(records.read(job)) == 5
    assert said.lines == [f"{path} is left out: a record of version 2, and this reads 1"]


def test_what_is_missing_is_said(job: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for path in job.glob("net-*"):
        path.unlink()
    with pytest.raises(UsageError, match="no records of net, only of comm, zero") as refused:
        CliRunner().invoke(evener, ["net", "stats", str(job)], catch_exceptions=False)
    assert f"evener stats {job}" in refused.value.fix
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UsageError, match="no records of net, comm, local, hub, zero"):
        stats(str(empty))
    with pytest.raises(UsageError, match="is not a directory"):
        stats(str(empty / "none"))
    with pytest.raises(UsageError, match="exclude each other"):
        stats(str(job), "--json", "--prometheus")


def test_watch_waits_for_the_job_and_ends_by_ctrl_c(job: Path) -> None:
    waiting = job / "later"
    command = [sys.executable, "-m", "evener", "stats", str(waiting), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "waiting for a job" in process.stdout.readline()
        part = job / "part"
        part.mkdir()
        for path in job.glob("comm-*"):
            path.rename(part / path.name)
        part.rename(waiting)
        while "2 processes on 2 hosts" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


# --- the files ---


def contents(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.glob("*.json")]


def test_names_carry_host_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of several containers have one number and write to one directory."""
    monkeypatch.setenv("EVENER_STATS_DIR", str(tmp_path / "a" / "b"))
    for host in ("node0", "node1.example.org"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        for rank in (0, 1):
            file = StatsFile.open("comm", rank)
            assert file is not None
            file.write({"steps": rank})
            file.close()
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    own = os.getpid()
    hosts = ("node0", "node1_example_org")
    assert names == [f"comm-{host}-r{rank}-{own}.json" for host in hosts for rank in (0, 1)]
    assert len(contents(tmp_path / "a" / "b")) == 4


def test_a_failed_write_ends_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "stats"
    in_the_way.write_text("a file")
    file = StatsFile(in_the_way, "comm", 0)
    for steps in range(3):
        file.write({"steps": steps})
    assert caplog.text.count("statistics cannot be written") == 1
    in_the_way.unlink()
    file.write({"steps": 3})
    assert [record["comm"]["steps"] for record in contents(in_the_way)] == [3]
    file.close()
