"""Logs as strangers have them: any prefix, any version, mixed up, cut. One format a test.

All lines are written here after the formats; the hosts are made up.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from nccl_logs import Job, job

from evener.analyze import Picture, collect, document, page, picture, run_checks
from evener.analyze.command import analyze
from evener.analyze.findings import Finding, catalogue
from evener.analyze.report.verdict import facts, verdict

HEAD = (
    "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 "
    "iters: 20 agg iters: 1 validation: 1 graph: 0\n"
    "#\n# Using devices\n"
    "#  Rank  0 Group  0 Pid   1001 on     node-a device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  1 Group  0 Pid   1002 on     node-b device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n#\n"
    "#                                                   out-of-place             in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time"
    "   algbw   busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)"
    "  (GB/s)  (GB/s)\n"
)
ROWS = (
    "     1048576        262144     float     sum      -1    110.0    9.53    9.53      0    112.0"
    "    9.36    9.36      0\n"
    "     2097152        524288     float     sum      -1    200.0   10.49   10.49      0    201.0"
    "   10.43   10.43      0\n"
    "     4194304       1048576     float     sum      -1    390.0   10.75   10.75      0    391.0"
    "   10.73   10.73      0\n"
)
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 10.215\n"
TABLE = HEAD + ROWS + TAIL
MEAN = (9.53 + 9.36 + 10.49 + 10.43 + 10.75 + 10.73) / 6


def read(tmp_path: Path, *texts: str) -> Picture:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text(text)
    result = picture(collect(paths))
    findings = run_checks(result)
    document(result, findings)
    page(result, findings)
    return result


def found(result: Picture) -> dict[str, Finding]:
    return {finding.id: finding for finding in run_checks(result)}


def prefixed(text: str, prefix: str) -> str:
    """Each line behind a prefix; `%d` in it counts up."""
    return "".join(
        (prefix % number if "%" in prefix else prefix) + line + "\n"
        for number, line in enumerate(text.splitlines())
    )


# --- 2. prefixes ---

PREFIXES = {
    "horovod": "[0]<stdout>:",
    "horovod with time": "Mon Jan  5 10:00:%02d 2026[0]<stderr>:",
    "mpirun": "[1,0]<stdout>:",
    "prterun": "[prterun-node-a-77@1,0]<stdout>: ",
    "mpirun with time": "Mon Jan  5 10:00:%02d 2026[1,0]<stdout>:",
    "srun": " 0: ",
    "torchrun": "[default0]:",
    "torch": "[rank0]: ",
    "kubectl": "[pod/train-worker-0/main] ",
    "stern": "train-worker-0 main ",
    "compose": "worker-1  | ",
    "pdsh": "node-a: ",
    "pals": "x1000c0s0b0n0.site.example 0: ",
    "ray": "(RayTrainWorker pid=123, ip=10.0.0.1) ",
    "ray twice": "(EngineCore_DP0 pid=7) (RayWorkerWrapper pid=9) ",
    "time": "2026-01-05T10:00:%02d.123456789Z ",
    "time in brackets": "[2026-01-05 10:00:%02d,123] ",
    "stream of a container": "2026-01-05T10:00:%02d.1Z stdout F ",
    "syslog": "Jan  5 10:00:%02d node-a train[77]: ",
    "colour": "\x1b[36m(worker pid=1)\x1b[0m ",
    "colour glued": "\x1b[1;32mnode-a |\x1b[0m",
    "quoted in an issue": "> ",
    "python's logging": "INFO:root:",
}


@pytest.mark.parametrize("name", PREFIXES)
def test_a_table_and_a_log_behind_any_prefix(name: str, tmp_path: Path) -> None:
    log = job(Job("2.21.5", hosts=("node-a", "node-b"), gpus=1, channels=2))
    result = read(tmp_path, prefixed(log + TABLE, PREFIXES[name]))
    assert result.bandwidth is not None
    assert result.bandwidth.values == 6
    assert result.bandwidth.mean == pytest.approx(MEAN)
    assert result.bandwidth.collective == "all_reduce"
    assert len(result.tables) == 1
    assert sorted(result.run.hosts) == ["node-a", "node-b"]
    assert result.world is not None
    assert result.world.hosts() == ["node-a", "node-b"]
    assert len(result.pairs) == 2
    assert result.run.unknown == 0
    assert not {"correctness.separate-runs", "run.failed"} & set(found(result))


def test_each_colour_is_the_same_host(tmp_path: Path) -> None:
    lines = job(Job("2.24.3")).splitlines()
    colours = ("\x1b[31m", "\x1b[36m", "\x1b[1;95m")
    text = "\n".join(colours[i % 3] + line + "\x1b[0m" for i, line in enumerate(lines))
    assert sorted(read(tmp_path, text).run.hosts) == ["node-a", "node-b"]


def test_lines_of_json_are_no_host_with_a_quote(tmp_path: Path) -> None:
    lines = job(Job("2.24.3")).splitlines()
    text = "\n".join('{"log":"' + line + '\\n","stream":"stderr"}' for line in lines[:1]) + "\n"
    text = "x\n" + text + "\n".join('{"log":"' + line for line in lines)
    assert sorted(read(tmp_path, text).run.hosts) == ["node-a", "node-b"]


def test_rows_that_a_log_line_came_into(tmp_path: Path) -> None:
    parted = ""
    for number, row in enumerate(ROWS.splitlines()):
        cut = row.index("-1") + 2  # right after the root, where the collective is called
        left, right = row[:cut], row[cut:]
        call = f"node-a:1001:1001 [0] NCCL INFO AllReduce: opCount {number} sendbuff 0x1 count 9\n"
        first, second = right[: len(right) // 2], right[len(right) // 2 :]
        parted += left + call + call + first + call + second + "\n"
    result = read(tmp_path, HEAD + parted + TAIL)
    assert result.bandwidth is not None
    assert result.bandwidth.values == 6
    assert result.bandwidth.mean == pytest.approx(MEAN)
    assert sorted(result.run.hosts) == ["node-a", "node-b"]  # no `-1node-a`, no `0node-a`


def test_a_row_that_never_ends_is_left_out_and_said(tmp_path: Path) -> None:
    row = ROWS.splitlines()[0].partition("-1")[0] + "-1"
    text = HEAD + row + "node-a:1:1 [0] NCCL INFO AllReduce: opCount 1\n" + ROWS + TAIL
    result = read(tmp_path, text)
    assert result.bandwidth is not None
    assert result.bandwidth.values == 6
    assert "coverage.broken-rows" in found(result)


def test_a_time_right_before_the_host_is_no_part_of_it(tmp_path: Path) -> None:
    lines = job(Job("2.21.5")).splitlines()
    text = "\n".join(f"  | 2026-01-05T10:00:00.208-07:00{line}" for line in lines)
    assert sorted(read(tmp_path, text).run.hosts) == ["node-a", "node-b"]


def test_a_row_that_was_parted_behind_a_prefix(tmp_path: Path) -> None:
    row = ROWS.splitlines()[0]
    cut = row.index("-1") + 2
    call = "[0] node-a:1:1 [0] NCCL INFO 1048576 Bytes -> Algo 1 proto 2 time 25.8\n"
    half = (len(row) - cut) // 2 + cut
    text = prefixed(HEAD, "[0] ") + "[0] " + row[:cut] + call + "[0] " + row[cut:half] + call
    result = read(tmp_path, text + "[0] " + row[half:] + "\n")
    assert result.bandwidth is not None
    assert (result.bandwidth.values, result.bandwidth.peak) == (2, 9.53)
    assert list(result.run.hosts) == ["node-a", "node-b"]


def test_a_table_whose_marks_an_editor_took_away(tmp_path: Path) -> None:
    result = read(tmp_path, TABLE.replace("#wrong", "error").replace("#", ""))
    assert result.bandwidth is not None
    assert (result.bandwidth.values, result.bandwidth.ranks) == (6, 2)
    assert result.bandwidth.table.average == 10.215
    assert dict(facts(result))["cluster"] == "2 hosts, 2 ranks: node-a, node-b"


# --- 1. `error` and `#wrong` ---


def old(error: str, kind: str = "float", bounds: str = "0 OK") -> str:
    return (
        "#                                             out-of-place             in-place\n"
        "#       size         count    type   redop     time   algbw   busbw  error     time   "
        "algbw   busbw  error\n"
        "#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)\n"
        f"     1048576        262144   {kind}     sum    110.0    9.53    9.53  {error}    "
        f"112.0    9.36    9.36  {error}\n"
        f" Out of bounds values : {bounds}\n# Out of bounds values : {bounds}\n"
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (old("5e-07"), False),
        (old("0e+00"), False),
        (old("1e-03", "half"), False),
        (old("1e-03"), True),
        (old("2e+00", "int32"), True),
        (old("N/A"), False),
        (old("5e-07", bounds="12 FAILED"), True),
        (TABLE, False),
        (TABLE.replace("9.53      0", "9.53      7"), True),
        (TABLE.replace("9.53      0", "9.53  1e+06"), True),
    ],
)
def test_only_wrong_results_are_wrong(text: str, wrong: bool, tmp_path: Path) -> None:
    result = read(tmp_path, text)
    assert result.bandwidth is not None
    assert ("correctness.wrong-values" in found(result)) == wrong


def test_rows_without_a_head_show_by_themselves_what_they_count(tmp_path: Path) -> None:
    row = "  1048576  262144  float  sum  110.0  9.53  9.53  5e-07  112.0  9.36  9.36  5e-07\n"
    assert "correctness.wrong-values" not in found(read(tmp_path, row))


def test_the_first_nccl_tests(tmp_path: Path) -> None:
    text = (
        "#  Rank  0 on     node-a device  0 [0x0f] Tesla P100\n"
        "#  Rank  1 on     node-a device  1 [0x10] Tesla P100\n\n"
        "#                                                 out-of-place            in-place\n"
        "#      bytes             N    type      op     time  algbw  busbw      res     time  "
        "algbw  busbw      res\n"
        "     1048576        262144   float     sum    0.110   9.53   9.53    5e-07    0.112   "
        "9.36   9.36    5e-07\n"
    )
    result = read(tmp_path, text)
    assert result.bandwidth is not None
    assert result.bandwidth.peak == 9.53
    assert result.bandwidth.peak_row.out_of_place.time_us == pytest.approx(110)
    assert not found(result)


# --- 3. several tables, Markdown, blanks ---


def test_several_tables_in_one_file_are_all_shown(tmp_path: Path) -> None:
    text = (
        "## First\n```\n$ mpirun -np 2 ./build/all_gather_perf_mpi -b 1M -e 4M -f 2\n"
        + TABLE.replace("sum      -1", "none      -1")
        + "```\nAnd then:\n\n    $ ./build/all_reduce_perf -b 1M -e 4M\n"
        + prefixed(TABLE, "    ")
        + "and the end: `NCCL INFO` is what `NCCL_DEBUG=INFO` prints.\n"
    )
    result = read(tmp_path, text)
    assert [table.collective for table in result.tables] == ["all_gather", "all_reduce"]
    assert [table.values for table in result.tables] == [6, 6]
    shown = "\n".join(value for _, value in facts(result))
    assert "all_gather: mean" in shown
    assert "all_reduce: mean" in shown
    tables = document(result, [])["tables"]
    assert [table["collective"] for table in tables] == ["all_gather", "all_reduce"]
    assert result.run.unknown == 0
    assert result.run.nccl_lines == 0


def test_a_table_in_a_table_of_markdown(tmp_path: Path) -> None:
    text = (
        "| size | count | type | redop | root | time | algbw | busbw | #wrong | time | algbw | "
        "busbw | #wrong |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        "| 1048576 | 262144 | float | sum | -1 | 110.0 | 9.53 | 9.53 | 0 | 112.0 | 9.36 | 9.36 "
        "| 0 |\n"
    )
    result = read(tmp_path, text)
    assert result.bandwidth is not None
    assert (result.bandwidth.values, result.bandwidth.peak) == (2, 9.53)


def test_alltoall_leaves_redop_and_root_blank(tmp_path: Path) -> None:
    head = HEAD.replace("error", "#wrong")
    for blank in ("     1048576  262144     float                  1100  9.53  9.53  0  1120  9.36"
                  "  9.36  N/A\n",):  # fmt: skip
        result = read(tmp_path, head + blank + blank.replace("1048576", "2097152"))
        assert result.bandwidth is not None
        assert result.bandwidth.values == 4
        assert result.bandwidth.peak == 9.53
        assert result.bandwidth.peak_row.redop == ""
        assert result.bandwidth.peak_row.out_of_place.time_us == 1100


def test_pods_side_by_side_have_a_table_each(tmp_path: Path) -> None:
    one, other = TABLE.splitlines(), TABLE.replace("node-a", "node-c").splitlines()
    text = "".join(
        f"[pod/first-0/main] {a}\n[pod/second-0/main] {b}\n"
        for a, b in zip(one, other, strict=True)
    )
    result = read(tmp_path, text)
    assert [table.values for table in result.tables] == [6, 6]
    assert "correctness.separate-runs" not in found(result)


def test_types_of_one_table_are_no_spikes(tmp_path: Path) -> None:
    slow = ROWS.replace("float", "int8").replace("9.53", "1.00").replace("10.49", "1.01")
    result = read(tmp_path, HEAD + ROWS + slow + TAIL)
    assert "bandwidth.spikes" not in found(result)


def test_missing_rows_are_said(tmp_path: Path) -> None:
    result = read(tmp_path, HEAD + ROWS.splitlines()[0] + "\n" + TAIL)
    assert any("rows are missing" in value for _, value in facts(result))


# --- built without MPI, one rank, no rows ---


def test_processes_that_each_ran_by_themselves(tmp_path: Path) -> None:
    head = HEAD.splitlines(keepends=True)
    mine = "".join(head[:4]) + "".join(head[5:])
    other = mine.replace("node-a", "node-b").replace("1001", "2001")
    lines = "".join(
        a + b for a, b in zip(mine.splitlines(True), other.splitlines(True), strict=True)
    )
    rows = "".join(row + "\n" + row.replace("10", "11") + "\n" for row in ROWS.splitlines())
    result = read(tmp_path, lines + rows + TAIL + TAIL)
    finding = found(result)["correctness.separate-runs"]
    assert finding.confidence == "measured"
    assert "MPI=1" in finding.command
    assert "mixed" in dict(facts(result))["bandwidth"]
    assert not {"bandwidth.spikes", "bandwidth.falls-with-size"} & set(found(result))


def test_the_mixed_end_of_two_runs(tmp_path: Path) -> None:
    rows = ROWS.splitlines(keepends=True)
    text = rows[1] + rows[1].replace("200.0", "210.0") + rows[2] + TAIL
    text += rows[2].replace("390.0", "380.0") + TAIL.replace("10.215", "10.1")
    assert "correctness.separate-runs" in found(read(tmp_path, text))


def test_a_script_that_tries_again_or_sweeps_is_not_mixed(tmp_path: Path) -> None:
    again = HEAD.replace("1001", "3001").replace("1002", "3002") + ROWS + TAIL
    failed = "".join(HEAD.splitlines(True)[:6]) + "node-a: Test NCCL failure common.cu:1 'x'\n"
    assert "correctness.separate-runs" not in found(read(tmp_path, failed + again))
    one = ROWS.splitlines(True)[0] + TAIL
    result = read(tmp_path, one + one.replace("110.0", "111.0") + one)
    assert "correctness.separate-runs" not in found(result)
    assert [table.values for table in result.tables] == [2, 2, 2]


def test_heads_one_after_another_on_two_hosts_are_two_runs(tmp_path: Path) -> None:
    head = "".join(line for line in HEAD.splitlines(True) if "Rank  1" not in line)
    text = head + head.replace("node-a", "node-b") + ROWS + TAIL
    assert "correctness.separate-runs" in found(read(tmp_path, text))


def test_one_rank_has_no_bus_bandwidth(tmp_path: Path) -> None:
    head = "".join(line for line in HEAD.splitlines(True) if "Rank  1" not in line)
    rows = ROWS
    for value in ("9.53", "9.36", "10.49", "10.43", "10.75", "10.73"):
        rows = rows.replace(f"   {value}      0", "   0.00      0")
    result = read(tmp_path, head + rows + TAIL.replace("10.215", "0"))
    finding = found(result)["correctness.one-rank"]
    assert (finding.severity, finding.confidence) == ("problem", "measured")
    # A communicator of one rank says it too, where there is no table.
    ring = "node-a:1:2 [0] NCCL INFO Channel 00/02 :    0\n"
    assert "correctness.one-rank" in found(read(tmp_path, ring))


def test_a_head_without_rows_is_a_hang_or_a_cut(tmp_path: Path) -> None:
    assert "run.no-rows" in found(read(tmp_path, HEAD))


def test_nothing_to_judge_is_said(tmp_path: Path) -> None:
    result = read(tmp_path, "node-a:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n")
    assert verdict(result, run_checks(result)).startswith("Nothing to judge")


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
    ("line", "id"),
    [
        (
            "[rank3]:[E1.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 "
            "milliseconds before timing out.",
            "run.hung",
        ),
        ("node-a: Test NCCL failure common.cu:958 'internal error'", "run.failed"),
        ("node-a: Test CUDA failure common.cu:730 'out of memory'", "run.failed"),
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
def test_what_programs_and_launchers_say(line: str, id: str, tmp_path: Path) -> None:
    for prefix in ("", "[1,3]<stderr>:", "\x1b[31m(worker pid=7)\x1b[0m "):
        result = read(tmp_path, job(Job("2.21.5")) + prefix + line + "\n")
        ids = {i for i in found(result) if i.startswith("run.")}
        assert ids == {id}


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
    assert [f.id for f in findings].count("coverage.nccl-warning") == 2  # one per kind


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


# --- sockets although a card is there ---

SOCKET = Job("2.21.5", network="Socket", cards=("eth0",), direct=False)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1"),
        ("NCCL_NET set by environment to Socket.", "NCCL_NET=Socket"),
        ("Failed to open libibverbs.so[.1]", "library"),
        ("NET/IB : No device found.", "found none"),
        ("NET/Plugin: Could not find: libnccl-net.so", "plug-in"),
    ],
)
def test_sockets_although_a_card_is_there(line: str, why: str, tmp_path: Path) -> None:
    text = f"node-a:1000:1500 [0] NCCL INFO {line}\n" + job(SOCKET)
    matrix = (
        "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-31\n"
        "GPU1\tNV18\t X \tPIX\t0-31\nmlx5_0\tPIX\tPIX\t X \n"
    )
    finding = found(read(tmp_path, text, matrix))["network.sockets-despite-card"]
    assert "mlx5_0" in finding.title
    assert why in finding.detail
    assert finding.confidence == "measured"
    # Without a card anywhere nothing is claimed.
    (tmp_path / "1.log").unlink()
    assert "network.sockets-despite-card" not in found(read(tmp_path, text))


def test_libfabric_over_tcp(tmp_path: Path) -> None:
    line = "NCCL INFO NET/OFI Selected Provider is tcp (found 2 nics)\n"
    text = "node-a:1000:1500 [0] " + line + job(Job("2.21.5", network="AWS Libfabric"))
    findings = found(read(tmp_path, text.replace("/GDRDMA", "")))
    assert "FI_PROVIDER" in findings["network.sockets-despite-card"].command
    assert "network.gpudirect-off" not in findings


# --- 4. OFI, Slingshot, cards without names ---


def test_cards_without_names_are_compared_by_number(tmp_path: Path) -> None:
    ofi = Job("2.21.5", network="AWS Libfabric", cards=("x", "y"))
    result = read(tmp_path, job(ofi))
    assert result.rails()[:2] == ("aligned", "inferred")
    assert "names none" in result.rails()[2]
    assert {route.source.name for route in result.routes} == {"#0", "#1"}
    assert read(tmp_path, job(replace(ofi, crossed=True))).rails()[:2] == ("crossed", "inferred")


@pytest.mark.parametrize("network", ["AWS Libfabric", "FasTrak", "Libfabric"])
def test_no_advice_for_infiniband_on_other_networks(network: str, tmp_path: Path) -> None:
    findings = run_checks(read(tmp_path, job(Job("2.21.5", network=network, direct=False))))
    assert findings
    assert not any("NCCL_IB" in f.command or "nvidia-peermem" in f.do for f in findings)
    ids = {finding.id for finding in findings}
    assert ("network.gpudirect-off" in ids) == (network != "FasTrak")


# --- 5. trees over two nodes ---


def with_speed(text: str, mbps: int = 80_000) -> str:
    line = "node-a:1000:1500 [0] NCCL INFO NET/IB: [{0}] mlx5_{0}:uverbs{0}:1/RoCE provider=Mlx5 "
    line += f"speed={mbps} context=0x1\n"
    return line.format(0) + line.format(1) + text


def test_a_tree_over_two_nodes_may_pass_the_line_rate(tmp_path: Path) -> None:
    rows = ROWS.replace("10.75", "38.00")
    log = with_speed(job(Job("2.27.3")))
    result = read(tmp_path, log + HEAD + rows)
    assert result.line_rate == pytest.approx(20)
    assert "bandwidth.above-line-rate" not in found(result)
    ring = log + (
        "node-a:1000:1000 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo RING proto SIMPLE "
        "channel{Lo..Hi}={0..3}\n"
    )
    assert "bandwidth.above-line-rate" in found(read(tmp_path, ring + HEAD + rows))
    far = log + HEAD + ROWS.replace("10.75", "58.00")
    assert "bandwidth.above-line-rate" in found(read(tmp_path, far))


def test_gigabytes_per_card_against_its_line(tmp_path: Path) -> None:
    result = read(tmp_path, with_speed(job(Job("2.27.3"))) + TABLE)
    finding = found(result)["bandwidth.share-of-line"]
    assert finding.title == "5.375 GB/s per card, 54% of its line of 10 GB/s"
    unknown = found(read(tmp_path, job(Job("2.21.5")) + TABLE))["bandwidth.share-of-line"]
    assert "43 Gb/s" in unknown.detail
    assert "No file says" in unknown.detail


def test_gigabytes_against_nvlink_in_one_host(tmp_path: Path) -> None:
    head = HEAD.replace("node-b", "node-a").replace(
        "device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n#\n",
        "device  1 [0000:10:00] NVIDIA A100-SXM4-80GB\n#\n",
    )
    result = read(tmp_path, head + ROWS.replace("10.75", "240.0"))
    assert found(result)["bandwidth.share-of-line"].title.startswith("80% of the NVLink")


# --- 6. false alarms ---


def test_cards_of_the_other_kind_are_not_idle(tmp_path: Path) -> None:
    text = job(Job("2.21.5", cards=("mlx5_0", "mlx5_1")))
    mixed = text.replace("[1]mlx5_1:1/RoCE", "[1]mlx5_1:1/RoCE [2]mlx5_2:1/IB")
    assert "network.cards-idle" not in found(read(tmp_path, mixed))
    same = text.replace("[1]mlx5_1:1/RoCE", "[1]mlx5_1:1/RoCE [2]mlx5_2:1/RoCE")
    finding = found(read(tmp_path, same))["network.cards-idle"]
    assert "node-a and node-b" in finding.title
    assert "NCCL_CROSS_NIC=1" in finding.command
    asked = "node-a:1000:1500 [0] NCCL INFO NCCL_CROSS_NIC set by environment to 0.\n" + same
    assert "CROSS_NIC" not in found(read(tmp_path, asked))["network.cards-idle"].command


def test_a_cut_log_has_no_idle_cards(tmp_path: Path) -> None:
    text = job(Job("2.21.5")).replace("mlx5_1:1/RoCE", "mlx5_1:1/RoCE [2]mlx5_2:1/RoCE")
    lines = [line for line in text.splitlines() if "Channel 03" not in line]
    assert "network.cards-idle" not in found(read(tmp_path, "\n".join(lines)))


def test_a_prefix_that_is_listed_itself_is_meant(tmp_path: Path) -> None:
    cards = ("mlx5_1", "mlx5_10")
    asked = "NCCL_IB_HCA set to mlx5_1:1,mlx5_10:1"
    result = read(tmp_path, job(Job("2.21.5", cards=cards, env=(asked,))))
    assert "settings.hca-prefix" not in found(result)


def test_cross_nic_is_not_proposed_where_it_is_set(tmp_path: Path) -> None:
    crossed = Job("2.21.5", crossed=True)
    assert "CROSS_NIC=0" in found(read(tmp_path, job(crossed)))["rails.crossed"].command
    asked = replace(crossed, env=("NCCL_CROSS_NIC set by environment to 0.",))
    assert "CROSS_NIC" not in found(read(tmp_path, job(asked)))["rails.crossed"].command


# --- 7. rings and trees, one host ---


def test_trees_are_counted_apart_where_nothing_parts_them(tmp_path: Path) -> None:
    # As up to 2.8: no `Connected all rings`, ring edges first, then the tree's.
    old_job = Job("2.7.8", gpus=2, channels=1)
    lines = [line for line in job(old_job).splitlines() if "Connected all" not in line]
    tree = [
        "node-a:1000:1500 [0] NCCL INFO Channel 00 : 0[10000] -> 2[10000] [send] via NET/IB/0",
        "node-b:1002:1502 [0] NCCL INFO Channel 00 : 0[10000] -> 2[10000] [receive] via NET/IB/0",
        "node-b:1002:1502 [0] NCCL INFO Channel 00 : 2[10000] -> 0[10000] [send] via NET/IB/0",
        "node-a:1000:1500 [0] NCCL INFO Channel 00 : 2[10000] -> 0[10000] [receive] via NET/IB/0",
    ]
    ends = [i for i, line in enumerate(lines) if "COMPLETE" in line]
    text = "\n".join([*lines[: ends[0]], *lines[ends[0] : ends[0]]])
    out: list[str] = []
    for line in lines:
        if "threadThresholds" in line and ":1500 " in line:
            out += [tree[0], tree[3]]
        if "threadThresholds" in line and ":1502 " in line:
            out += [tree[1], tree[2]]
        out.append(line)
    text = "\n".join(line for line in out if "Channel 00/01" not in line)
    result = read(tmp_path, text)
    assert result.world is not None
    assert len(result.world.edges) == 4
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]


def test_trees_of_2_4(tmp_path: Path) -> None:
    line = "node-a:1:2 [0] NCCL INFO Trees [0] -1->0->1/32/-1\n"
    comm = (
        "node-a:1:2 [0] NCCL INFO comm 0x7 rank 0 nranks 64 cudaDev 0 nvmlDev 0 - Init COMPLETE\n"
    )
    world = read(tmp_path, line + comm).world
    assert world is not None
    assert (world.size, world.trees[0][0].up, world.trees[0][0].down) == (64, None, (1, 32))


def test_a_net_edge_to_a_rank_without_a_line_is_a_pair(tmp_path: Path) -> None:
    text = (
        "node-a:1:2 [0] NCCL INFO Channel 00 :    0   1   2   3\n"
        "node-a:1:2 [0] NCCL INFO Ring 00 : 3 -> 0 [receive] via NET/AWS Libfabric/0\n"
        "node-a:1:2 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/IPC\n"
        "node-b:3:4 [0] NCCL INFO Ring 00 : 1 -> 2 [receive] via NET/AWS Libfabric/0\n"
    )
    result = read(tmp_path, text)
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]


def test_hops_of_processes_without_a_name_are_read(tmp_path: Path) -> None:
    text = "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer\n"
    result = read(tmp_path, text)
    assert result.world is not None
    assert result.world.transports["P2P/direct pointer"] == 1
    assert not verdict(result, run_checks(result)).startswith("Nothing to judge")


def test_a_host_at_the_start_of_a_verdict_keeps_its_name(tmp_path: Path) -> None:
    result = read(tmp_path, job(Job("2.21.5", direct=False)))
    assert verdict(result, run_checks(result)).startswith("node-a and node-b:")


def one_host(*via: str) -> str:
    lines = [
        f"node-a:{1000 + rank}:{1500 + rank} [{rank}] NCCL INFO Channel 00/0 : {edge}"
        for rank, edge in enumerate(via)
    ]
    lines += [
        f"node-a:{1000 + rank}:{1500 + rank} [{rank}] NCCL INFO comm 0x{rank} rank {rank} nranks 2 "
        f"cudaDev {rank} busId {rank + 1}b000 commId 0xab - Init COMPLETE"
        for rank in range(2)
    ]
    return "\n".join(lines) + "\n"


def test_gpus_of_one_host_over_the_network(tmp_path: Path) -> None:
    text = one_host("0[0] -> 1[1] [send] via NET/Socket/0", "1[1] -> 0[0] [send] via NET/Socket/0")
    text = "node-a:1000:1500 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1.\n" + text
    findings = found(read(tmp_path, text))
    assert findings["network.inside-host"].severity == "problem"
    assert "NCCL_SHM_DISABLE=1" in findings["network.inside-host"].detail
    # It is no traffic between hosts, and is not judged as such.
    assert read(tmp_path, text).pairs == []
    hops = [line for line in text.splitlines(True) if "via NET" in line]
    assert read(tmp_path, "".join(hops)).pairs == []
    assert not {"network.one-stream", "network.gpudirect-off"} & set(findings)


def test_peers_that_nccl_says_are_off(tmp_path: Path) -> None:
    text = one_host("0[0] -> 1[1] via SHM/direct/direct", "1[1] -> 0[0] via SHM/direct/direct")
    assert "network.shm" in found(read(tmp_path, text))
    said = (
        "node-a:1000:1500 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can "
        "repress this message with NCCL_IGNORE_DISABLED_P2P=1.\n"
    )
    findings = found(read(tmp_path, said + text))
    assert "ACS" in findings["host.p2p-off"].do
    assert "network.shm" not in findings


def test_findings_name_all_hosts(tmp_path: Path) -> None:
    hosts = ("node-a", "node-b", "node-c")
    text = job(Job("2.21.5", hosts=hosts, direct=False))
    title = found(read(tmp_path, text))["network.gpudirect-off"].title
    assert all(host in title for host in hosts)
    socket = replace(SOCKET, hosts=hosts, cards=("docker0",))
    text = job(socket).replace("[0]eth0", "[0]docker0")
    findings = found(read(tmp_path, text))
    assert all(host in findings["network.wrong-interface"].title for host in hosts)
    assert all(host in findings["network.one-stream"].detail for host in hosts)


# --- 8. lines without a source ---


def test_lines_without_a_source_are_read_or_counted(tmp_path: Path) -> None:
    text = (
        "[0] NCCL INFO Channel 00/02 :    0   1\n"
        "NCCL INFO Channel 01/02 :    0   1\n"
        "[1] NCCL INFO Frobnicated\n"
        "NCCL INFO Frobnicated too\n"
        "worker said: NCCL INFO Frobnicated as well\n"
        "Set `NCCL INFO` to see more, or grep 'NCCL INFO' in the log.\n"
    )
    run = read(tmp_path, text).run
    assert run.unknown == 3
    assert {len(c.rings) for c in run.communicators} == {2}


# --- 9. RCCL ---

RCCL = """RCCL version : 2.22.3-HEAD:7d8d67c
HIP version  : 6.4.43484-123eb5128
node-a:10:20 [0] NCCL INFO RCCL version : 2.22.3-HEAD:7d8d67c
node-a:10:10 [0] NCCL INFO Kernel version: 6.8.0-41-generic
node-a:10:10 [0] NCCL INFO Hipruntime version: 60400000, firmware version: 177
node-a:10:10 [0] NCCL INFO ROCr version 1.15
node-a:10:10 [0] NCCL INFO Dmabuf feature disabled without NCCL_DMABUF_ENABLE=1
node-a:10:20 [0] NCCL INFO NET/IB : Using [0]bnxt_re0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node-a:10:20 [0] NCCL INFO Using network IB
node-a:10:20 [0] NCCL INFO Channel 00/01 :    0   1   2   3
node-a:10:20 [0] NCCL INFO Ring 0 : 3 -> 0 -> 1 comm 0x55 nRanks 04 busId 5000
node-a:10:20 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 comm 0x55 nRanks 04 busId 5000
node-a:10:20 [0] NCCL INFO Channel 00/0 : 0[5000] -> 1[15000] via P2P/IPC comm 0x55 nRanks 04
node-a:10:20 [0] NCCL INFO Channel 00/0 : 3[15000] -> 0[5000] [receive] via NET/IB/0/GDRDMA comm 0x55 nRanks 04
node-a:10:20 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 busId 5000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-a:11:21 [1] NCCL INFO Channel 00/0 : 1[15000] -> 2[5000] [send] via NET/IB/0/GDRDMA comm 0x56 nRanks 04
node-a:11:21 [1] NCCL INFO comm 0x56 rank 1 nranks 4 cudaDev 1 busId 15000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:12:22 [0] NCCL INFO Channel 00/0 : 2[5000] -> 3[15000] via P2P/direct pointer comm 0x57 nRanks 04
node-b:12:22 [0] NCCL INFO comm 0x57 rank 2 nranks 4 cudaDev 0 busId 5000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:13:23 [1] NCCL INFO comm 0x58 rank 3 nranks 4 cudaDev 1 busId 15000 commId 0xa localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
node-b:13:23 [1] /src/out/build/rccl/hipify/src/init.cc:140 NCCL WARN NUMA auto balancing enabled
#   Rank  0 Pid     10 on     node-a device  0 [0000:05:00.0] AMD Instinct MI300X
"""  # noqa: E501


def test_rccl(tmp_path: Path) -> None:
    result = read(tmp_path, RCCL)
    world = result.world
    assert world is not None
    assert (world.size, world.hosts()) == (4, ["node-a", "node-b"])
    assert [(p.source, p.destination) for p in result.pairs] == [(1, 2), (3, 0)]
    assert world.transports["P2P/IPC"] == world.transports["P2P/direct pointer"] == 1
    assert list(result.run.versions) == ["RCCL 2.22.3"]
    assert result.run.unknown == 0, result.run.unknown_samples
    assert "host.kernel-settings" in found(result)


# --- PCIe links ---


def test_a_pcie_link_below_its_width(tmp_path: Path) -> None:
    def pci(bus: str, lanes: int, speed: str, inside: str) -> str:
        return (
            f'<pci busid="{bus}" class="0x030200" vendor="0x10de" device="0x20b2" '
            f'link_speed="{speed} GT/s PCIe" link_width="{lanes}">{inside}</pci>'
        )

    def system(*links: str) -> str:
        return '<system version="1"><cpu numaid="0">' + "".join(links) + "</cpu></system>"

    card = '<nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>'
    good = system(
        pci("0000:0f:00.0", 16, "16.0", '<gpu dev="0"/>'),
        pci("0000:10:00.0", 16, "16.0", '<gpu dev="1"/>'),
        pci("0000:11:00.0", 16, "32.0", card).replace("0x20b2", "0x1021"),
    )
    assert "host.pcie-narrow" not in found(read(tmp_path, good))
    narrow = good.replace('link_width="16"', 'link_width="8"', 1)
    detail = found(read(tmp_path, narrow))["host.pcie-narrow"].detail
    assert "GPU0 (0000:0f:00.0): 8 lanes" in detail
    slow = good.replace("32.0 GT/s", "16.0 GT/s")
    detail = found(read(tmp_path, slow))["host.pcie-narrow"].detail
    assert "31.5 GB/s, less than its line of 50" in detail


# --- the list of findings ---


def test_every_finding_is_in_the_catalogue() -> None:
    import re

    folder = Path(__file__).parents[2] / "python" / "evener" / "analyze" / "findings"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    subjects = "run|correctness|fabric|rails|network|rings|settings|host|bandwidth|coverage"
    written = set(re.findall(rf'"((?:{subjects})\.[a-z0-9-]+)"', text))
    assert written == set(catalogue())
