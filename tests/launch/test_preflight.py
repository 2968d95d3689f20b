"""Ways to start a job wrongly: each ends in a line that names host and remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.tools.lab import Lab
from evener.tools.launch import preflight, probe
from tests.launch import starts
from tests.launch.starts import EVENER, PROGRAM, TWO, ended_well, start


@pytest.fixture
def job(tmp_path: Path) -> Path:
    starts.prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", starts.HERE)
def test_from_here(name: str, job: Path) -> None:
    ended_well(*starts.here(name, job), *starts.HERE[name][1])


def test_a_port_that_is_taken(job: Path) -> None:
    found, words = starts.taken(job)
    ended_well(*found, *words)


@pytest.mark.parametrize("name", starts.THERE)
def test_on_the_other_host(name: str, job: Path) -> None:
    ended_well(*starts.there(name, job), "127.0.0.3", *starts.THERE[name][2])


def test_all_that_is_wrong_is_said_at_once(job: Path) -> None:
    said, status = start(
        job, "-H", TWO, "--rsh", str(job / "rsh"), "python", "lost.py",
        EDIT='s/"torch": "[^"]*"/"torch": "2.9.1"/',
    )  # fmt: skip
    assert status == 1
    assert "3 things keep this job from starting" in said
    assert said.count("has no file lost.py") == 2 and "torch 2.9.1" in said


def test_a_doubt_is_no_refusal(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gpu_count", lambda: 2)
    monkeypatch.chdir(job)
    seen = preflight.look(
        [preflight.Host("localhost", 4)], {"localhost"}, ("ssh",), ["python", "train.py"],
        job, dict(os.environ), "127.0.0.1", None, False,
    )  # fmt: skip
    assert seen.warnings == (
        "host localhost has 2 GPUs and gets 4 ranks; -np or localhost:2 gives each rank its own",
    )


def test_the_page_shows_the_record() -> None:
    rows = json.loads(starts.RECORD.read_text(encoding="utf-8"))["starts"]
    assert starts.table(rows) in starts.PAGE.read_text(encoding="utf-8")
    tried = {*starts.HERE, "a port that is taken", *starts.THERE, *starts.BETWEEN}
    assert {row["start"] for row in rows} == tried
    assert max(row["seconds"] for row in rows) < starts.LIMIT


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("python -m pkg.train", "pkg.train"),
        ("python -um pkg.train --x 1", "pkg.train"),
        ("python -W error -m pkg", "pkg"),
        ("python train.py -m x", ""),
        ("python -c pass", ""),
        ("./train.sh -m x", ""),
    ],
)
def test_which_module_is_looked_for(command: str, module: str) -> None:
    assert preflight.module(command.split()) == module


def test_only_a_module_that_is_surely_not_there_is_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = job / "project"
    package.mkdir()
    (package / "train.py").touch()
    monkeypatch.chdir(job)
    for there in ("project.train", "json.tool", "torch.distributed.run", "os.path", "project"):
        assert not probe.lacks(there), there
    for missing in ("project.trian", "projekt", "json.tol", "torch.distributed.rum", "project."):
        assert probe.lacks(missing), missing


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py", "train.py"),
        ("python -u -X utf8 a/train.py --x 1", "a/train.py"),
        ("/usr/bin/python3.12 -W error train.py", "train.py"),
        ("python -m pkg.train", None),
        ("python -um pkg.train", None),
        ("python -c pass", None),
        ("./train.sh", "./train.sh"),
        ("hostname -f", None),
    ],
)
def test_which_file_is_compared(command: str, script: str | None) -> None:
    assert preflight.script(command.split()) == script


# --- two hosts with a network between them ---


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if why := starts.no_hosts():
        pytest.skip(why)
    with starts.hosts() as built:
        yield built


@pytest.mark.lab
def test_two_hosts_that_are_right(lab: Lab) -> None:
    done = lab.nodes[0].run([*EVENER, "launch", "-H", "node0:1,node1:1", *PROGRAM], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2


@pytest.mark.lab
@pytest.mark.parametrize("name", starts.BETWEEN)
def test_between_hosts(name: str, lab: Lab) -> None:
    if starts.BETWEEN[name][0].startswith("nft") and not shutil.which("nft"):
        pytest.skip("no nft (package nftables)")
    ended_well(*starts.between(name, lab), *starts.BETWEEN[name][3])


@pytest.mark.lab
def test_a_name_that_only_ssh_knows(lab: Lab) -> None:
    # Rank 0 is on a host whose name no resolver has: the ranks meet at an address all hosts reach.
    words = ["-H", "gpux:1,node0:1", "--rsh", "ssh -o BatchMode=yes -o HostName=node1", *PROGRAM]
    done = lab.nodes[0].run([*EVENER, "launch", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2


def test_what_a_dial_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe.dial("127.0.0.1", server.getsockname()[1], 2) == ""
        port = server.getsockname()[1]
    assert probe.dial("127.0.0.1", port, 2) == "refused"
    assert probe.dial("nosuch.invalid", 9, 2) == "resolve"
