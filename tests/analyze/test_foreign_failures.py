"""Runs of strangers that failed or hung: what is said of the cause."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from foreign import found, read
from nccl_logs import Job, job

from evener.tools.analyze import run_checks
from evener.tools.analyze.command import analyze
from evener.tools.analyze.report.verdict import verdict

# --- the run failed or hung ---

TRAIL = (
    "node-a:1000:1500 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
    "10.0.0.2<4711> with {} (Send){}\n"
    "node-a:1000:1500 [0] NCCL INFO transport/net.cc:1008 -> 6\n"
    "node-a:1000:1500 [0] NCCL INFO proxy.cc:858 -> 6 [Proxy Thread]\n"
)


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("error 12, opcode 0, len 0, vendor err 129", "network.ib-timeout"),
        ("status=12 opcode=1 len=0 vendor err 129", "network.ib-timeout"),
        (
            "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129",
            "network.ib-timeout",
        ),
        ("error 4, opcode 1, len 32, vendor err 81", "network.ib-access"),
        ("status=4 opcode=0 len=0 vendor err 81", "network.ib-access"),
        ("error 5, opcode 0, len 0, vendor err 249", "network.ib-flushed"),
    ],
)
def test_errors_of_cards(status: str, cause: str, tmp_path: Path) -> None:
    text = job(Job("2.21.5")) + TRAIL.format(status, "")
    result = read(tmp_path, text)
    findings = found(result)
    assert findings["run.failed"].severity == "problem"
    causes = {id for id in findings if id.startswith("network.ib-")}
    assert causes == {cause}
    assert "node-a" in findings[cause].detail
    assert result.run.cite(findings[cause].evidence[0]).endswith(f":{len(text.splitlines()) - 2}")
    assert result.run.unknown == 0
    assert verdict(result, run_checks(result)).startswith("The run failed: RDMA")
    if cause == "network.ib-access":
        assert "NCCL_NET_GDR_LEVEL=0" in findings[cause].command
    if cause == "network.ib-timeout":
        assert "GID" in findings[cause].detail


def test_a_gid_that_is_link_local_is_said(tmp_path: Path) -> None:
    text = "node-a:1:2 [0] NCCL INFO NCCL_IB_GID_INDEX set by environment to 0.\n"
    text += TRAIL.format(
        "status=12 opcode=1 len=0 vendor err 129", " localGid fe80::1 remoteGidsfe80::2"
    )
    detail = found(read(tmp_path, text))["network.ib-timeout"].detail
    assert "set to 0" in detail
    assert "link-local" in detail


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        (
            "[rank3]:[E1.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 "
            "milliseconds before timing out.",
            "run.hung",
        ),
        ("node-a: Test NCCL failure common.cu:958 'internal error'", "run.failed"),
        ("node-a: Test CUDA failure common.cu:730 'out of memory'", "run.failed run.gpu-memory"),
        (
            "mpirun noticed that process rank 3 with PID 0 on node node-b exited on signal 9",
            "run.failed",
        ),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317", "run.failed"),
        ("ncclSystemError: System call (e.g. socket, malloc) or external library", "run.failed"),
        ("srun: error: node-b: task 3: Segmentation fault (core dumped)", "run.failed"),
        ("slurmstepd: error: *** JOB 7 ON node-a CANCELLED AT X DUE TO TIME LIMIT ***",
         "run.time-limit"),
        (
            "[x: W stall_inspector.cc:105] One or more tensors were submitted to be reduced, "
            "gathered or broadcasted by subset of ranks",
            "run.stalled",
        ),
    ],
)  # fmt: skip
def test_what_programs_and_launchers_say(line: str, ids: str, tmp_path: Path) -> None:
    for prefix in ("", "[1,3]<stderr>:", "\x1b[31m(worker pid=7)\x1b[0m "):
        result = read(tmp_path, job(Job("2.21.5")) + prefix + line + "\n")
        assert {i for i in found(result) if i.startswith("run.")} == set(ids.split())


def test_a_log_of_a_watchdog_alone_is_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "[E P.cpp:7] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\n"
    )
    shown = CliRunner().invoke(analyze, [str(path), "-q"])
    assert shown.exit_code == 1
    assert shown.output.startswith("A collective did not end")


@pytest.mark.parametrize(
    "text",
    [
        # A network that is tried and is not there: NCCL goes on.
        "node-a:1:2 [0] NCCL INFO net.cc:55 -> 3\n",
        "node-a:1:2 [0] NCCL INFO include/net.h:19 -> 2\n",
        "node-a:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n",
        "the NCCL error handling of this run is tested below\n",
        "import nccl # signal\n",
    ],
)
def test_what_is_no_failure(text: str, tmp_path: Path) -> None:
    result = read(tmp_path, job(Job("2.21.5")) + text)
    findings = found(result)
    assert not any(id.startswith("run.") for id in findings)
    assert all(f.severity == "note" for f in findings.values())
    assert result.run.unknown == 0


def test_a_trail_that_reaches_the_call_is_a_failure_without_a_warning(tmp_path: Path) -> None:
    text = "".join(
        f"node-b:7:8 [1] NCCL INFO {place} -> 2\n"
        for place in ("misc/socket.cc:483", "bootstrap.cc:76", "init.cc:1358", "group.cc:65")
    )
    result = read(tmp_path, text)
    assert "node-b" in found(result)["run.failed"].detail
    assert "a call of the system failed" in found(result)["run.failed"].detail


def test_a_setup_that_does_not_end(tmp_path: Path) -> None:
    text = job(Job("2.21.5"))
    cut = "\n".join(line for line in text.splitlines() if "COMPLETE" not in line)
    assert "run.init-unfinished" in found(read(tmp_path, cut))
    assert "run.init-unfinished" not in found(read(tmp_path, text))


SHM = (
    "{0} include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n"
    "{0} NCCL INFO include/shm.h:41 -> 2\n"
    "{0} include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1 "
    "(size 9637888)\n",
    "{0} misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 59 bytes\n"
    "{0} misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment "
    "/dev/shm/nccl-fjwOOB (size 5967872)\n",
)


@pytest.mark.parametrize("text", SHM)
@pytest.mark.parametrize(
    "source", ["node-a:1:2 [3]", "[3]", "[2026-01-05 10:00:00] node-a:1:2 [3]"]
)
def test_shared_memory_that_is_full(text: str, source: str, tmp_path: Path) -> None:
    result = read(tmp_path, text.format(source))
    findings = found(result)
    assert set(findings) == {"run.failed", "host.shm-full"}
    assert "--shm-size" in findings["host.shm-full"].do
    assert result.run.unknown == 0


def test_shared_memory_that_fails_for_another_reason(tmp_path: Path) -> None:
    text = (
        "[1] misc/shmutils.cc:103 NCCL WARN Cuda failure 'invalid argument'\n"
        "[1] misc/shmutils.cc:114 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-AAAAAA (size 9637888)\n"
        "[0] misc/shmutils.cc:114 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-BBBBBB (size 9637888)\n"
    )
    findings = run_checks(read(tmp_path, text))
    assert "host.shm-full" not in {finding.id for finding in findings}
    ids = [f.id for f in findings]
    assert ids[0] == "run.cuda-error"  # CUDA's own words; no more is known
    assert ids.count("coverage.nccl-warning") == 1


@pytest.mark.parametrize(
    ("warning", "id"),
    [
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device f0", "run.duplicate-gpu"),
        ("Error while attaching to shared memory segment /dev/shm/nccl-x (size 1)",
         "host.shm-apart"),
        ("socketStartConnect: Connect to 172.17.0.1<4711> failed : Connection refused",
         "network.unreachable"),
        ("Bootstrap : no socket interface found", "network.no-interface"),
        ("socketProgress: Connection closed by remote peer node-b<4711>", "run.peer-gone"),
        ("Cuda failure 2 'out of memory'", "run.gpu-memory"),
        ("Call to ibv_reg_mr failed with error Cannot allocate memory", "host.memlock"),
        ('Missing "iommu=pt" from kernel command line', "host.kernel-settings"),
    ],
)  # fmt: skip
def test_warnings_whose_cause_is_known(warning: str, id: str, tmp_path: Path) -> None:
    text = f"node-a:1:2 [0] init.cc:7 NCCL WARN {warning}\n"
    text += f"node-b:3:4 [0] init.cc:7 NCCL WARN {warning}\n"
    findings = found(read(tmp_path, text))
    assert "node-a and node-b" in findings[id].detail
    assert "coverage.nccl-warning" not in findings


def test_the_last_error_that_torch_repeats(tmp_path: Path) -> None:
    text = (
        "[rank2]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77\n"
        "[rank2]: Last error:\n"
        "[rank2]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 6000\n"
    )
    assert set(found(read(tmp_path, text))) == {"run.failed", "run.duplicate-gpu"}


def test_nccl_before_2_3(tmp_path: Path) -> None:
    text = (
        "node-a:1:1 [0] INFO Using internal Network Socket\n"
        "node-a:1:2 [0] INFO comm 0x7fa42c00a3b0 rank 0 nranks 2\n"
        "node-b:1:2 [0] INFO comm 0x7fa42c00a3b1 rank 1 nranks 2\n"
        "node-a:1:3 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out\n"
        "node-a:1:3 [0] INFO transport/net_socket.cu:118 -> 2\n"
        "node-a:1:3 [0] INFO bootstrap.cu:28 -> 2 [Net]\n"
    )
    result = read(tmp_path, text)
    assert set(found(result)) == {"run.failed", "network.unreachable"}
    assert result.world is not None
    assert (result.world.size, result.world.hosts()) == (2, ["node-a", "node-b"])
    assert (result.run.nccl_lines, result.run.unknown) == (6, 0)
