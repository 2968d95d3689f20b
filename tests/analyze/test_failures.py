"""Runs that failed: the root among all that follows from it, in the words of many programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answers import ask, waiting
from tests import incidents as made


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
