"""Tables of nccl-tests as strangers have them: any prefix, any version, mixed up, cut."""

from pathlib import Path

import pytest
from foreign import HEAD, MEAN, ROWS, TABLE, TAIL, found, prefixed, read
from nccl_logs import Job, job

from evener.tools.analyze import document, run_checks
from evener.tools.analyze.report.verdict import facts, verdict

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


def test_rows_that_a_patched_benchmark_prints_into_are_said_and_are_no_hang(tmp_path: Path) -> None:
    rows = "     1048576        262144     float     sumtook: 0.000110\n"
    rows += "   110.0    9.53    9.53    N/Atook: 0.000112\n"
    result = read(tmp_path, (HEAD + rows + TAIL) * 2)
    findings = [f for f in run_checks(result) if f.id in ("coverage.broken-rows", "run.no-rows")]
    assert [f.id for f in findings] == ["coverage.broken-rows"] * 2
    assert "a mean of 10.21 GB/s" in findings[0].detail or "10.22" in findings[0].detail
    assert "run.no-rows" in found(read(tmp_path, HEAD))


def test_a_collective_that_is_named_at_its_end(tmp_path: Path) -> None:
    """rccl-tests names it in the last line; a quotation often begins in the middle of the rows."""
    rows = ROWS.replace("sum      -1", "none      0")
    result = read(tmp_path, rows + TAIL + "#\n# Collective test concluded: broadcast_perf\n")
    assert [table.collective for table in result.run.tables] == ["broadcast"]


# --- results as JSON ---


def test_json_lines_of_rccl_tests(tmp_path: Path) -> None:
    """`-x FILE -Z json`: a line per size and side."""

    def line(name: str, size: int, place: int, busbw: float, wrong: str = "0") -> str:
        return (
            f'{{"#wrong":"{wrong}","algBw":{busbw / 2},"busBw":{busbw},"gpus":4,"inPlace":{place},'
            f'"name":"{name}","redop":"sum","size":{size},"time":19.5,"type":"float"}}\n'
        )

    text = "".join(
        line("AllReduce", size, place, busbw)
        for size, place, busbw in ((1024, 0, 1.0), (1024, 1, 2.0), (2048, 0, 3.0), (2048, 1, 4.0))
    )
    text += line("ReduceScatter", 4096, 0, 5.0, "N/A") + line("ReduceScatter", 8192, 0, 6.0, "7")
    result = read(tmp_path, text)
    tables = result.run.tables
    assert [(t.collective, len(t.rows)) for t in tables] == [
        ("all_reduce", 2),
        ("reduce_scatter", 2),
    ]
    sides = [(row.out_of_place, row.in_place) for table in tables for row, _ in table.rows]
    assert [(a and a.busbw, b and b.busbw) for a, b in sides] == [
        (1.0, 2.0),
        (3.0, 4.0),
        (5.0, None),
        (6.0, None),
    ]
    assert "correctness.wrong-values" in found(result)


def test_other_json_is_no_result(tmp_path: Path) -> None:
    assert not read(tmp_path, '{"size": 1}\n{"loss": 2.0}\n').run.tables
