"""Hosts as nodes that come and go: a hub here, and a launcher of its own for each host.

Each node is `evener launch --join`, which looks at its host, starts its ranks and ends them. A node
that fails is started again, and finds the shared weights at the hub; the others never stop for it.
A node that fails again and again right at its start is given up.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from evener.base import settings
from evener.errors import UsageError
from evener.tools.launch.asked import Asked
from evener.tools.launch.hosts import Host, is_local, place
from evener.tools.launch.job import JobError

_STARTS = 180.0  # seconds within which a hub must listen: it imports torch
_SOON = 120.0  # a node that fails earlier than this after its start has failed at it
_TRIES = 3  # failures of that kind, one after the other, after which a node is given up
_AGAIN = 5.0
_GRACE = 30.0


@dataclass
class _Node:
    host: Host
    process: subprocess.Popen[bytes]
    began: float
    failures: int = 0
    again_at: float | None = None
    status: int | None = None  # at its end


@dataclass
class _Nodes:
    """All nodes of a job, and how each is started."""

    words: Sequence[str]
    program: Sequence[str]
    nodes: list[_Node] = field(default_factory=list)

    def open(self, host: Host) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "evener", "launch", *self.words]
        argv += ["-H", f"{host.name}:{host.slots}", *self.program]
        env = {**os.environ, settings.EVENER_HUB_NODE.name: host.name}
        return subprocess.Popen(argv, env=env, start_new_session=True)

    def look(self, now: float) -> None:
        """Start again what failed."""
        for node in self.nodes:
            if node.status is not None:
                continue
            if node.again_at is not None:
                if now >= node.again_at:
                    node.process, node.began, node.again_at = self.open(node.host), now, None
                continue
            status = node.process.poll()
            if status is None:
                continue
            if status == 0:
                node.status = 0
                continue
            node.failures = node.failures + 1 if now - node.began < _SOON else 1
            if node.failures >= _TRIES:
                node.status = status if 0 < status < 256 else 1
                _say(f"node {node.host.name} failed {_TRIES} times at its start and is given up")
                continue
            node.again_at = now + _AGAIN
            _say(f"node {node.host.name} ended with status {status}: started again")


def start(asked: Asked, hosts: list[Host]) -> None:
    """Run the job to its end.

    Raises UsageError before anything starts, and JobError where fewer nodes than --min-nodes came
    to their end.
    """
    hosts = place(hosts, asked.ranks)
    least = asked.min_nodes or 1
    if least > len(hosts):
        raise UsageError(
            f"--min-nodes {least}, and {len(hosts)} hosts were given", "name more hosts by -H"
        )
    if asked.dry_run:
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        click.echo(f"# a hub on this host, and a node on each of {names}")
        return
    with tempfile.TemporaryDirectory(prefix="evener-hub-") as folder, _signals() as stop:
        token = asked.token_file or Path(folder) / "token"
        own = _own_address(hosts)
        alone = own == "127.0.0.1" and not asked.token_file
        hub, port = _hub(own if alone else "0.0.0.0", token, len(hosts), least)
        if asked.token_file:
            _say(f"others join by `evener launch --join {own}:{port} --token-file {token.name}`")
        nodes = _Nodes(_words(asked, f"{own}:{port}", token), asked.command)
        now = time.monotonic()
        nodes.nodes = [_Node(host, nodes.open(host), now) for host in hosts]
        try:
            _wait(nodes, hub, least, stop)
        finally:
            _end([node.process for node in nodes.nodes], hub)
        if stop:
            name = signal.Signals(stop[0]).name
            raise JobError(f"ended by {name}; all nodes were ended", "", 128 + stop[0])
        failed = [node for node in nodes.nodes if node.status]
        if len(hosts) - len(failed) < least:
            names = ", ".join(node.host.name for node in failed)
            raise JobError(
                f"fewer than --min-nodes {least} nodes are left: {names} failed",
                "look at the first lines of a node that failed",
                failed[0].status or 1,
            )


def _wait(nodes: _Nodes, hub: subprocess.Popen[str], least: int, stop: list[int]) -> None:
    """Until all nodes have ended, too few are left, or a signal came."""
    while not stop:
        nodes.look(time.monotonic())
        given_up = sum(bool(node.status) for node in nodes.nodes)
        if all(node.status is not None for node in nodes.nodes):
            return
        if len(nodes.nodes) - given_up < least:
            return
        if hub.poll() not in (None, 0):
            raise JobError("the hub failed; see its lines above", "", 1)
        time.sleep(0.1)


def _hub(listen: str, token: Path, nodes: int, least: int) -> tuple[subprocess.Popen[str], int]:
    """A hub in a process of its own, and its port. Raises JobError where it does not start."""
    argv = [sys.executable, "-m", "evener", "hub", "--listen", f"{listen}:0"]
    argv += ["--token-file", str(token), "--nodes", str(nodes), "--min-nodes", str(least)]
    hub = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert hub.stderr is not None
    port, known = [0], threading.Event()

    def follow() -> None:
        assert hub.stderr is not None
        for line in hub.stderr:
            if found := re.search(r"listening on .*:(\d+)$", line.strip()):
                port[0] = int(found[1])
                known.set()
            sys.stderr.write(line)
            sys.stderr.flush()
        known.set()

    threading.Thread(target=follow, daemon=True).start()
    if not known.wait(_STARTS) or not port[0]:
        _end([], hub)
        raise JobError("the hub did not start", "see its lines above", 1)
    return hub, port[0]


def _own_address(hosts: Sequence[Host]) -> str:
    """This host's address, as the nodes reach it."""
    others = [host.name.rpartition("@")[2] for host in hosts if not is_local(host.name)]
    if not others:
        return "127.0.0.1"
    for name in others:
        with contextlib.suppress(OSError):
            family, *_, there = socket.getaddrinfo(name.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # sends nothing
                own = str(probe.getsockname()[0])
                return f"[{own}]" if ":" in own else own
    return socket.gethostname()


def _words(asked: Asked, join: str, token: Path) -> list[str]:
    """The options of each node's launcher."""
    words = ["--no-config", "--ddp", "--every", str(asked.every), "--join", join]
    words += ["--token-file", str(token)]
    for option, value in (
        ("--overlap", asked.overlap),
        ("--floor", asked.floor),
        ("--network-interface", asked.interface),
        ("--ssh-port", asked.ssh_port),
        ("--ssh-identity-file", asked.ssh_identity_file),
        ("--rsh", asked.rsh),
        ("--output-dir", asked.output_dir),
    ):
        words += [option, str(value)] if value else []
    words += ["--start-timeout", str(asked.start_timeout)] if asked.patient else []
    for name in asked.env:
        words += ["-x", name]
    for flag, on in (
        ("--horovod", asked.horovod),
        ("--no-watch", not asked.watch),
        ("--timestamps", asked.timestamps),
        ("--no-tag", not asked.tag),
        ("--no-check", not asked.check),
        ("--verbose", asked.verbose),
    ):
        words += [flag] if on else []
    return words


@contextlib.contextmanager
def _signals():  # type: ignore[no-untyped-def]
    """A list of the signals that came and are to end the job."""
    stop: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: stop.append(number)) for n in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(processes: Sequence[subprocess.Popen[bytes]], hub: subprocess.Popen[str]) -> None:
    """End what still runs: nodes first, so that the hub hears of it."""
    for one in processes:
        if one.poll() is None:
            one.terminate()
    until = time.monotonic() + _GRACE
    for one in processes:
        try:
            one.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
    if hub.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hub.wait(2.0)
    if hub.poll() is None:
        hub.terminate()
        try:
            hub.wait(_GRACE)
        except subprocess.TimeoutExpired:
            hub.kill()


def _say(text: str) -> None:
    click.echo(f"evener launch: {text}", err=True)
