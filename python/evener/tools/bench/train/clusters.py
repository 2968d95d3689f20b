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

from evener.base.ports import free_port
from evener.comm.world.ranks import detect
from evener.errors import EvenerError, UsageError

OnLine = Callable[[int, str, str], None]
"""Called with (rank, stream, line) for every line that a slot prints."""

_GRACE_S = 5.0


class Cluster(Protocol):
    """Something that can start a command once a slot."""

    nodes: int
    slots: int
    # For each node, where they differ; `slots` is then the first one's.
    sizes: tuple[int, ...]

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
        """Read it from `env`, where torchrun's variables must be. Raises UsageError."""
        ranks = detect(env)
        if "MASTER_ADDR" not in env or ranks.local_rank is None or ranks.local_size is None:
            raise UsageError(
                "MASTER_ADDR or a rank variable is not set: the ranks cannot find each other",
                "start it by torchrun, evener launch or mpirun, or give --lab",
            )
        return Given(
            rank=ranks.rank,
            world=ranks.size,
            local_rank=ranks.local_rank,
            local_world=ranks.local_size,
            # NCCL's own name for a host that is not one: simulated nodes differ by it.
            host=env.get("NCCL_HOSTID") or socket.gethostname(),
            address=env["MASTER_ADDR"],
            port=int(env.get("MASTER_PORT", "29500")),
            store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def variables(self) -> dict[str, str]:
        """The same as torchrun would put it into the environment of an agent."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Loopback:
    """Processes of this machine: nodes by name only, nothing between them but the loopback."""

    sizes: tuple[int, ...] = ()

    def __init__(self, nodes: int, slots: int, why: str = "") -> None:
        """`why`: what kept a lab from being made, where one was asked for."""
        self.nodes, self.slots, self.why = nodes, slots, why

    def describe(self) -> dict[str, Any]:
        found = {"kind": "loopback", "nodes": self.nodes, "slots": self.slots}
        return {**found, "why": self.why} if self.why else found

    def run(self, argv: Sequence[str], on_line: OnLine, timeout: float) -> int:
        port = free_port("127.0.0.1")
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

    sizes: tuple[int, ...] = ()

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
        process = start(argv, {**os.environ, **self.given.variables()})
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
    return [sys.executable, "-m", "evener.tools.bench.train.agent", plan_json]


def count_gpus(env: Mapping[str, str]) -> int:
    """NVIDIA GPUs that this process may use, without waking a driver or torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
