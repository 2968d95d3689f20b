"""Where the agents run: in a lab, as loopback processes, or in the ranks that a launcher gave.

A cluster starts `argv` once a slot and hands every line that comes out to `on_line`; how the
agents then work together is theirs (agent.py). No torch here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from evener.errors import EvenerError, UsageError

OnLine = Callable[[int, str, str], None]
"""Called with (rank, stream, line) for every line that a slot prints."""

_GRACE_S = 5.0


class Cluster(Protocol):
    """Something that can start a command once a slot."""

    nodes: int
    slots: int

    def describe(self) -> dict[str, Any]:
        """What it is, for the results."""

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        """Start `argv` on every slot, wait, return the first failing status or 0."""


@dataclass(frozen=True)
class Given:
    """One rank's place, as its launcher put it in the environment."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    address: str
    port: int
    store_is_served: bool

    @staticmethod
    def detect(env: Mapping[str, str]) -> Given:
        """Read it from `env`. Raises UsageError where no launcher left anything there."""
        family = next((f for f in _FAMILIES if f[0] in env and f[1] in env), None)
        if family is None:
            raise UsageError(
                "no launcher's variables (RANK, WORLD_SIZE, ...) are in the environment",
                "start it by torchrun, evener launch or mpirun, or give --lab",
            )
        rank, size, local_rank, local_size = family
        if "MASTER_ADDR" not in env:
            raise UsageError(
                "MASTER_ADDR is not set: the ranks cannot find rank 0",
                "pass it on, for instance mpirun -x MASTER_ADDR=<rank 0's host> ...",
            )
        world = int(env[size])
        return Given(
            rank=int(env[rank]),
            world=world,
            local_rank=int(env.get(local_rank, "0")),
            local_world=int(env.get(local_size, str(world))),
            # NCCL's own name for a host that is not one: simulated nodes differ by it.
            host=env.get("NCCL_HOSTID") or socket.gethostname(),
            address=env["MASTER_ADDR"],
            port=int(env.get("MASTER_PORT", "29500")),
            store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @staticmethod
    def is_there(env: Mapping[str, str]) -> bool:
        """Whether a launcher started this process as one of several."""
        return any(
            rank in env and env.get(size, "1") not in ("", "1") for rank, size, _, _ in _FAMILIES
        )


_FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)


class Loopback:
    """Processes of this machine: nodes by name only, nothing between them but the loopback."""

    def __init__(self, nodes: int, slots: int, why: str = "") -> None:
        """`why`: what kept a lab from being made, where one was asked for."""
        self.nodes, self.slots, self.why = nodes, slots, why

    def describe(self) -> dict[str, Any]:
        found = {"kind": "loopback", "nodes": self.nodes, "slots": self.slots}
        return {**found, "why": self.why} if self.why else found

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        port = _free_port()
        processes: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            for rank in range(self.nodes * self.slots):
                node, slot = divmod(rank, self.slots)
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.nodes * self.slots),
                    "LOCAL_RANK": str(slot),
                    "LOCAL_WORLD_SIZE": str(self.slots),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                }
                if self.nodes > 1:
                    env["NCCL_HOSTID"] = f"node{node}"
                process = start(argv, env)
                processes.append(process)
                readers += read_lines(process, rank, on_line)
            return wait_for_all(processes, timeout)
        finally:
            stop(processes)
            for reader in readers:
                reader.join(timeout=_GRACE_S)


class Ranks:
    """The ranks that the user's own launcher started; this process is one of them.

    Every rank calls `run`; each starts its own agent, and the agents find each other.
    """

    def __init__(self, given: Given) -> None:
        if given.world % given.local_world:
            raise UsageError(
                f"{given.world} ranks do not divide into nodes of {given.local_world}",
                "start the same number of ranks on every node",
            )
        self.given = given
        self.nodes, self.slots = given.world // given.local_world, given.local_world

    def describe(self) -> dict[str, Any]:
        return {"kind": "ranks", "nodes": self.nodes, "slots": self.slots}

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        process = start(argv, dict(os.environ))
        readers = read_lines(process, self.given.rank, on_line)
        try:
            return wait_for_all([process], timeout)
        finally:
            stop([process])
            for reader in readers:
                reader.join(timeout=_GRACE_S)


def start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start one agent, in a session of its own so that it can be stopped with all it started."""
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def read_lines(
    process: subprocess.Popen[str], rank: int, on_line: OnLine
) -> list[threading.Thread]:
    """Threads that hand on what the process prints, until it closes its ends."""

    def read(stream: IO[str], name: str) -> None:
        for line in stream:
            on_line(rank, name, line.rstrip("\n"))

    threads = []
    for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
        assert stream is not None
        thread = threading.Thread(target=read, args=(stream, name), daemon=True)
        thread.start()
        threads.append(thread)
    return threads


def wait_for_all(processes: Sequence[subprocess.Popen[str]], timeout: float) -> int:
    """0 when all have ended well, else the first status that is not 0, without the others' end."""
    deadline = time.monotonic() + timeout
    while True:
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0]
        if all(status == 0 for status in statuses):
            return 0
        if time.monotonic() > deadline:
            raise EvenerError(
                f"the benchmark was not done after {timeout:.0f} s",
                "give a longer --timeout, fewer columns or fewer --repeats",
            )
        time.sleep(0.1)


def stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End what still runs: politely, then not."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        if all(process.poll() is not None for process in processes):
            return


def agent_argv(plan_json: str) -> list[str]:
    """The command line of one agent."""
    return [sys.executable, "-m", "evener.bench.train.agent", plan_json]


def count_gpus(env: Mapping[str, str]) -> int:
    """NVIDIA GPUs that this process may use, without waking a driver or torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
