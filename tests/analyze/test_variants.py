"""The same incident in other clothes: the verdict must not change.

Operators have what a launcher, a collector and a person left: lines behind prefixes or in JSON (in
JSON), progress bars between them, a healthy first attempt before them, files in any order, packed,
in other encodings, of hosts with other names. One seed draws which of these an incident gets.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import incidents as made
from tests.analyze.nccl_logs import Job, job

from evener.tools.analyze import collect, picture, run_checks
from evener.tools.analyze.report.verdict import verdict

Files = list[tuple[str, bytes]]
HOST = "birch-7"
INFO = f"{HOST}:31:77 [0] NCCL INFO "


def _hung(ranks: list[int], seq: int = 77) -> list[str]:
    return [line for rank in ranks for line in made.watchdog(rank, seq)]


def _inspector() -> list[str]:
    return [
        f'{{"header": {{"id": "0x1", "rank": {rank}, "n_ranks": 4}}, "metadata": {{"hostname": '
        f'"{HOST}"}}, "coll_perf": {{"coll": "AllReduce", "coll_sn": {seq}, "coll_msg_size_bytes": '
        f'65536, "coll_exec_time_us": {100 if rank == 2 else 900 + rank}}}}}'
        for seq in range(30)
        for rank in range(4)
    ]


INCIDENTS: dict[str, tuple[list[list[str]], str]] = {
    "missing rank": ([["world size: 4", *_hung([0, 1, 3])]], "rank 2 never joined ALLREDUCE 77"),
    "behind": ([[*_hung([0, 1, 2]), *made.watchdog(3, 70)]], "rank 3 is behind"),
    "heartbeat": (
        [[line for r, n in enumerate((40, 40, 31, 40)) for line in made.heartbeat(r, n)]],
        "rank 2 stopped first",
    ),
    "memory": (
        [made.torchrun([(1, 1, 11)], (0, -9, 10), HOST)],
        f"rank 0 was killed on {HOST}: SIGKILL",
    ),
    "exception": (
        [[*made.traceback(1, "ValueError: odd batch"), *made.traceback(0, made.GONE[0])]],
        "rank 1 raised ValueError: odd batch",
    ),
    "port": (
        [["[W220 19:02:31.6 socket.cpp:464] [c10d] The server socket has failed to bind to "
          "[::]:29777 (errno: 98 - Address already in use)."]],
        "port 29777 is already in use",
    ),
    "nvls": (
        [[f"{HOST}:31:77 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'not now'",
          INFO + "transport/nvls.cc:409 -> 1", INFO + "init.cc:1218 -> 1",
          INFO + "group.cc:64 -> 1 [Async thread]"]],
        "NVLink SHARP (NVLS, multicast) cannot be set up",
    ),
    "flapping port": (
        [[f"{HOST}:31:77 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_2:1 Got async event : "
          "port error",
          "oak-1:9:9 [0] transport/net_ib.cc:99 NCCL WARN NET/IB : Got completion from peer "
          "10.1.0.7<4> with error 12, opcode 0, len 0, vendor err 129"]],
        f"{HOST}: the port of a card went down",
    ),
    "xid": (
        [["[ 77.123456] NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus."],
         made.traceback(3, "RuntimeError: CUDA error: unspecified launch failure")],
        "Xid 79 on the GPU at 9b:00",
    ),
    "straggler": ([_inspector()], "ank 2"),
    "matrix": (
        [["        GPU0 GPU1 NIC0 CPU Affinity", "GPU0     X   SYS  PIX  0-7",
          "GPU1    SYS   X   SYS  8-15", "NIC0    PIX  SYS   X"]],
        "No NVLink joins the GPUs",
    ),
}  # fmt: skip


def _wrapped(rng: random.Random, data: bytes) -> bytes:
    lines = data.decode().splitlines()
    for _ in range(rng.randint(1, 2)):  # collectors stand in a row
        lines = made.WRAPS[rng.choice(["docker", "kubectl", "cri", "gcp", "time"])](lines)
    return ("\n".join(lines) + "\n").encode()


def _harmless(rng: random.Random, data: bytes) -> bytes:
    warnings = [
        "zeta-9:7:7 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        "zeta-9:7:7 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)",
        "[W socket.cpp:663] [c10d] The client socket cannot be initialized to connect to "
        "[localhost]:29511 (errno: 97 - Address family not supported by protocol).",
        "ImportError: no module named fancy, going on without it",
    ]
    rng.shuffle(warnings)
    return ("\n".join([*warnings[: rng.randint(1, 4)], *["step"] * 120]) + "\n").encode() + data


def _healthy(rng: random.Random, data: bytes) -> bytes:
    del rng
    return job(Job("2.21.5", hosts=("zeta-9",), gpus=2, channels=2)).encode() + data


def _progress(rng: random.Random, data: bytes) -> bytes:
    lines = []
    for line in data.splitlines(keepends=True):
        lines.append(line)
        if rng.random() < 0.2:
            lines.append(f"\r {rng.randint(1, 99)}%|###  | 5/9 [00:10<00:12,  4.5it/s]\n".encode())
    return b"".join(lines)


TEXT: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "progress": _progress, "healthy": _healthy, "harmless": _harmless, "wrapped": _wrapped,
    "crlf": lambda _, data: data.replace(b"\n", b"\r\n"),
    "renamed": lambda _, data: data.replace(HOST.encode(), b"n0123"),
    "utf-16": lambda _, data: data.decode().encode("utf-16"),
    "gzip": lambda _, data: gzip.compress(data),
}  # fmt: skip


def said(folder: Path, files: Files) -> str:
    """The verdict on some files."""
    folder.mkdir()
    for name, data in files:
        (folder / name).write_bytes(data)
    result = picture(collect([folder / name for name, _ in files]))
    return verdict(result, run_checks(result))


def original(incident: str) -> tuple[Files, str]:
    """The files of an incident, and what the verdict must hold."""
    parts, expected = INCIDENTS[incident]
    return [
        (f"{n}.log", ("\n".join(lines) + "\n").encode()) for n, lines in enumerate(parts)
    ], expected


@pytest.mark.parametrize("incident", sorted(INCIDENTS))
def test_the_verdict_does_not_change(incident: str, tmp_path: Path) -> None:
    rng = random.Random(incident)
    for number in range(14):
        files, expected = original(incident)
        kinds = [kind for kind in TEXT if rng.random() < 0.35]
        for kind in kinds:
            files = [(name, TEXT[kind](rng, data)) for name, data in files]
        rng.shuffle(files)
        wanted = expected.replace(HOST, "n0123") if "renamed" in kinds else expected
        assert wanted in said(tmp_path / str(number), files), kinds


def test_a_change_of_the_evidence_changes_the_verdict(tmp_path: Path) -> None:
    changed = 0
    for incident in INCIDENTS:
        files, expected = original(incident)
        halved = [(name, b"\n".join(data.splitlines()[1::2]) + b"\n") for name, data in files]
        changed += expected not in said(tmp_path / incident, halved)
    assert changed >= len(INCIDENTS) // 2
