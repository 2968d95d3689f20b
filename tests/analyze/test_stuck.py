"""Runs that hung or failed: the right rank and the right kind, whatever form the evidence has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import incidents as made

from evener.tools.analyze import collect, document, page, picture, run_checks, terminal
from evener.tools.analyze.findings import Finding
from evener.tools.analyze.report.verdict import verdict


def ask(tmp_path: Path, *texts: object, names: tuple[str, ...] = ()) -> tuple[str, list[Finding]]:
    """The verdict and the findings on some files."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / (names[number] if names else f"{number}.log"))
        if isinstance(text, bytes):
            paths[-1].write_bytes(text)
        else:
            lines = text.split("\n") if isinstance(text, str) else list(text)  # type: ignore[call-overload]
            paths[-1].write_text("\n".join(lines) + "\n")
    result = picture(collect(paths))
    findings = run_checks(result)
    document(result, findings)
    page(result, findings)
    terminal(result, findings)
    return verdict(result, findings), findings


def waiting(ranks: range | list[int], seq: int = 77, **more: object) -> list[str]:
    return [line for rank in ranks for line in made.watchdog(rank, seq, **more)]  # type: ignore[arg-type]


# --- hangs ---


@pytest.mark.parametrize("style", made.STYLES)
@pytest.mark.parametrize("wrap", sorted(made.WRAPS))
def test_the_rank_that_is_silent(style: str, wrap: str, tmp_path: Path) -> None:
    lines = ["world size: 4", *waiting([0, 1, 3], style=style, op="ALLREDUCE")]
    said, findings = ask(tmp_path, made.WRAPS[wrap](lines))
    assert "rank 2 never joined ALLREDUCE 77" in said
    assert findings[0].id == "cause.missing-rank"
    assert findings[0].confidence == "inferred"


@pytest.mark.parametrize("style", ["2.3", "2.4", "2.6", "2.9"])
def test_the_rank_that_is_behind_by_its_own_numbers(style: str, tmp_path: Path) -> None:
    lines = waiting([0, 1, 2], 51, style=style) + made.watchdog(3, 50, style=style)
    said, findings = ask(tmp_path, lines)
    assert "rank 3 is behind" in said
    assert findings[0].confidence == "measured"


@pytest.mark.parametrize("style", made.STYLES)
def test_the_rank_that_ran_another_operation(style: str, tmp_path: Path) -> None:
    lines = waiting([0, 2, 3], 9, style=style) + made.watchdog(1, 9, "ALLGATHER", 1, style)
    said, findings = ask(tmp_path, lines)
    assert "rank 1 ran ALLGATHER where ranks 0, 2-3 ran ALLREDUCE" in said
    assert findings[0].id == "cause.mismatch"


def test_the_ranks_that_brought_another_size(tmp_path: Path) -> None:
    lines = waiting([0, 1, 4, 5, 6, 7], 9) + waiting([2, 3], 9, numel=99)
    said, _ = ask(tmp_path, lines)
    assert "ranks 2 and 3 brought other sizes" in said
    assert "99 elements" in said
    lines = waiting([0, 1, 2], 9, op="ALLTOALL") + waiting([3], 9, op="ALLTOALL", numel=99)
    assert "other sizes" not in ask(tmp_path, lines)[0]


def test_two_ranks_that_differ_are_not_told_apart(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path, made.watchdog(0, 9, "ALLGATHER") + made.watchdog(1, 9, "ALLREDUCE")
    )
    assert findings[0].id == "cause.mismatch"
    assert "ranks 0 and 1 ran different collectives" in said
    assert "No majority" in findings[0].detail


def test_everybody_inside_is_not_blamed_on_a_rank(tmp_path: Path) -> None:
    said, findings = ask(tmp_path, ["world_size=4", *waiting(range(4))])
    assert findings[0].id == "cause.inside"
    assert "all 4 ranks" in said
    assert "dmesg" in findings[0].command


def test_most_ranks_silent_is_not_decided(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path, ["torchrun --nnodes=2 --nproc-per-node=8 t.py", *waiting([3, 9])]
    )
    assert findings[0].id == "run.hung"
    assert "2 ranks of 16" in said
    assert "not decided" in said


