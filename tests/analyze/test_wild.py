"""Kinds of reports that people file in the wild, each as the smallest text that has it.

The lines are written from the formats, with names and values of ours; docs/benchmarks/
analyze-public-logs.md lists the public texts that each kind was met in.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evener.tools.analyze import collect, document, page, picture, run_checks, terminal
from evener.tools.analyze.findings import Finding
from evener.tools.analyze.report.verdict import verdict

HEAVY = "reef:11:41 [0] "
CUDA = "include/alloc.h:102 NCCL WARN Cuda failure "
GAVE_UP = "reef:11:41 [0] NCCL INFO init.cc:1300 -> 1\nreef:11:41 [0] NCCL INFO group.cc:64 -> 1"
NVLS = (
    f"{HEAVY}transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'\n"
    "reef:11:41 [0] NCCL INFO transport/nvls.cc:409 -> 1"
)
STARTED = (
    "reef:11:41 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId "
    "8000 commId 0xab - Init START"
)
CLIQUE = "reef:11:41 [0] NCCL INFO MNNVL 1 cliqueId 7f cliqueSize 2 cliqueRank 0"


def ask(tmp_path: Path, text: str) -> tuple[str, list[Finding], str]:
    """The verdict, the findings and all that the terminal shows."""
    path = tmp_path / "log"
    path.write_text(text + "\n")
    result = picture(collect([path]))
    findings = run_checks(result)
    document(result, findings)
    page(result, findings)
    return verdict(result, findings), findings, terminal(result, findings)


KINDS = [
    # What torch's bare result means, and what to set.
    ("torch.distributed.DistBackendError: NCCL error in: ../P.cpp:1333, unhandled system error, "
     "NCCL version 2.18.1", "ncclSystemError", "NCCL_DEBUG=INFO"),
    ("[rank5]: torch.distributed.DistBackendError: NCCL error in: P.cpp:9, invalid usage, NCCL "
     "version 2.20.5", "ncclInvalidUsage on rank 5", "two ranks on one GPU"),
    ("ncclSystemError: System call failed\nLast error:\n\nException raised from f at P.cpp:1",
     "ncclSystemError", "its log, which says why, is not here"),
    # CUDA.
    (f"{HEAVY}{CUDA}35 'CUDA driver version is insufficient for CUDA runtime version'\n{GAVE_UP}",
     "driver does not fit", "nvidia-smi | head"),
    ("Cuda failure common.cu:891 'CUDA driver version is insufficient for CUDA runtime version'",
     "driver does not fit", ""),
    ("reef: Test HIP failure common.cu:1129 'hipErrorInvalidDevice'", "has no GPU", "/dev/kfd"),
    (f"{HEAVY}{CUDA}711 'peer mapping resources exhausted'\n{GAVE_UP}", "more than 8 peers", ""),
    (f"{HEAVY}transport/p2p.cc:256 NCCL WARN hipIpcGetMemHandle failed : invalid argument\n"
     f"{GAVE_UP}", "cannot share GPU memory", "--ipc=host"),
    (f"{HEAVY}{CUDA}700 'an illegal memory access was encountered'\n{GAVE_UP}",
     "kernel failed", "Xid"),
    (f"{HEAVY}{CUDA}214 'uncorrectable ECC error encountered'\n{GAVE_UP}", "broken", "RMA|replace"),
    (f"{HEAVY}{CUDA}999 'unknown error'\n{GAVE_UP}", "CUDA does not start", "nvidia_uvm"),
    (f"{HEAVY}{CUDA}904 'an odd thing'\n{GAVE_UP}", "an odd thing", "nvidia-smi"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device",
     "no kernel image", "get_arch_list"),
    # A watchdog that meets an error of the GPU is no hang.
    ("[rank2]:[E P.cpp:9] [Rank 2] NCCL watchdog thread terminated with exception: CUDA error: an "
     "illegal memory access was encountered\n"
     "[rank0]:[E P.cpp:5] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
     "7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds "
     "before timing out.", "The run failed: rank 2 raised CUDA error: an illegal", "waited for it"),
    # Ranks that do not agree.
    (f"{HEAVY}transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.3.0.2<5> collective"
     " mismatch error, local size 4096 remote size 512", "different sizes .4096 bytes here, 512",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    (f"{HEAVY}bootstrap.cc:77 NCCL WARN Message truncated : received 256 bytes instead of 4",
     "do not agree while they set up", "NCCL version"),
    (f"{HEAVY}init.cc:9 NCCL WARN Mismatched NCCL version detected : rank 1", "different versions",
     ""),
    # Gloo.
    ("Traceback (most recent call last):\n  File \"/job/loop.py\", line 31, in step\n    dist.x()\n"
     "RuntimeError: [/p/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"
     " 1800000ms for recv operation to complete", "did not end: .* at /job/loop.py:31", ""),
    ("RuntimeError: [/p/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
     "[10.3.0.2]:4711", "peer closed its connection .Gloo", "ranks"),
    ("RuntimeError: Gloo connectFullMesh failed with [/p/gloo/transport/tcp/pair.cc:144] no error",
     "Gloo cannot connect", "GLOO_SOCKET_IFNAME"),
    ("\n".join(f"[E ProcessGroupGloo.cpp:138] Rank {rank} successfully reached monitoredBarrier, "
               "but received errors while waiting for send/recv from rank 0." for rank in (1, 2)),
     "rank 0 never joined BARRIER", ""),
    ("[rank0]:[E G.cpp:1] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 30000 ms\n"
     "[rank1]:[E G.cpp:1] Rank 1 successfully reached monitoredBarrier, but received errors while "
     "waiting for send/recv from rank 0.", "not decided", "says that it came"),
    # Horovod.
    ("tensors were submitted to be reduced, gathered or broadcasted by subset of ranks. Stalled "
     "ops: loss [ready ranks: 3], grad.0 [ready ranks: 2, 0, 1]",
     "Rank 3 and ranks 0-2 wait in different tensors", ""),
    # RDMA outside of NCCL, and more of its errors.
    ('C++ exception "ibv_modify_qp failed (errno 19) (Ib failure: No such device)"',
     "queue pair .*No such device", "GID"),
    (f"{HEAVY}transport/net_ib.cc:154 NCCL WARN NET/IB : mlx5_1:1 async fatal event on QP (0x7): "
     "invalid request local work queue error\n"
     f"{HEAVY}transport/net_ib.cc:20 NCCL WARN NET/IB: Got completion from peer 10.3.0.2<4> with "
     "status=12 opcode=0 len=0 vendor err 129 (Recv)", "rejects what the peer sends", ""),
    ("&gt; reef:11:41 [0] transport/[net_ib.cc:19](http://net_ib.cc:19/) NCCL WARN NET/IB : Got "
     "completion from peer [10.3.0.2](http://10.3.0.2/)&lt;33&gt; with status=12 opcode=0 len=0 "
     "vendor err 129", "does not answer", ""),
    (f"{HEAVY}accept(struct a*, struct b**):490 NCCL WARN NET/OFI Unexpected number of remote rails"
     " for dev 3. Expected 4 but got 1", "EFA", ""),
    # Processes and machines.
    ("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
     "exit detail: Worker exits with an exit code None. The worker may have exceeded K8s pod "
     "memory limits.", "worker process of Ray died", "memory limit"),
    ("[ 1843.308145] NVRM: The NVIDIA GPU 0000:c3:00.0\n               NVRM: (PCI ID: 10de:1) in\n"
     "               NVRM: fallen off the bus and is not responding to commands.",
     "Xid 79 on the GPU at c3:00", ""),
    ("[E socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect "
     "to (10.3.0.1, 2222).", "10.3.0.1:2222 does not answer", ""),
    ("Traceback (most recent call last):\n  File \"/x.py\", line 1, in f\n    g()\n"
     "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "not all nodes came", ""),
    # Multi-node NVLink after a warning of NVLS that stopped nothing.
    (f"{NVLS}\n{STARTED}\n{CLIQUE}\n{HEAVY}transport/p2p.cc:275 NCCL WARN Cuda failure 101 "
     f"'invalid device ordinal'\n{GAVE_UP}", "MNNVL", "imex"),
    (f"{NVLS}\n{STARTED}\n{CLIQUE}\nmpirun noticed that process rank 0 with PID 11 on node reef "
     "exited on signal 11 (Segmentation fault).", "in the set-up of multi-node NVLink",
     "NCCL_MNNVL_ENABLE=0"),
    # PCIe only.
    ("        GPU0 GPU1 CPU Affinity\nGPU0     X   SYS  0-7\nGPU1    SYS   X   8-15\n",
     "No NVLink joins the GPUs.*PCIe", "topo -p2p"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "title", "more"), KINDS)
def test_a_kind(text: str, title: str, more: str, tmp_path: Path) -> None:
    said, _, shown = ask(tmp_path, text)
    assert re.search(title, said)
    assert re.search(more, " ".join(shown.split()))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # NVLS was tried, and the run went on and ended.
        (f"{NVLS}\n{STARTED}\n{STARTED.replace('START', 'COMPLETE')}", "run failed"),
        # An error of one line that the program handled, far from the end or in a healthy log.
        ("ValueError: no such key, using the default\n" + "step\n" * 200, "ValueError"),
        (f"{STARTED}\nKeyError: 'x' (ignored)\n{STARTED.replace('START', 'COMPLETE')}", "KeyError"),
        # Python ignores what is raised at its exit.
        ("[rank0]:[E P.cpp:5] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
         "SeqNum=7, OpType=ALLREDUCE) ran for 600001 milliseconds before timing out.\n"
         "Exception ignored in: <function F.__del__ at 0x7>\nTraceback (most recent call last):\n"
         "  File \"/job/a.py\", line 3, in __del__\n    x()\nAttributeError: 'NoneType'",
         "AttributeError"),
    ],
)  # fmt: skip
def test_what_is_no_reason(text: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text + "\n")
    result = picture(collect([path]))
    assert wrong not in verdict(result, run_checks(result))
