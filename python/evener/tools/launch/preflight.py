"""Look at every host before a job starts: seconds and a line, not a rank that never comes.

All hosts are asked at once (`probe`). Each says what it has, then dials the first host and the next
one, at the names by which ranks would, while all of them listen:

    here                     each host
    name, ssh port   dial >
    question         ssh  >  versions, script, disk, ports; a port that listens
    whom to dial          >  what answered
    end of input          >  the port is free again

What a job cannot run with is raised, every finding at once, a line each: the host, what was tried,
what to change. What a job may run with, and rarely should, is a warning.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from evener.base import interfaces, ssh
from evener.errors import EvenerError
from evener.tools.launch import probe
from evener.tools.launch.hosts import Host

_DIAL = 2.5  # seconds for one TCP connection
_ANSWER = 6.0  # for a host's answer, where --start-timeout does not say otherwise
_HERE = 30.0  # for this host's: no network can be at fault, it is only busy
_PASSED = ("PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # what the answers depend on
_LEAST_MB = 50  # of disk for what torchrun and the ranks write to /tmp


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what was seen, and what to change."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


class HostError(EvenerError):
    """One host or more cannot be used: `findings` has a line for each reason."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        if len(findings) == 1:
            super().__init__(findings[0].problem, findings[0].fix)
        else:
            lines = "\n".join(f"  {finding}" for finding in findings)
            super().__init__(f"{len(findings)} things keep this job from starting:\n{lines}")


@dataclass(frozen=True)
class Seen:
    """What a job may start with. address, port: where its ranks can meet."""

    address: str
    port: int
    interfaces: dict[str, set[str]]
    warnings: tuple[str, ...]


def look(
    hosts: Sequence[Host],
    local: set[str],
    rsh: tuple[str, ...],
    command: Sequence[str],
    cwd: Path,
    env: dict[str, str],
    address: str,
    port: int | None,
    needs_torch: bool,
    patience: float | None = None,
) -> Seen:
    """Ask `hosts`, of which `local` are this one, and try their connections.

    `address`, `port`: where rank 0 is to be met; port None: any. `needs_torch`: for torchrun, which
    is a part of it. `patience`: seconds for a host's answer. Raises HostError with everything that
    is wrong.
    """
    question = {
        "script": script(command),
        "module": module(command),
        "program": command[0],
        "path": env.get("PATH"),
        "port": port,
    }
    calls = [
        _Call(host, remote, rsh, cwd, question, env, patience or (_ANSWER if remote else _HERE))
        for host, remote in ((host, host.name not in local) for host in hosts)
    ]
    if len(calls) == 1 and not calls[0].remote:
        calls[0].ask_here()
    try:
        with ThreadPoolExecutor(max(len(calls), 1)) as pool:
            list(pool.map(_Call.ask, [call for call in calls if not call.facts]))
        answered = [call for call in calls if call.facts]
        found = [call.finding for call in calls if call.finding]
        found += [one for call in answered for one in _alone(call, command, port, needs_torch)]
        found += _together(answered)
        if len(answered) == len(calls) and len(calls) > 1:
            address, unreached = _connect(calls, address)
            found += unreached
    finally:
        for call in calls:
            call.end()
    if found:
        raise HostError(found)
    return Seen(
        address,
        port or int(calls[0].facts["port"]),
        {call.name: set(call.facts["interfaces"]) for call in calls},
        tuple(line for call in calls for line in _doubts(call)),
    )


def script(command: Sequence[str]) -> str | None:
    """The file that COMMAND runs by `python FILE`; None where it is a module, code, or unknown."""
    if not Path(command[0]).name.startswith("python"):
        return command[0] if command[0].endswith((".py", ".sh")) else None
    how, what = _runs(command)
    return what if how == "" else None


def module(command: Sequence[str]) -> str:
    """The module that COMMAND runs by `python -m MODULE`; "" where it runs none."""
    how, what = _runs(command) if Path(command[0]).name.startswith("python") else ("", "")
    return what or "" if how == "m" else ""