def test_one_wait_counts_once_however_many_lines_tell_it(tmp_path: Path) -> None:
    said, _ = ask(tmp_path, ["world size 64", *waiting([1, 2], style="2.9")])
    assert "2 ranks of 64" in said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["[rank0]:[E1 P.cpp:1] Rank 0",
             "\t - [0] Timeout at collective: ALLREDUCE, #15",
             "\t   - [5] finished collective #11, but didn't join collective #12 (count from 1)"],
            ("rank 5", "12"),
        ),
        (["RuntimeError: [Rank 0]: Ranks 2, 6 failed to pass monitoredBarrier in 600000 ms"],
         ("ranks 2 and 6",)),
        (["RuntimeError: Rank 3 failed to pass monitoredBarrier in 30000 ms"], ("rank 3",)),
    ],
)  # fmt: skip
def test_reports_that_name_the_ranks(
    lines: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    said, findings = ask(tmp_path, lines)
    assert findings[0].id == "cause.missing-rank"
    assert all(word in said for word in words)


def test_the_check_of_torch_names_two(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path,
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 4 is running "
        "collective: "
        "CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[5]), but Rank "
        "0 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=12, "
        "OpType=BROADCAST).Collectives "
        "differ in the following aspects: Op type: ALLREDUCEvs BROADCAST",
    )
    assert findings[0].id == "cause.mismatch"
    assert "ranks 0 and 4" in said


@pytest.mark.parametrize("old", [True, False])
def test_heartbeats_alone(old: bool, tmp_path: Path) -> None:
    lines = [line for r, n in enumerate((40, 40, 31, 40)) for line in made.heartbeat(r, n, old=old)]
    said, findings = ask(tmp_path, lines)
    assert "rank 2 stopped first" in said
    assert "watchdog" in said
    assert findings[0].confidence == "inferred"
    same = [line for rank in range(4) for line in made.heartbeat(rank, 40)]
    said = ask(tmp_path, same)[0]
    assert "watchdog is stuck on ranks 0-3 for 480 s: what blocks it is not decided" in said
    assert "timed out" not in said  # no collective is known that did


# --- flight recorders ---

ALL = {"0": ("default_pg", [0, 1, 2, 3])}
FORMS = ("pickle", "pickle4", "json")
VERSIONS = ("1.5", "2.1", "2.3", "2.5", "2.10")


def dumps(
    tmp_path: Path, per_rank: dict[int, list[dict]], groups: dict = ALL, **more: str
) -> object:
    version, form = more.get("version", "2.10"), more.get("form", "pickle")
    mine = {rank: {name: g for name, g in groups.items() if rank in g[1]} for rank in per_rank}
    texts = [
        made.dumped(made.recorder(entries, mine[rank], version), form)
        for rank, entries in per_rank.items()
    ]
    end = ".json" if form == "json" else ""
    names = tuple(f"nccl_trace_rank_{rank}{end}" for rank in per_rank)
    return ask(tmp_path, *texts, names=names)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_dump_without_the_operation(version: str, form: str, tmp_path: Path) -> None:
    frames = [("torch/distributed/distributed_c10d.py", 10), ("app/step.py", 31)]
    per_rank = {
        rank: [made.entry(1), made.entry(2)]
        + ([] if rank == 3 else [made.entry(3, "_all_gather_base", 8, "scheduled", frames=frames)])
        for rank in range(4)
    }
    said, findings = dumps(tmp_path, per_rank, version=version, form=form)  # type: ignore[misc]
    assert "rank 3 never joined _all_gather_base 3" in said
    assert "app/step.py:31" in findings[0].detail
    assert findings[0].confidence == "measured"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_dump_with_another_size(version: str, odd: int, tmp_path: Path) -> None:
    per_rank = {
        rank: [made.entry(1), made.entry(2, size=8 if rank == odd else 64, state="started")]
        for rank in range(4)
    }
    said, _ = dumps(tmp_path, per_rank, version=version)  # type: ignore[misc]
    assert f"rank {odd} brought other sizes" in said


def test_a_dump_with_another_operation_or_type(tmp_path: Path) -> None:
    per_rank = {
        rank: [
            made.entry(1),
            made.entry(2, "broadcast" if rank == 0 else "all_reduce", state="started"),
        ]
        for rank in range(4)
    }
    assert "rank 0 ran broadcast" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]
    per_rank = {
        rank: [made.entry(2, dtype="Half" if rank == 1 else "Float", state="started")]
        for rank in range(4)
    }
    assert "rank 1 brought another type" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]


def test_dumps_in_which_everybody_is_inside(tmp_path: Path) -> None:
    per_rank = {r: [made.entry(1), made.entry(2, state="started")] for r in range(4)}
    assert "all 4 ranks" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]
    per_rank.pop(3)
    said, findings = dumps(tmp_path, per_rank)  # type: ignore[misc]
    assert "rank 3 never joined all_reduce 2" in said
    assert "timed out" not in said  # no dump says so
    assert "rank 3 left no dump" in findings[0].detail
    per_rank.pop(2)
    assert "not decided" in dumps(tmp_path, per_rank)[0]  # type: ignore[index]


