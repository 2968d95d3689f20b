"""What a host is like, asked before a job starts on it: `python -m evener.tools.launch.probe`.

A job whose third host has no route, no Evener or another Python fails here, by the host's name and
within the start timeout, and not as a rank that never came.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from evener.base import interfaces, ssh
from evener.errors import EvenerError
from evener.tools.launch.hosts import Host


class HostError(EvenerError):
    """A host cannot be used."""


@dataclass(frozen=True)
class HostFacts:
    """What a host said. free_port: one on which no process listened when it was asked."""

    hostname: str
    interfaces: list[str]
    free_port: int


def free_port() -> int:
    """A TCP port of this host on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def ask(hosts: list[Host], rsh: tuple[str, ...], cwd: Path, timeout: float) -> dict[str, HostFacts]:
    """The facts of remote `hosts`, asked all at once. Raises HostError for the first bad one."""
    found: dict[str, HostFacts | HostError] = {}
    threads = [
        threading.Thread(target=lambda h=host: found.update({h.name: _ask(h, rsh, cwd, timeout)}))
        for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = {}
    for host in hosts:
        answer = found[host.name]
        if isinstance(answer, HostError):
            raise answer
        facts[host.name] = answer
    return facts


def _ask(host: Host, rsh: tuple[str, ...], cwd: Path, timeout: float) -> HostFacts | HostError:
    inner = f"cd {shlex.quote(str(cwd))} && {shlex.join([sys.executable, '-m', __name__])}"
    try:
        done = subprocess.run(
            [*rsh, host.name, inner],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return HostError(
            f"host {host.name} did not answer within {timeout:g} s ({shlex.join(rsh)})",
            "check the name and the network, or raise --start-timeout",
        )
    except OSError as error:
        return HostError(f"{rsh[0]} cannot be run: {error.strerror}", "install openssh-client")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return HostFacts(**json.loads(lines[-1]))
    said = (done.stderr.strip().splitlines() or ["(nothing)"])[-1]
    if "No module named" in said or done.returncode in (126, 127):
        return HostError(
            f"host {host.name} cannot run Evener with {sys.executable}: {said}",
            "install the same environment at the same path on every host",
        )
    if "cd:" in said:
        return HostError(
            f"host {host.name} has no folder {cwd}: {said}",
            "put the job's folder on all hosts at the same path, or on a shared file system",
        )
    if why := ssh.cause(done.stderr, host.name):
        return HostError(f"host {host.name} cannot be reached: {why[0]} ({said})", why[1])
    return HostError(
        f"host {host.name} cannot be reached by {shlex.join(rsh)}: {said}",
        f"make `{shlex.join([*rsh, host.name, 'true'])}` work without a password first",
    )


if __name__ == "__main__":
    names = sorted({name for name, _ in interfaces.addresses()})
    facts = HostFacts(socket.gethostname(), names, free_port())
    sys.stdout.write(json.dumps(vars(facts)) + "\n")