def _runs(command: Sequence[str]) -> tuple[str, str | None]:
    """What Python is given: ("m", a module), ("c", code) or ("", a file); None where nothing."""
    words = iter(command[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif not word.startswith("-"):
            return "", word
        elif word.endswith(("c", "m")) and not word.startswith("--"):
            return word[-1], next(words, None)
    return "", None


class _Call:
    """One host that is asked: a process of ssh, or of this host, that waits for questions."""

    def __init__(
        self,
        host: Host,
        remote: bool,
        rsh: tuple[str, ...],
        cwd: Path,
        question: dict[str, Any],
        env: dict[str, str],
        patience: float,
    ) -> None:
        self.host, self.name, self.remote = host, host.name, remote
        self.facts: dict[str, Any] = {}
        self.finding: Finding | None = None
        self.names: list[str] = [host.name.strip("[]").rpartition("@")[2]] if remote else []
        self._rsh, self._cwd, self._question, self._env = rsh, cwd, question, env
        self._patience = patience
        self._process: subprocess.Popen[str] | None = None
        self._said: list[str] = []

    def ask(self) -> None:
        """Fill `facts`, or `finding` with why there are none."""
        if self.remote and Path(self._rsh[0]).name == "ssh":
            self._dial_sshd()
        if self.finding is None:
            self._start()

    def ask_here(self) -> None:
        """The same without a process of its own, where there is only this host."""
        listening: list[socket.socket] = []
        try:
            self.facts = probe.facts(self._question, listening)
        finally:
            for server in listening:
                server.close()

    def _dial_sshd(self) -> None:
        """Resolve the name as ssh does, and try its port: sooner and plainer than ssh itself."""
        try:
            said = subprocess.run(
                [*self._rsh, "-G", self.name], capture_output=True, text=True, timeout=5
            )
        except (OSError, subprocess.TimeoutExpired):
            return  # ssh itself says why
        known = dict(line.partition(" ")[::2] for line in said.stdout.splitlines())
        if "hostname" not in known:
            return
        target, port = known["hostname"], int(known.get("port", 22))
        through = [
            known[k] for k in ("proxyjump", "proxycommand") if known.get(k, "none") != "none"
        ]
        if through:
            return
        if target not in self.names:
            self.names.append(target)
        how = target if target == self.names[0] else f"{target}, which ~/.ssh/config names"
        failed = probe.dial(target, port, _DIAL)
        if failed:
            problem, fix = {
                "resolve": (
                    f"the name {how} does not resolve",
                    "check its spelling; else put it into DNS, /etc/hosts or ~/.ssh/config",
                ),
                "refused": (
                    f"{how} answers, and no sshd listens on port {port}",
                    "start sshd there, or name its port: --ssh-port",
                ),
            }.get(
                failed,
                (
                    f"{how} did not answer on port {port} within {_DIAL:g} s",
                    f"check that it runs, its address, and the firewall (ping {target})",
                ),
            )
            self.finding = Finding(f"host {self.name}: {problem}", fix)

    def _start(self) -> None:
        argv = [sys.executable, "-m", probe.__name__]
        if self.remote:
            # A shell there may have no PYTHONPATH, as the ranks' guard sets it.
            passed = {n: self._env[n] for n in _PASSED if n in self._env}
            words = ["env", *(f"{n}={v}" for n, v in passed.items()), *argv]
            argv = [
                *self._rsh,
                self.name,
                f"cd {shlex.quote(str(self._cwd))} && {shlex.join(words)}",
            ]
        pipe = subprocess.PIPE
        end = time.monotonic() + self._patience
        try:
            self._process = subprocess.Popen(
                argv, cwd=self._cwd, env=self._env, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.finding = Finding(
                f"{argv[0]} cannot be run: {error.strerror}", "install openssh-client"
            )
            return
        assert self._process.stderr is not None
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()
        self.facts = self.tell(self._question, end) or {}
        if not self.facts and self.finding is None:
            self.finding = self._why(time.monotonic() >= end)

    def _listen(self, stream: IO[str]) -> None:
        self._said.extend(line.rstrip() for line in stream if line.strip())

    def tell(self, what: Any, end: float) -> Any:
        """The answer to `what`; None where none came until `end`."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        answers: list[Any] = []

        def read() -> None:
            assert self._process is not None and self._process.stdout
            for line in self._process.stdout:  # a shell's greeting may come first
                if line.startswith(probe.MARK):
                    answers.append(json.loads(line[len(probe.MARK) :]))
                    return
                if line.startswith('{"hostname"'):  # as older versions answered
                    self.finding = Finding(
                        f"host {self.name} has an older Evener than this host",
                        "install the same one on every host",
                    )
                    return

        with contextlib.suppress(OSError):  # it has ended: `_why` says of what
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(end - time.monotonic(), 0.1))
        return answers[0] if answers else None

    def _why(self, late: bool) -> Finding:
        """What the process said in vain."""
        assert self._process is not None
        if late:
            if not self.remote:
                return Finding(
                    f"this host did not start {Path(sys.executable).name} within "
                    f"{self._patience:g} s",
                    "check what keeps it busy (top), or wait longer: --start-timeout 60",
                )
            return Finding(
                f"host {self.name} did not answer within {self._patience:g} s "
                f"({shlex.join(self._rsh)})",
                f"check it by hand (ssh {self.name} true), or wait longer: --start-timeout 60",
            )
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            status = 0
        time.sleep(0.05)  # the reader of its messages may be behind
        said = self._said[-1] if self._said else "(nothing)"
        if "No module named" in said or status in (126, 127):
            return Finding(
                f"host {self.name} cannot run Evener with {sys.executable}: {said}",
                "install the same environment at the same path on every host",
            )
        if any("cd:" in line for line in self._said):
            return Finding(
                f"host {self.name} has no folder {self._cwd}, or you may not enter it: {said}",
                "put the job's folder on all hosts at the same path, or on a shared file system",
            )
        if why := ssh.cause("\n".join(self._said), self.name):
            return Finding(f"host {self.name} cannot be reached: {why[0]} ({said})", why[1])
        by = shlex.join([*self._rsh, self.name, "true"])
        return Finding(
            f"host {self.name} cannot be reached by {shlex.join(self._rsh)}: {said}",
            f"make `{by}` work without a password first",
        )

    def end(self) -> None:
        """Let it go: the probe ends with its standard input."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(0.5 if self.facts else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- what the answers mean ---


def _alone(
    call: _Call, command: Sequence[str], port: int | None, needs_torch: bool
) -> list[Finding]:
    """What is wrong with one host."""
    facts, where, found = call.facts, f"host {call.name}", []
    if facts["script"] and facts["digest"] is None:
        found.append(
            Finding(
                f"{where} has no file {facts['script']} that you may read",
                "check its name, or put it on all hosts at the same path",
            )
        )
    if facts["no_module"]:
        found.append(
            Finding(
                f"{where} has no module {facts['no_module']} for python -m",
                "check its name, install it there, or start in the folder that has it",
            )
        )
    if facts["program"] is None:
        fix = f"write `python {command[0]}`" if command[0].endswith(".py") else "check its name"
        found.append(Finding(f"{where} has no command {command[0]!r} on its PATH", fix))
    if facts["port"] == 0:
        found.append(
            Finding(
                f"{where}: port {port} cannot be listened on: {facts['port_error']}",
                "leave --master-port out (Evener takes a free one), or name another",
            )
        )
    if needs_torch and facts["torch"] == "none":
        found.append(
            Finding(
                f"{where} has no torch in the environment of this Evener ({sys.executable})",
                "pip install 'evener[torch]', or the build of torch for your GPU",
            )
        )
    if facts["scratch"]:
        found.append(
            Finding(f"{where}: {facts['scratch']}", "give the job's user a /tmp to write to")
        )
    elif facts["free_mb"] < _LEAST_MB:
        found.append(
            Finding(
                f"{where}: {facts['free_mb']} MB of disk are free in /tmp, a job needs {_LEAST_MB}",
                "make room there",
            )
        )
    return found


_SAME = {
    "evener": ("Evener", "install the same wheel on every host"),
    "python": ("Python", "make the same environment on every host"),
    "torch": ("torch", "install the same torch on every host"),
    "nccl": ("NCCL", "install the same torch, which brings NCCL, on every host"),
    "digest": ("", "copy the file to every host, or use a shared file system"),
    "gpu": ("GPUs", "check its driver (nvidia-smi), or leave it out"),
}


def _together(calls: Sequence[_Call]) -> list[Finding]:
    """What differs between hosts, beside the first one."""
    if not calls:
        return []
    first, found = calls[0], []
    for call in calls[1:]:
        for key, (what, fix) in _SAME.items():
            mine, theirs = first.facts[key], call.facts[key]
            if mine == theirs or (key == "digest" and None in (mine, theirs)):
                continue
            if key == "digest":
                problem = f"{call.facts['script']} differs on hosts {first.name} and {call.name}"
            else:
                problem = f"host {call.name} has {what} {theirs}, host {first.name} {mine}"
            found.append(Finding(problem, fix))
    return found


def _doubts(call: _Call) -> list[str]:
    """What a job may start with and rarely should."""
    gpus = int(call.facts["gpus"])
    if 0 < gpus < call.host.slots:
        many = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        return [
            f"host {call.name} has {many} and gets {call.host.slots} ranks; "
            f"-np or {call.name}:{gpus} gives each rank its own"
        ]
    return []


def _connect(calls: Sequence[_Call], address: str) -> tuple[str, list[Finding]]:
    """Let each host dial the first and the next one: (the first's address, what did not answer).

    The first host's names are tried in turn: the one given, what ssh makes of it, its addresses.
    The first that all hosts reach is where ranks meet.
    """
    first = calls[0]
    names = list(dict.fromkeys([address, *_addresses(first)]))
    jobs: list[list[dict[str, Any]]] = []
    for index in range(len(calls)):
        nearby = calls[(index + 1) % len(calls)]
        wanted = [{"names": _addresses(nearby), "port": nearby.facts["open"]}]
        if index:
            wanted.append({"names": names, "port": first.facts["port"]})
        jobs.append(wanted)
    end = time.monotonic() + 2 * _DIAL + 1
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(
            pool.map(lambda pair: pair[0].tell(pair[1], end), zip(calls, jobs, strict=True))
        )
    found, ways = [], set(names)
    for index, (call, wanted, answer) in enumerate(zip(calls, jobs, answers, strict=True)):
        nearby = calls[(index + 1) % len(calls)]
        answer = answer or [{}] * len(wanted)
        if index:
            reached = {name for name, why in answer[1].items() if not why}
            ways &= reached
            if not reached:
                found.append(_silent(call, first, wanted[1], answer[1]))
                continue
        if all(answer[0].values()) and not (nearby is first and index):
            found.append(_silent(call, nearby, wanted[0], answer[0]))
    if not found and not ways:
        found.append(
            Finding(
                f"no address of host {first.name} is reached by all hosts: {', '.join(names)}",
                "name the first host in -H by an address that every host reaches",
            )
        )
    return next((name for name in names if name in ways), address), found


def _addresses(call: _Call) -> list[str]:
    """How others may call a host: its names, then its addresses."""
    own = [a for a in call.facts["addresses"] if not interfaces.is_loopback(a)]
    return list(dict.fromkeys([*call.names, *own]))


def _silent(call: _Call, other: _Call, wanted: dict[str, Any], why: dict[str, str]) -> Finding:
    port = wanted["port"]
    tried = ", ".join(wanted["names"])
    reasons = set(why.values())
    if reasons <= {"resolve"} and reasons:
        return Finding(
            f"host {call.name} does not know the name {tried} of host {other.name}",
            f"put it into DNS or /etc/hosts of {call.name}, or name {other.name} by its address",
        )
    said = "was refused" if reasons == {"refused"} else f"had no answer within {_DIAL:g} s"
    return Finding(
        f"host {call.name} dialled {tried}, port {port}, of host {other.name}, and {said}",
        "open all TCP ports between the hosts of the job: a firewall or a route is in the way",
    )
