"""Start the two processes of a measurement and collect what they say."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from evener.errors import EvenerError
from evener.tools.lab import Lab


class BenchError(EvenerError):
    """A measurement has failed."""


@dataclass(frozen=True)
class Job:
    """What to measure. `plugin`: a path, or empty for plain TCP streams, `streams` a comm each way
    (of several, each has threads of its own). `sizes`: bytes of a message (of an all-reduce where
    `pattern` is "ring" and not "steady"), separated by commas. `seconds`: about how long a size
    takes. `engine`: a value of EVENER_NET_ENGINE, or empty for that of the caller. `until`: if
    not empty, a steady run lasts until this file is there, and `seconds` is for the trial."""

    plugin: str
    comms: int = 2
    depth: int = 4
    sizes: str = "8,65536,1048576"
    seconds: float = 1.0
    verify: bool = False
    pattern: str = "steady"
    streams: int = 1
    engine: str = ""
    until: str = ""

    def text(self) -> str:
        """As the peer's argument."""
        return json.dumps(dataclasses.asdict(self))


Rows = list[dict[str, float]]


def command(job: Job) -> list[str]:
    """The command line of one side."""
    return [sys.executable, "-m", "evener.tools.bench.net.peer", job.text()]


def merge(lines: list[str]) -> Rows:
    """One row a size from the two sides' answers: the slower figures, both sides' processor time.

    `cpu_per_gb` counts the bytes of all messages, or of the data that all-reduces summed.
    Raises BenchError where a side gave no answer.
    """
    answers = []
    for line in lines:
        if line.startswith('{"rank"'):
            answers.append(json.loads(line))
    if len(answers) != 2:
        raise BenchError("one side of the measurement gave no answer", "see its output above")
    answers.sort(key=lambda answer: int(answer["rank"]))
    rows = []
    for first, second in zip(answers[0]["rows"], answers[1]["rows"], strict=True):
        row = dict(first)
        row["bandwidth"] = min(first["bandwidth"], second["bandwidth"])
        row["latency_us"] = max(first["latency_us"], second["latency_us"])
        row["stall"] = max(first["stall"], second["stall"])
        if "fairness" in first:
            row["fairness"] = min(first["fairness"], second["fairness"])
        row["cpu_seconds"] = first["cpu_seconds"] + second["cpu_seconds"]
        ways = 2 if answers[0]["pattern"] == "steady" else 1
        moved = ways * row["messages"] * row["size"] / 1e9
        row["cpu_per_gb"] = row["cpu_seconds"] / moved if moved else 0.0
        rows.append(row)
    return rows


def medians(samples: list[Rows]) -> Rows:
    """For each size, the run of median bandwidth, with the `least` and `most` of all runs."""
    rows = []
    for same in zip(*samples, strict=True):
        ordered = sorted(same, key=lambda row: row["bandwidth"])
        least, most = ordered[0]["bandwidth"], ordered[-1]["bandwidth"]
        rows.append({**ordered[(len(ordered) - 1) // 2], "least": least, "most": most})
    return rows


def in_lab(lab: Lab, job: Job, timeout: float, faults: list[str] | None = None) -> Rows:
    """Measure between the two nodes of a lab. Raises BenchError."""
    lines: list[str] = []
    errors: list[str] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        del rank, node
        (lines if stream == "stdout" else errors).append(line)

    if faults:
        lab.schedule(*faults)
    result = lab.launch(command(job), timeout=timeout, on_line=on_line)
    if not result.ok:
        detail = "; ".join(errors[-3:]) or "no output"
        raise BenchError(f"rank {result.rank} ended with status {result.status}: {detail}")
    return merge(lines)


def local(job: Job, timeout: float) -> Rows:
    """Measure between two processes over loopback. Raises BenchError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EVENER_NET_IFNAME": "=lo",
    }
    processes = [
        subprocess.Popen(
            command(job),
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines, problems = [], []
    try:
        for rank, process in enumerate(processes):
            out, error = process.communicate(timeout=timeout)
            lines += out.splitlines()
            if process.returncode:
                problems.append(f"rank {rank} ended with status {process.returncode}: {error}")
    except subprocess.TimeoutExpired:
        problems.append(f"no end after {timeout:g} s")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if problems:
        raise BenchError("; ".join(problems))
    return merge(lines)
