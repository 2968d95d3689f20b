"""A real sshd in every node, with keys of its own, so that `ssh node1 CMD` works inside the lab.

Keys, configurations and logs lie on the lab's private tmpfs, which all nodes share and nothing
else sees; they go with it. The nodes' /etc/ssh/ssh_config (a copy since the lab was built) names
the key. Neither the user's ~/.ssh nor the host's sshd is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from evener.tools.lab.errors import LabError
from evener.tools.lab.host import Node
from evener.tools.lab.node import LAB_DIRECTORY

_DIRECTORY = LAB_DIRECTORY / "ssh"
_PACKAGE = "install the package openssh-server (Debian, Ubuntu, Fedora) or openssh (Arch)"
_TIMEOUT = 20.0

# Run by Python in each node. sshd started by root wants /run/sshd.
_PREPARE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import linux
if os.getuid() == 0 and not os.path.isdir("/run/sshd"):
    linux.mount("tmpfs", "/run", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    os.mkdir("/run/sshd", 0o755)
"""
_WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
_ANSWERS = """
import socket, sys, time
until = time.monotonic() + float(sys.argv[2])
while True:
    try:
        banner = socket.create_connection((sys.argv[1], 22), 1).recv(4)
        sys.exit(banner != b"SSH-")
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
"""
# What a login shell would have set by itself, or sshd sets.
_NOT_PASSED = frozenset({"HOME", "LOGNAME", "USER", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "TERM"})


def find() -> str | None:
    """The path of sshd, which is often not on a user's PATH; None where it is not installed."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")


def start(nodes: Sequence[Node], mode: str) -> list[subprocess.Popen[bytes]]:
    """Start one sshd a node; returns when all of them answer. Raises LabError."""
    sshd = find()
    if sshd is None or shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
        raise LabError("sshd, ssh or ssh-keygen is not installed", _PACKAGE)
    if mode == "user namespace" and os.getuid() == 0:
        raise LabError(
            "sshd cannot run as a root that has no other user, as in this user namespace",
            "run as root with all capabilities, or as an ordinary user",
        )
    first = nodes[0]
    _run(first, ["mkdir", "-p", "-m", "700", str(_DIRECTORY)])
    for name in ("host_key", "user_key"):
        key = str(_DIRECTORY / name)
        _run(first, ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", key])
    known = f"Host *\n  IdentityFile {_DIRECTORY}/user_key\n  IdentitiesOnly yes\n"
    known += "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    known += "  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n  BatchMode yes\n"
    _write(first, LAB_DIRECTORY / "ssh_config", known)
    processes = []
    for node in nodes:
        _run(node, [sys.executable, "-I", "-S", "-c", _PREPARE, str(Path(__file__).parent)])
        configuration = _DIRECTORY / f"{node.name}.conf"
        _write(node, configuration, _configuration(node))
        processes.append(
            node.popen(
                [sshd, "-D", "-e", "-f", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    for node, process in zip(nodes, processes, strict=True):
        answer = first.run([sys.executable, "-c", _ANSWERS, node.name, str(_TIMEOUT)])
        if answer.returncode:
            said = process.poll()
            raise LabError(
                f"sshd in {node.name} does not answer within {_TIMEOUT:g} s"
                + ("" if said is None else f": it ended with status {said}"),
                f"see what it says: {sshd} -D -e -f {_DIRECTORY}/{node.name}.conf in a lab's shell",
            )
    return processes


def _configuration(node: Node) -> str:
    """sshd's. Sessions get the node's environment, as /etc/environment would give it."""
    lines = [
        "Port 22",
        "ListenAddress 0.0.0.0",
        f"HostKey {_DIRECTORY}/host_key",
        f"AuthorizedKeysFile {_DIRECTORY}/user_key.pub",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PrintMotd no",
        "UseDNS no",
        "MaxStartups 1000",
        "MaxSessions 1000",
    ]
    pairs = [
        f'"{name}={value}"'
        for name, value in node.environment().items()
        if name not in _NOT_PASSED and not set(value) & set('"\\\n\r')
    ]
    return "\n".join([*lines, f"SetEnv {' '.join(pairs)}"]) + "\n"


def _run(node: Node, argv: list[str], text: str | None = None) -> None:
    done = node.run(argv, input=text, timeout=_TIMEOUT)
    if done.returncode:
        raise LabError(f"{argv[0]} failed in {node.name}: {done.stderr.strip()}")


def _write(node: Node, path: Path, text: str) -> None:
    _run(node, [sys.executable, "-I", "-S", "-c", _WRITE, str(path)], text)
