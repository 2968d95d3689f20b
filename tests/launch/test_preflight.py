"""Ways to start a job wrongly: each ends within 10 seconds, in a line that names host and remedy.

What one host can show is shown by addresses of the loopback network and a stand-in for ssh; names,
firewalls and versions of a second host by two namespaces of a lab, which the stand-in enters.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.tools.lab import Lab, Spec, unavailable
from evener.tools.launch import preflight, probe

EVENER = [sys.executable, "-c", "from evener.cli import main; main()"]
TWO = "127.0.0.2:1,127.0.0.3:1"

# Reaches a "host" of the loopback network; changes what 127.0.0.3 says by the sed script in EDIT.
RSH = """#!/bin/sh
host=$1; shift
case "$host" in
127.0.0.3)
    [ -n "$EDIT" ] || exec sh -c "$BEFORE $*"
    sh -c "$BEFORE $*" | sed -u "$EDIT" ;;
*) exec sh -c "$*" ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('started')\n")
    (tmp_path / "rsh").write_text(RSH)
    (tmp_path / "rsh").chmod(0o755)
    return tmp_path


def start(job: Path, *words: str, **env: str) -> tuple[str, int]:
    """(what was said, exit status) of `evener launch`."""
    done = subprocess.run(
        [*EVENER, "launch", *words], cwd=job, env={**os.environ, **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert "started" not in done.stdout
    return done.stderr, done.returncode


def ended_well(said: str, status: int, *words: str) -> None:
    """One line of problem with all `words`, perhaps one of remedy."""
    assert status in (1, 2), said
    lines = [line for line in said.splitlines() if not line.startswith("evener launch:")]
    assert len(lines) == 2 and lines[0].startswith("error: "), said
    assert lines[1].startswith("  fix: "), said
    for word in words:
        assert word in said, said


TRAIN = ("python", "train.py")
# name > (options and command, what the line must say)
HERE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a name that does not resolve": (
        ("-H", "nosuch.invalid:1,localhost:1", *TRAIN),
        ("host nosuch.invalid", "does not resolve", "spelling"),
    ),
    "no sshd": (
        ("-H", "127.0.0.2:1", "-p", "9", *TRAIN),
        ("127.0.0.2", "no sshd listens on port 9", "--ssh-port"),
    ),
    "no such script": (
        ("-np", "2", "python", "trian.py"),
        ("host localhost has no file trian.py", "check its name"),
    ),
    "a script without python": (("-np", "2", "train.py"), ("no command 'train.py'", "python tr")),
    "no such program": (("-np", "2", "pythn", "train.py"), ("no command 'pythn'", "check its")),
    "more ranks than slots": (
        ("-np", "5", "-H", "127.0.0.2:2", *TRAIN),
        ("-np 5 needs 5 slots", "lower -np to 2"),
    ),
    "a host twice": (("-H", "localhost:1,localhost:1", *TRAIN), ("stands there twice", "once")),
    "an interface that is not there": (
        ("-np", "1", "--network-interface", "eth77", *TRAIN),
        ("--network-interface eth77", "every host has"),
    ),
    "no way in": (
        ("-H", TWO, "--rsh", "/nonexistent/rsh", *TRAIN),
        ("/nonexistent/rsh is not installed", "--rsh"),
    ),
    "slots that are no number": (("-H", "gpu1:two", *TRAIN), ("'two' slots", "HOST:SLOTS")),
}


@pytest.mark.parametrize("name", HERE)
def test_from_here(name: str, job: Path) -> None:
    words, said = HERE[name]
    ended_well(*start(job, *words), *said)


def test_a_port_that_is_taken(job: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = start(job, "-np", "1", "--master-port", str(port), *TRAIN)
    ended_well(*found, f"port {port} cannot be listened on: Address already in use", "leave")


# name > (BEFORE, EDIT, what the line must say) of the second host
THERE = {
    "another Evener": ("", 's/"evener": "[^"]*"/"evener": "0.0.9"/', ("Evener 0.0.9", "wheel")),
    "another torch": ("", 's/"torch": "[^"]*"/"torch": "2.9.1"/', ("torch 2.9.1", "same torch")),
    "another NCCL": ("", 's/"nccl": "[^"]*"/"nccl": "2.27.5"/', ("NCCL 2.27.5", "same torch")),
    "another Python": ("", 's/"python": "[^"]*"/"python": "3.9.1"/', ("Python 3.9.1", "same")),
    "no GPU beside GPUs": ("", 's/"gpu": "[^"]*"/"gpu": "two"/', ("has GPUs two", "nvidia-smi")),
    "a full disk": ("", 's/"free_mb": [0-9]*/"free_mb": 3/', ("3 MB of disk", "make room")),
    "a closed port": ("", 's/"open": [0-9]*/"open": 9/', ("port 9", "was refused", "firewall")),
    "an older Evener": ("", 's/evener-probe.*/{"hostname": "x"}/', ("older Evener", "same")),
    "a script that differs": (
        "",
        "",
        ("train.py differs on hosts 127.0.0.2 and 127.0.0.3", "copy the file"),
    ),
    "no such folder": ("cd /nonexistent &&", "", ("no folder", "same path")),
    "a Python that is not there": (
        "/nonexistent/python; exit 127;", "", ("cannot run Evener", "same path")
    ),
    "a host that hangs": ("sleep 60;", "", ("did not answer within 6 s", "--start-timeout")),
}  # fmt: skip


@pytest.mark.parametrize("name", THERE)
def test_on_the_other_host(name: str, job: Path) -> None:
    before, edit, said = THERE[name]
    if name == "a script that differs":
        other = job / "other"
        other.mkdir()
        (other / "train.py").write_text("print('another')\n")
        (job / "rsh").write_text(RSH.replace("$BEFORE $*", f'$(echo "$*" | sed s:{job}:{other}:)'))
    found = start(job, "-H", TWO, "--rsh", str(job / "rsh"), *TRAIN, BEFORE=before, EDIT=edit)
    ended_well(*found, "127.0.0.3", *said)


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
    if why := unavailable():
        pytest.skip(why)
    if not shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or os.geteuid() != 0:
        pytest.skip("no sshd (package openssh-server), or not root")
    with Lab(Spec(nodes=2, link="1gbit")) as built:
        built.sshd()
        yield built


def in_lab(lab: Lab, *words: str) -> tuple[str, int]:
    folder = Path(__file__).parent
    done = lab.nodes[0].run([*EVENER, "launch", *words], cwd=folder, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr, done.returncode


PROGRAM = ("python", "-c", "print('right')")


@pytest.mark.lab
def test_two_hosts_that_are_right(lab: Lab) -> None:
    done = lab.nodes[0].run([*EVENER, "launch", "-H", "node0:1,node1:1", *PROGRAM], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2


@pytest.mark.lab
def test_a_host_that_is_down(lab: Lab) -> None:
    lab.fault("node1", "down")
    try:
        found = in_lab(lab, "-H", "node0:1,node1:1", *PROGRAM)
    finally:
        lab.fault("node1", "up")
    ended_well(*found, "host node1", "did not answer on port 22", "firewall")


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