def test_the_wait_goes_on_in_another_group(tmp_path: Path) -> None:
    groups = {**ALL, "1": ("tp", [2, 3])}
    at = 5_000_000
    per_rank = {
        0: [made.entry(1), made.entry(2, state="scheduled", created=at)],
        1: [made.entry(1), made.entry(2, state="scheduled", created=at)],
        2: [made.entry(1), made.entry(7, group="1", desc="tp", state="scheduled", created=at)],
        3: [made.entry(1), made.entry(6, group="1", desc="tp")],
    }
    said, _ = dumps(tmp_path, per_rank, groups)  # type: ignore[misc]
    assert "rank 3 never joined" in said
    assert "ranks 2" not in said


def test_a_deadlock_of_two_groups(tmp_path: Path) -> None:
    groups = {"1": ("a", [0, 1]), "2": ("b", [0, 1])}
    per_rank = {
        0: [made.entry(1, group="1", desc="a", state="scheduled")],
        1: [made.entry(1, group="2", desc="b", state="scheduled")],
    }
    said, findings = dumps(tmp_path, per_rank, groups)  # type: ignore[misc]
    assert findings[0].id == "cause.deadlock"
    assert "ranks 0 and 1" in said


def test_a_message_that_was_never_sent(tmp_path: Path) -> None:
    groups = {"0": ("default_pg", [0, 1])}
    per_rank = {
        0: [made.entry(1), made.entry(2, "recv 0<-1", state="scheduled", p2p=True)],
        1: [made.entry(1)],
    }
    assert "rank 1 never joined recv 0<-1" in dumps(tmp_path, per_rank, groups)[0]  # type: ignore[index]


# --- roots of failures ---


@pytest.mark.parametrize(
    "error",
    ["ValueError: batch of size 0", "KeyError: 'labels'", "FileNotFoundError: [Errno 2] No such "
                                                          "file "
     "or directory: '/data/17.bin'", "torch.OutOfMemoryError: CUDA out of memory. Tried to "
                                     "allocate "
     "2.00 GiB.", "AssertionError", "MyPackage.errors.BadSample: sample 7",
     "RuntimeError: CUDA error: device-side assert triggered"],
)  # fmt: skip
@pytest.mark.parametrize("wrap", ["plain", "docker", "kubectl", "gcp", "journald", "time"])
def test_the_root_among_those_that_follow(error: str, wrap: str, tmp_path: Path) -> None:
    lines = []
    for rank in range(8):
        lines += made.traceback(rank, error if rank == 5 else made.GONE[rank % len(made.GONE)])
    lines += made.torchrun([(r, 1, 900 + r) for r in range(1, 8)], (0, 1, 900))
    said, findings = ask(tmp_path, made.WRAPS[wrap](lines))
    assert "rank 5 raised" in said
    assert error.split(":")[0].rsplit(".", 1)[-1] in said
    assert "/srv/app/train.py:128" in said
    assert findings[0].root


def test_a_hang_that_an_exception_made(tmp_path: Path) -> None:
    lines = made.traceback(2, "ValueError: nan in loss") + waiting([0, 1, 3])
    said, findings = ask(tmp_path, lines)
    assert said.startswith("The run failed: rank 2 raised ValueError")
    assert "waited for it" in findings[0].detail


def test_what_a_victim_raises_after_its_watchdog_is_no_root(tmp_path: Path) -> None:
    lines = waiting([0, 1, 3]) + made.traceback(0, "RuntimeError: bad state of the saver")
    said, _ = ask(tmp_path, lines)
    assert "rank 2 never joined" in said


def test_the_same_error_everywhere_is_the_programs(tmp_path: Path) -> None:
    lines = [x for r in range(8) for x in made.traceback(r, "ImportError: no module named flash")]
    said, findings = ask(tmp_path, lines)
    assert "8 ranks raised ImportError" in said
    assert "the same on all" in findings[0].detail


KILLS = (
    made.torchrun([(1, 1, 902)], (0, -9, 901)),
    ["mpirun noticed that process rank 0 with PID 901 on node node-b exited on signal 9 (Killed)."],
    ["srun: error: node-b: task 0: Out Of Memory", "slurmstepd: error: Detected 1 oom_kill "
                                                   "event in "
     "StepId=77.0. Some of the step tasks have been OOM Killed."],
    ["[812.100000] Memory cgroup out of memory: Killed process 901 (python3) total-vm:9kB"],
    ["    Last State:     Terminated", "      Reason:       OOMKilled", "      Exit Code:    137"],
    ["JobID           State ExitCode     MaxRSS", "------------ ---------- -------- ----------",
     "77.0         OUT_OF_ME+    0:125  201000M"],
)  # fmt: skip


