"""Ways to start a job wrongly, and what `evener launch` must say to each.

    python -m tests.launch.starts       start each once; write the record and the table of the page

What one host can show is shown by addresses of the loopback network and a stand-in for ssh; names,
users and firewalls of a second host by two namespaces of a lab with a real sshd.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from evener.tools.bench.train import machine
from evener.tools.lab import Lab, Spec, unavailable

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/wrong-starts.json"
PAGE = ROOT / "docs/benchmarks/front-door.md"
LIMIT = 10  # seconds within which a start must end
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
    "no such module": (
        ("-np", "2", "python", "-m", "project.trian"),
        ("host localhost has no module project.trian", "check its name"),
    ),
    "no program": (("-np", "2"), ("no program was given", "python train.py")),
    "no such host file": (
        ("--hostfile", "hosts", *TRAIN),
        ("host file hosts", "a file that exists"),
    ),
    "no number of ranks": (TRAIN, ("neither -np nor hosts", "-np 4")),
    "a form that is none": (
        ("-np", "2", "--ddp", "--floor", "int7", *TRAIN),
        ("EVENER_FLOOR='int7' is not known", "did you mean 'int8'"),
    ),
    "an option that is none": (
        ("-np", "2", "--master-prot", "29500", *TRAIN),
        ("has no option --master-prot", "--master-port"),
    ),
}


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


PROGRAM = ("python", "-c", "print('right')")
BOTH = "node0:1,node1:1"
ONLY_SSH = """
table inet closed {
    chain in {
        type filter hook input priority 0
        policy drop
        iif lo accept
        ct state established,related accept
        tcp dport 22 accept
    }
}
"""
# name > (command run in node1 before, and after, the words of the start, what the line must say).
# A host that is down is made so by the lab.
BETWEEN: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "a host that is down": (
        "", "", ("-H", BOTH, *PROGRAM), ("host node1", "did not answer on port 22", "firewall")
    ),
    "a firewall between the hosts": (
        f"nft '{ONLY_SSH}'",
        "nft delete table inet closed",
        ("-H", BOTH, *PROGRAM),
        ("node1", "had no answer", "open all TCP ports"),
    ),
    "a user that the host does not know": (
        "", "", ("-H", "node0:1,nosuchuser@node1:1", *PROGRAM),
        ("accepts no key of yours", "ssh-copy-id nosuchuser@node1"),
    ),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Put a program and the stand-in for ssh there."""
    (folder / "train.py").write_text("print('started')\n")
    (folder / "rsh").write_text(RSH)
    (folder / "rsh").chmod(0o755)


