"""`evener lab shell` runs what a keeper hands it: only this user's own keepers are believed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evener.errors import UsageError
from evener.tools.lab import LabError, directory

# Listens in the name of a lab's keeper and answers as one, as a user given by number.
_IMPOSTOR = """
import json, os, socket, sys
user, name = int(sys.argv[1]), "\\0" + sys.argv[2]
if user: os.setuid(user)
name = name.replace("PID", str(os.getpid()))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(name)
listener.listen()
print(name[1:], flush=True)
about = {"owner": int(sys.argv[3]) or os.getpid(), "spec": {}, "mode": "root",
         "inherited": {"LD_PRELOAD": "/tmp/evil.so"}, "variables": []}
while True:
    connection, _ = listener.accept()
    asked = connection.recv(4096)
    print(asked.decode() or "-", flush=True)
    if asked: connection.send(json.dumps(about).encode())
"""


@contextmanager
def impostor(
    user: int, pid: str = "PID", owner: int = 0
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    name = f"evener-lab/2/{os.getuid()}/{pid}"
    command = [sys.executable, "-I", "-S", "-c", _IMPOSTOR, str(user), name, str(owner)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().rsplit("/", 1)[1]), process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")
def test_another_users_listener_is_not_believed_and_not_asked() -> None:
    with impostor(65534) as (keeper, process):
        assert keeper not in [lab.keeper for lab in directory.running()]
        assert heard(process) == "-", "it was asked before it was checked"
        with pytest.raises(UsageError):
            directory.choose(keeper)
        with pytest.raises(LabError, match="of user 65534 listens in the name of the lab"):
            directory._ask(keeper, {"do": "about"})


def test_a_listener_that_is_not_the_process_in_its_name_is_not_believed() -> None:
    with impostor(0, pid="1") as (keeper, process):
        assert keeper == 1
        assert 1 not in [lab.keeper for lab in directory.running()]
        assert heard(process) == "-"


def test_a_listener_that_is_no_child_of_its_owner_is_not_believed() -> None:
    with impostor(0, owner=1) as (keeper, _):
        assert keeper not in [lab.keeper for lab in directory.running()]
    with impostor(0, owner=os.getpid()) as (keeper, _):  # the test can tell one that would do
        assert keeper in [lab.keeper for lab in directory.running()]


def test_a_listener_that_does_not_answer_holds_nobody_up() -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(directory.name_of(os.getpid() + 100_000_000))
        listener.listen(0)
        # Others may run labs on this machine: theirs are found, this one is not.
        keepers = {found.keeper for found in directory.running()}
        assert os.getpid() + 100_000_000 not in keepers


def test_a_lab_of_another_version_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = _IMPOSTOR.replace('"spec": {}', '"spec": {"of_tomorrow": 1}')
    assert newer != _IMPOSTOR
    monkeypatch.setitem(globals(), "_IMPOSTOR", newer)
    said: list[str] = []
    monkeypatch.setattr(directory.logger, "warning", said.append)
    with impostor(0, owner=os.getpid()) as (keeper, _):
        assert keeper not in [lab.keeper for lab in directory.running()]
    assert f"the lab of process {os.getpid()} is of another Evener: passed over" in said