@pytest.mark.parametrize("lines", KILLS)
def test_host_memory(lines: list[str], tmp_path: Path) -> None:
    more = [x for r in (1, 2, 3) for x in made.traceback(r, made.GONE[0])]
    said, findings = ask(tmp_path, [*more, *lines])
    assert findings[0].id == "cause.killed"
    assert "memory" in said
    assert "GPU" not in said
    if "rank" in " ".join(lines) or "task 0" in " ".join(lines):
        assert "rank 0 was killed" in said


@pytest.mark.parametrize(
    ("line", "id", "words"),
    [
        ("[9.000001] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has "
         "fallen "
         "off the bus.", "cause.gpu", ("3b:00", "off the bus")),
        ("May  2 03:11:09 node-c kernel: NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable "
         "double bit error (DBE) has been detected on GPU", "cause.gpu", ("node-c", "ECC")),
        ("[Mon Jun  3 02:14:07 2024] NVRM: Xid (PCI:0000:3b:00): 74, pid=7, NVLink: fatal error "
         "detected on link 3", "cause.gpu", ("NVLink",)),
        ("NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=python, Timeout after 6s of waiting for RPC "
         "response from GPU0 GSP!", "cause.gpu", ("GSP",)),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008, MMU Fault: ENGINE "
         "GRAPHICS",
         "cause.gpu-program", ("memory fault",)),
        ("nvidia-nvswitch3: SXid (PCI:0000:8a:00.0): 20034, Fatal, Link 31 LTSSM Fault Up",
         "cause.gpu", ("NVSwitch", "8a:00")),
    ],
)  # fmt: skip
def test_xids(line: str, id: str, words: tuple[str, ...], tmp_path: Path) -> None:
    more = made.traceback(3, "RuntimeError: CUDA error: unspecified launch failure")
    more += [x for r in (1, 2) for x in made.traceback(r, made.GONE[0])]
    later = "NVRM: Xid (PCI:0000:5e:00): 45, pid=8, Ch 1"
    said, findings = ask(tmp_path, more, [line, later])
    assert findings[0].id == id
    assert all(word in said for word in words)
    assert "Xid 45" not in said


def test_an_xid_names_its_rank(tmp_path: Path) -> None:
    comm = [
        f"n:70{r}:80{r} [{r}] NCCL INFO ncclCommInitRank comm 0x5{r} rank {r} nranks 2 cudaDev {r} "
        f"nvmlDev {r} busId {bus}000 commId 0x9 - Init COMPLETE"
        for r, bus in enumerate(("3b", "af"))
    ]
    said, _ = ask(tmp_path, comm, "NVRM: Xid (PCI:0000:af:00): 95, pid='<unknown>', Uncontained")
    assert "(rank 1)" in said


def test_smi_shows_the_state(tmp_path: Path) -> None:
    text = """==============NVSMI LOG==============
Attached GPUs                             : 2
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    ECC Errors
        Volatile
            DRAM Uncorrectable            : 0
    Remapped Rows
        Pending                           : No
        Remapping Failure Occurred        : No
GPU 00000000:AF:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Remapped Rows
        Pending                           : Yes
        Remapping Failure Occurred        : No
"""
    said, findings = ask(tmp_path, text)
    assert findings[0].id == "cause.gpu-state"
    assert "af:00" in said
    assert "3b:00" not in said