def start(job: Path, *words: str, **env: str) -> tuple[str, int]:
    """(what was said, exit status) of `evener launch`."""
    done = subprocess.run(
        [*EVENER, "launch", *words], cwd=job, env={**os.environ, **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert "started" not in done.stdout
    return done.stderr, done.returncode


def here(name: str, job: Path) -> tuple[str, int]:
    """A way of HERE, tried."""
    return start(job, *HERE[name][0])


def taken(job: Path) -> tuple[tuple[str, int], tuple[str, ...]]:
    """A port that another process has: (what was said and the status, what must be said)."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = start(job, "-np", "1", "--master-port", str(port), *TRAIN)
    return found, (f"port {port} cannot be listened on: Address already in use", "leave")


def there(name: str, job: Path) -> tuple[str, int]:
    """A way of THERE, tried."""
    before, edit, _ = THERE[name]
    if name == "a script that differs":
        other = job / "other"
        other.mkdir()
        (other / "train.py").write_text("print('another')\n")
        (job / "rsh").write_text(RSH.replace("$BEFORE $*", f'$(echo "$*" | sed s:{job}:{other}:)'))
    return start(job, "-H", TWO, "--rsh", str(job / "rsh"), *TRAIN, BEFORE=before, EDIT=edit)


def no_hosts() -> str:
    """Why there can be no lab with an sshd here; "" where there can."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if not sshd or os.geteuid() != 0:
        return "no sshd (package openssh-server), or not root"
    return unavailable() or ""


@contextlib.contextmanager
def hosts() -> Iterator[Lab]:
    """Two hosts with an sshd each."""
    with Lab(Spec(nodes=2, link="1gbit")) as built:
        built.sshd()
        yield built


def in_lab(lab: Lab, *words: str) -> tuple[str, int]:
    """Start from node0."""
    folder = Path(__file__).parent
    done = lab.nodes[0].run([*EVENER, "launch", *words], cwd=folder, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr, done.returncode


def between(name: str, lab: Lab) -> tuple[str, int]:
    """A way of BETWEEN, tried; the hosts are as before afterwards."""
    before, after, words, _ = BETWEEN[name]
    if not before and name == "a host that is down":
        lab.fault("node1", "down")
    elif before:
        done = lab.nodes[1].run(["sh", "-c", before])
        assert done.returncode == 0, done.stderr
    try:
        return in_lab(lab, *words)
    finally:
        lab.fault("node1", "up")
        if after:
            lab.nodes[1].run(["sh", "-c", after])


def problem(said: str) -> list[str]:
    """The lines of the error: what is wrong, and the fix."""
    return [line for line in said.splitlines() if not line.startswith("evener launch:")]


def ended_well(said: str, status: int, *words: str) -> None:
    """One line of problem with all `words`, perhaps one of remedy."""
    assert status in (1, 2), said
    lines = problem(said)
    assert len(lines) == 2 and lines[0].startswith("error: "), said
    assert lines[1].startswith("  fix: "), said
    for word in words:
        assert word in said, said


def main() -> int:
    """Try all of them; a line each."""
    rows: list[dict[str, object]] = []

    def note(name: str, began: float, found: tuple[str, int], words: tuple[str, ...]) -> None:
        seconds = time.monotonic() - began
        ended_well(*found, *words)
        # Without what is this machine's alone: folders, and its addresses.
        lines = [re.sub(r"/\S*/(?=\w)", "/.../", line) for line in problem(found[0])]
        lines = [re.sub(r"(, (?!127\.)[\da-f.:]{4,})+(?=, port)", "", line) for line in lines]
        rows.append({"start": name, "seconds": round(seconds, 1), "said": lines})
        print(f"{seconds:5.1f} s  {name}: {lines[0]}", flush=True)

    def fresh() -> Path:
        job = Path(tempfile.mkdtemp(dir=folder)) / "job"
        job.mkdir()
        prepare(job)
        return job

    with tempfile.TemporaryDirectory() as folder:
        for name in HERE:
            note(name, time.monotonic(), here(name, fresh()), HERE[name][1])
        began = time.monotonic()
        note("a port that is taken", began, *taken(fresh()))
        for name in THERE:
            note(name, time.monotonic(), there(name, fresh()), ("127.0.0.3", *THERE[name][2]))
    if why := no_hosts():
        print(f"left out: {', '.join(BETWEEN)}: {why}")
    else:
        with hosts() as lab:
            for name in BETWEEN:
                note(name, time.monotonic(), between(name, lab), BETWEEN[name][3])
    record = {
        "command": "python -m tests.launch.starts",
        "machine": machine.describe(),
        "versions": machine.versions(),
        "starts": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(TABLE, lambda _: table(rows), page), encoding="utf-8")
    return int(any(float(str(row["seconds"])) > LIMIT for row in rows))


TABLE = r"(?ms)^\| started wrongly .*?\n(?=\n)"


def table(rows: list[dict[str, object]]) -> str:
    """The rows as the page has them."""

    def cell(row: dict[str, object]) -> str:
        what, fix = (str(line) for line in row["said"])  # type: ignore[attr-defined]
        said = f"{what.removeprefix('error: ')}; {fix.removeprefix('  fix: ')}"
        return f"| {row['start']} | {row['seconds']} | {said.replace('|', chr(92) + '|')} |\n"

    head = "| started wrongly | seconds | what is said |\n|---|---:|---|\n"
    return head + "".join(map(cell, rows))


if __name__ == "__main__":
    sys.exit(main())