@pytest.mark.parametrize(
    ("lines", "id", "words"),
    [
        (["[W220 19:02:31.6 socket.cpp:464] [c10d] The server socket has failed to bind to "
          "[::]:29777 "
          "(errno: 98 - Address already in use)."], "cause.port-in-use", ("29777",)),
        (["RuntimeError: The server socket has failed to listen on any local network address. "
          "port: "
          "29777, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use"],
         "cause.port-in-use", ("29777",)),
        (["[E514 05:28:06.1 socket.cpp:1023] [c10d] The client socket has timed out after "
          "60000ms while "
          "trying to connect to (10.1.2.3, 29400)."], "cause.rendezvous", ("10.1.2.3:29400",)),
        (["[W socket.cpp:663] [c10d] The client socket has failed to connect to "
          "[gpu-0.example]:29400 "
          "(errno: 111 - Connection refused)."], "cause.rendezvous",
         ("gpu-0.example:29400", "refuses")),
        (["[W socket.cpp:697] [c10d] The IPv4 network addresses of (trainer-master, 23456) "
          "cannot be "
          "retrieved (gai error: -2 - Name or service not known)."], "cause.host-name",
         ("trainer-master",)),
        (["torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 "
          "clients joined."], "cause.rendezvous", ("3 of 4",)),
        (["  rdzv_endpoint    : node-a.example:29512",
          "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to "
          "the C10d store has failed."], "cause.rendezvous",
         ("node-a.example:29512", "cannot be reached")),
        (["  rdzv_endpoint    : 10.1.2.3", "RuntimeError: connect() timed out."],
         "cause.rendezvous", ("10.1.2.3", "does not answer")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrap", ["plain", "docker", "kubectl", "cri"])
def test_the_rendezvous(
    lines: list[str], id: str, words: tuple[str, ...], wrap: str, tmp_path: Path
) -> None:
    said, findings = ask(tmp_path, made.WRAPS[wrap](lines))
    assert findings[0].id == id
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("No such device", ("No such device",)),
        ("110 Connection timed out, on dev mlx5_2:1, curr state INIT, next state RTR, local GID "
         "index "
         "3, local GID ::ffff:10.0.0.1, remote GID ::ffff:10.0.0.2", ("mlx5_2", "110")),
        ("101 Network is unreachable, on dev mlx5_2:1", ("101",)),
        ("Invalid argument", ("Invalid argument",)),
    ],
)  # fmt: skip
def test_queue_pairs_are_no_story_of_tcp(
    error: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    text = [
        f"n:1:2 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error {error}",
        "n:1:2 [0] NCCL INFO transport/net_ib.cc:579 -> 2",
        "n:1:2 [0] NCCL INFO proxy.cc:1306 -> 2",
        "n:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer "
        "n<9>",
    ]
    said, findings = ask(tmp_path, text)
    assert findings[0].id == "network.ib-qp"
    assert all(word in said for word in words)
    shown = " ".join(f.title + f.detail + f.command for f in findings)
    assert "NCCL_SOCKET_IFNAME" not in shown


@pytest.mark.parametrize(
    ("warning", "id"),
    [
        ("transport/net_ib.cc:95 NCCL WARN NET/IB : Got async event : port error",
         "network.ib-port"),
        ("transport/net_ib.cc:136 NCCL WARN NET/IB : mlx5_0:1 Got async error event: port error",
         "network.ib-port"),
        ("transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'", "network.nvls"),
        ("transport/nvls.cc:157 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory "
         "of size "
         "2097152 : CUDA error 401 'the operation cannot be performed in the present state'",
         "network.nvls"),
        ("mnnvl.cc:40 NCCL WARN MNNVL (cliqueSize 0) not available but NCCL_MNNVL_ENABLE=1",
         "cause.mnnvl"),
        ("init.cc:90 NCCL WARN Cuda failure 802 'system not yet initialized'",
         "network.fabric-manager"),
        ("nccl_ofi_init.c:1 NCCL WARN NET/OFI Unable to find a protocol that worked. Failing "
         "initialization", "network.efa"),
    ],
)  # fmt: skip
def test_causes_that_warnings_name(warning: str, id: str, tmp_path: Path) -> None:
    text = [
        f"n:1:2 [0] {warning}",
        "n:1:2 [0] NCCL INFO init.cc:1306 -> 1",
        "n:3:4 [1] transport/net_ib.cc:1252 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.2<4> "
        "with error 12, opcode 0, len 0, vendor err 129",
        "n:3:4 [1] NCCL INFO proxy.cc:858 -> 6",
    ]
    if id != "network.ib-port":
        text = text[:2]
    _, findings = ask(tmp_path, text)
    assert findings[0].id == id
    assert "NCCL_IB_GID_INDEX=3" not in " ".join(f.command for f in findings)


def test_a_bus_error_is_shared_memory(tmp_path: Path) -> None:
    for line in (
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is "
        "possible that "
        "dataloader's workers are out of shared memory.",
        "Fatal Python error: Bus error",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).",
    ):
        said, findings = ask(tmp_path, line)
        assert findings[0].id == "host.shm-full", said


# --- RAS and Inspector ---


def ras(counts: dict[int, int], op: str = "AllReduce", named: str = "few") -> dict[str, object]:
    del named
    return {
        "nccl_version": "2.28.7",
        "communicators": [
            {
                "hash": "0xabc", "size": len(counts), "ranks_count": len(counts),
                "missing_ranks_count": 0, "missing_ranks": [],
                "ranks": [
                    {"rank": r, "host": "n", "pid": 7, "collective_counts": {op: c, "Broadcast": 3}}
                    for r, c in counts.items()
                ],
            }
        ],
        "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
    }  # fmt: skip


def test_ras_once_and_twice(tmp_path: Path) -> None:
    counts = {rank: 20 if rank != 5 else 19 for rank in range(8)}
    one = json.dumps(ras(counts))
    said, findings = ask(tmp_path, one)
    assert "Rank 5 is 1 AllReduce behind" in said
    assert "no proof" in findings[0].detail
    said, findings = ask(tmp_path, one, one)
    assert findings[0].severity == "problem"
    assert "stands still" in said
    moved = json.dumps(ras({r: c + 9 for r, c in counts.items()}))
    _, findings = ask(tmp_path, one, moved)
    assert findings[0].severity == "note"


def test_ras_names_the_dead(tmp_path: Path) -> None:
    document = ras({0: 5, 1: 5})
    document["communicators"][0]["missing_ranks"] = [  # type: ignore[index]
        {"rank": 2, "host": "n-3", "status": {"unresponsive": True, "considered_dead": True}}
    ]
    said, _ = ask(tmp_path, json.dumps(document, indent=1))
    assert "rank 2 is dead" in said.lower()
    text = """Job summary
===========

Errors
======

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
"""
    said, _ = ask(tmp_path, text)
    assert "rank 21" in said.lower()


def test_a_rank_that_is_late_in_most(tmp_path: Path) -> None:
    lines = []
    for seq in range(20):
        for rank in range(4):
            micros = 5000 if rank == 2 and seq % 5 else 9000 + 10 * rank
            lines.append(
                json.dumps(
                    {
                        "header": {"id": "0x1", "rank": rank, "n_ranks": 4, "nnodes": 1},
                        "metadata": {"hostname": "n-1", "pid": 7 + rank},
                        "coll_perf": {
                            "coll": "AllReduce",
                            "coll_sn": seq,
                            "coll_exec_time_us": micros,
                            "coll_msg_size_bytes": 1 << 20,
                        },
                    }
                )
            )
    said, findings = ask(tmp_path, lines)
    assert "rank 2" in said.lower()
    assert findings[0].id == "cause.straggler"
    even = [line.replace(": 5000", ": 9000") for line in lines]
    _, findings = ask(tmp_path, even)
    assert not findings


# --- what costs speed is no reason for a hang ---


def test_a_finding_on_speed_is_never_the_reason(tmp_path: Path) -> None:
    from nccl_logs import Job, job

    text = job(Job("2.21.5", direct=False)).splitlines() + waiting([0, 1], 5)
    said, findings = ask(tmp_path, text)
    assert "collective did not end" in said
    assert "GPUDirect" not in said
    assert any(f.id == "network.gpudirect-off" and not f.root for f in findings)
    shown = terminal(picture(collect([tmp_path / "0.log"])), findings)
    assert shown.index("Also seen") < shown.index("GPUDirect")


@pytest.mark.parametrize(
    "text",
    [
        "epoch 3 took 71 s, timed out requests: 0\n",
        "saving checkpoint; rank 0 waits at the barrier\n",
        "[rank0]:[W214 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
        "destroyed before we destruct ProcessGroupNCCL.\n",
        "WARNING: out of memory killer is disabled in this image\n",
        "W0220 19:02:31 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment "
        "variable for "
        "each process to be 1 in default\n",
    ],
)
def test_harmless_lines_are_no_reason(text: str, tmp_path: Path) -> None:
    from nccl_logs import Job, job

    said, findings = ask(tmp_path, job(Job("2.28.9")) + text)
    assert not [f for f in findings if f.root], said


@pytest.mark.parametrize(
    "more",
    [" [missing ranks: 1, 4]\n", "\nMissing ranks:\n1: [grad_0, grad_1]\n4: [grad_0]\n",
     "\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:1: [grad_0]\n[1,0]<stderr>:4: [grad_0]\n"],
)  # fmt: skip
def test_horovods_stall_names_ranks_and_is_no_end(more: str, tmp_path: Path) -> None:
    line = (
        "[1,0]<stderr>:[x: W stall_inspector.cc:105] One or more tensors were submitted to be "
        "reduced, "
        "gathered or broadcasted by subset of ranks"
    )
    said, findings = ask(tmp_path, line + more)
    assert [f.id for f in findings] == ["run.stalled"]
    assert "ranks 1 and 4" in said


def test_gloo_tells_by_exceptions(tmp_path: Path) -> None:
    late = made.GONE[5]
    lines = ["world size 4", *[x for r in (0, 1, 3) for x in made.traceback(r, late)]]
    said, _ = ask(tmp_path, lines)
    assert "rank 2 never joined" in said
    lines = ["world size 4", *[x for r in (0, 1) for x in made.traceback(r, late)]]
    lines += [x for r in (2, 3) for x in made.traceback(r, made.GONE[1])]
    said, _ = ask(tmp_path, lines)
    assert "never joined" not in said


def test_a_rank_that_ran_ahead(tmp_path: Path) -> None:
    lines = waiting([0, 1, 2], 100) + made.watchdog(3, 101, "ALLGATHER")
    said, findings = ask(tmp_path, lines)
    assert "rank 3 left the order" in said
    assert findings[0].confidence == "inferred"


def test_an_address_of_one_host_alone_is_named(tmp_path: Path) -> None:
    warn = "n7:31:99 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to {} failed : "
    said, findings = ask(tmp_path, warn.format("fe80::7:1%veth93<4001>") + "Connection timed out")
    assert "rank cannot connect to another one at veth93" in said
    assert "NCCL_SOCKET_IFNAME=^veth93" in findings[0].command
    for other in ("fe80::7:1%ib1<4001>", "10.0.0.7<4001>"):
        said = ask(tmp_path, warn.format(other) + "Connection timed out")[0]
        assert "rank cannot connect to another one" in said
        assert "one host alone" not in said


@pytest.mark.parametrize(
    "end", ["is killed by signal: Segmentation fault. ", "exited unexpectedly"]
)
def test_a_data_loaders_worker_that_ended(end: str, tmp_path: Path) -> None:
    text = f"RuntimeError: DataLoader worker (pid 4117) {end}"
    said, findings = ask(tmp_path, made.traceback(2, text))
    end = end.strip(". ").replace("is killed", "was killed")
    assert f"a data loader's worker of rank 2 {end} (process 4117). " in said
    assert [finding.id for finding in findings] == ["cause.exception"]  # the rank did not crash
    assert "num_workers=0" in findings[0].do


def test_the_size_of_a_group_is_read_off_what_it_gathers(tmp_path: Path) -> None:
    """Two of eight ranks: that the one between them is missing is not known."""
    lines = [x for r in (0, 2) for x in made.watchdog(r, 5, "ALLGATHER", 1, numel_out=8)]
    assert "not decided" in ask(tmp_path, lines)[0]
    lines = [x for r in (0, 2) for x in made.watchdog(r, 5, "ALLGATHER", 1, numel_out=3)]
    assert "rank 1 never joined ALLGATHER 5" in ask(tmp_path, lines)[0]


def test_the_error_of_a_data_loaders_worker(tmp_path: Path) -> None:
    lines = made.traceback(
        1, "RuntimeError: Caught FileNotFoundError in DataLoader worker process 3."
    )
    lines += [
        "[rank1]: Original Traceback (most recent call last):",
        '[rank1]:   File "/srv/app/data.py", line 33, in __getitem__',
        "[rank1]:     with open(path) as file:",
        "[rank1]: FileNotFoundError: [Errno 2] No such file or directory: '/mnt/7.jpg'",
    ]
    said, _ = ask(tmp_path, lines)
    assert "rank 1 raised FileNotFoundError" in said
    assert "/srv/app/data.py:33" in said


def test_what_cpp_threw_is_the_root_unless_it_follows(tmp_path: Path) -> None:
    def thrown(rank: int, what: str) -> list[str]:
        head = f"[rank{rank}]: terminate called after throwing an instance of 'c10::Error'"
        return [head, f"[rank{rank}]:   what():  {what}"]

    lost = made.traceback(0, made.GONE[1])
    said, _ = ask(tmp_path, [*lost, *thrown(2, "pool INTERNAL ASSERT FAILED at x.cpp:64")])
    assert "rank 2 raised c10::Error: pool INTERNAL ASSERT FAILED" in said
    after = thrown(2, "[Rank 2] Process group watchdog thread terminated with exception: x")
    assert "c10::Error" not in ask(tmp_path, [*lost, *after])[0]
    own = [*made.traceback(2, "ValueError: no batch"), *thrown(2, "mutex is destroyed")]
    said, findings = ask(tmp_path, own)
    assert "rank 2 raised ValueError: no batch" in said
    assert findings[0].confidence == "measured"


def test_a_step_that_slurm_cancelled(tmp_path: Path) -> None:
    lines = [
        "45%|###  | 3/7 [00:15<00:23]slurmstepd: error: *** STEP 88.0 ON n3 CANCELLED AT "
        "2026-02-14T11:00:08 ***",
        "srun: error: n3: task 0: Terminated",
    ]
    assert "Slurm cancelled step 88.0" in ask(tmp_path, lines)[0]
    said, findings = ask(tmp_path, [*made.traceback(1, "ValueError: no batch"), *lines])
    assert "rank 1 raised ValueError" in said  # it follows
    assert "cause.stopped" not in [finding.id for finding in findings]


def test_a_traceback_without_a_rank_gets_the_launchers(tmp_path: Path) -> None:
    lines = made.traceback(0, "IndexError: 7", prefix="") + made.torchrun([], (2, 1, 77))
    said, findings = ask(tmp_path, lines)
    assert "rank 2 raised IndexError" in said
    assert findings[0].confidence == "inferred"


@pytest.mark.parametrize(
    "line",
    ["[ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', 'train.py', '--local_rank=3'] "
     "exits "
     "with return code = -9",
     "subprocess.CalledProcessError: Command '['x.py']' died with <Signals.SIGKILL: 9>.",
     "container exited with code 137",
     "prterun noticed that process rank 5 with PID 882 on node n2 exited on\nsignal 9 (Killed)."],
)  # fmt: skip
def test_other_launchers_say_that_it_was_killed(line: str, tmp_path: Path) -> None:
    _, findings = ask(tmp_path, line)
    assert findings[0].id == "cause.killed"


def test_messages_have_numbers_of_their_own(tmp_path: Path) -> None:
    lines = ["world_size: 3", *made.watchdog(1, 7, "RECV"), *made.watchdog(0, 8, "SEND")]
    lines += made.watchdog(2, 7, "RECV")
    said, findings = ask(tmp_path, lines)
    assert findings[0].id == "run.hung"
    assert "not decided" in said


def test_one_silent_rank_among_several_groups(tmp_path: Path) -> None:
    lines = ["world_size=8", *waiting([0, 1, 2], 50, group="mesh_shard", style="2.6")]
    lines += waiting([4, 5, 6, 7], 91, group="mesh_replicate", style="2.6")
    said, findings = ask(tmp_path, lines)
    assert "rank 3 never joined a collective" in said
    assert findings[0].confidence == "inferred"
    lines = [x for x in lines if "rank2" not in x]
    said, _ = ask(tmp_path, lines)
    assert "6 ranks of 8" in said
    assert "not decided" in said


def test_torchruns_error_file(tmp_path: Path) -> None:
    stack = "\n".join(made.traceback(0, "ValueError: bad", prefix=""))
    text = json.dumps(
        {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": stack}}}
    )
    said, _ = ask(tmp_path, text)
    assert "raised ValueError: bad" in said


def test_a_job_that_was_told_to_end(tmp_path: Path) -> None:
    said, findings = ask(
        tmp_path,
        made.traceback(
            0, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 41 got "
               "signal: 15",
            prefix="",
        ),
    )  # fmt: skip
    assert findings[0].id == "cause.stopped"
    assert "SIGTERM" in said


@pytest.mark.parametrize(
    "group", ["[PG 0 (default_pg) Rank 3]", "[PG ID 0 PG GUID 0(default_pg) Rank 3]"]
)
def test_a_rank_that_was_told_of_the_hang_says_what_it_enqueued(group: str, tmp_path: Path) -> None:
    told = (
        f"[rank3]:[E909 09:55:47.0 ProcessGroupNCCL.cpp:1709] {group} Received a dump signal due "
        "to a collective timeout from rank 1 and we will try our best to dump the debug info. Last "
        "enqueued NCCL work: 76, last completed NCCL work: 76."
    )
    said, found = ask(tmp_path, [*waiting([0, 1, 2]), told])
    assert "rank 3 is behind" in said
    assert found[0].confidence == "measured"


def test_a_name_that_does_not_resolve_is_why_the_connection_fails(tmp_path: Path) -> None:
    said, _ = ask(
        tmp_path,
        [
            "[W1204 18:12:05.2 socket.cpp:752] [c10d] The IPv4 network addresses of (head-0, "
            "29400) cannot be retrieved (gai error: -2 - Name or service not known).",
            "[E1204 18:13:01.2 socket.cpp:1019] [c10d] The client socket has failed to connect to "
            "any network address of (head-0, 29400).",
        ],
    )
    assert "the rendezvous' host name 'head-0' does not lead to the store" in said


@pytest.mark.parametrize(
    "wrap",
    ["trainer-{r}-1  | {0}", "trainer-{r} pytorch {0}", "worker-{r}: {0}",
     "2026-01-01 10:00:0{r},123 - launcher - ERROR - {0}",
     'ts=2026-01-01T10:00:0{r}Z level=error pod=w-{r} msg="{1}"',
     '2026-01-01 10:00:0{r},w-{r},"{2}"'],
)  # fmt: skip
def test_a_traceback_behind_a_prefix_that_is_not_known(wrap: str, tmp_path: Path) -> None:
    both = [
        [f"[rank{r}]: Traceback (most recent call last):",
         f'[rank{r}]:   File "/srv/app/train.py", line {7 + r}, in <module>',
         f"[rank{r}]:     main()", f"[rank{r}]: {error}"]
        for r, error in ((1, "KeyError: 'label'"), (2, "RuntimeError: Connection closed by peer"))
    ]  # fmt: skip
    lines = [
        wrap.format(text, text.replace('"', '\\"'), text.replace('"', '""'), r=1 + n % 2)
        for n, text in enumerate(text for pair in zip(*both, strict=True) for text in pair)
    ]
    said, _ = ask(tmp_path, lines)
    assert "rank 1 raised KeyError: 'label' at /srv/app/train.py:8" in said
