"""The table and the formulas, against the parser that reads real nccl-tests output."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.errors import UsageError
from evener.tools.analyze import collect, picture
from evener.tools.bench.collectives import algorithms, command
from evener.tools.bench.collectives.names import COLLECTIVES, NAMES, plain
from evener.tools.bench.collectives.options import Options, check, environment
from evener.tools.bench.collectives.output import Device, Iterations, Report, Side, number
from evener.tools.bench.collectives.shapes import ALL
from evener.tools.bench.command import bench


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (9.87, 7, "   9.87"),
        (12345.678, 7, "12345.7"),
        (1234567.8, 7, "1234568"),
        (123456789.0, 7, "1.2e+08"),
        (0.016, 6, "  0.02"),
        (123.456, 6, "123.46"),
        (12345.6, 6, "12345.6"[:0] + " 12346"),
        (1e9, 6, " 1e+09"),
    ],
)
def test_numbers_lose_decimals_until_they_fit(value: float, width: int, text: str) -> None:
    assert number(value, width) == text


def written(options: Options, name: str = "all_reduce") -> str:
    stream = io.StringIO()
    report = Report(options, name, 22809, True, ["-b", "8"], stream)
    report.head([Device(r, "node-a", 100 + r, r, f"0000:1{r}:00", "A GPU") for r in range(2)])
    report.row(1048576, 262144, "float", "sum", -1)
    report.side(Side(135e-6, 7.77, 14.57, 0), False)
    report.side(Side(129.4e-6, 8.10, 15.19, None), True)
    assert report.foot(None)
    return stream.getvalue()


def test_the_table_is_nccl_tests_own() -> None:
    lines = written(Options()).splitlines()
    assert lines[5] == "#  Rank  0 Group  0 Pid    100 on     node-a device  0 [0000:10:00] A GPU"
    assert lines[11] == (
        "     1048576        262144     float     sum      -1   135.00    7.77   14.57       0"
        "   129.40    8.10   15.19     N/A"
    )
    assert lines[12] == "# Out of bounds values : 0 OK"
    assert lines[13] == "# Avg bus bandwidth    : 14.88 "


@pytest.mark.parametrize("stamps", [0, 1])
def test_the_analyzer_reads_it(stamps: int, tmp_path: Path) -> None:
    path = tmp_path / "bench.txt"
    path.write_text(written(Options(report_timestamps=stamps)))
    found = picture(collect([path])).bandwidth
    assert found is not None
    assert (found.collective, found.ranks, found.values) == ("all_reduce", 2, 2)
    assert found.mean == pytest.approx(14.88)
    assert found.table.average == pytest.approx(14.88)


def test_json_is_read_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    path = tmp_path / "bench.json"
    written(Options(output_file=str(path)))
    text = path.read_text()
    assert "hidden" not in text
    assert "NCCL_PROTO=Simple" in json.loads(text)["env"]
    found = picture(collect([path])).bandwidth
    assert found is not None
    assert (found.collective, found.ranks, found.values, found.peak) == ("all_reduce", 2, 2, 15.19)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_bus_bandwidth_is_the_formula(name: str, ranks: int) -> None:
    one, n = ALL[name], ranks
    shape = one.shape(1 << 20, 4, n)
    size = 4 * max(shape.send, shape.receive)
    algbw, busbw = one.bandwidth(shape.count, 4, n, 1e-3)
    share = {"all_reduce": 2 * (n - 1) / n}
    share |= dict.fromkeys(
        ("all_gather", "reduce_scatter", "alltoall", "gather", "scatter"), (n - 1) / n
    )
    moved = size * (n - 1) / n if name == "hypercube" else size
    assert algbw == pytest.approx(moved / 1e6)
    assert busbw == pytest.approx(algbw * share.get(name, 1))
    # Shares are whole 16 bytes, and a buffer of the size asked for holds every shape.
    assert size <= 4 << 20
    assert (4 * shape.count) % 16 == 0 or shape.count == 1 << 20


@pytest.mark.parametrize(
    ("given", "name", "ranks", "word"),
    [
        ({"minbytes": 64, "maxbytes": 8}, "all_reduce", 2, "-b 64"),
        ({"stepfactor": 1}, "all_reduce", 2, "-f 1"),
        ({"stepbytes": 0}, "all_reduce", 2, "-i 0"),
        ({"minbytes": 0, "stepfactor": 2}, "all_reduce", 2, "-b 0"),
        ({"root": 4}, "broadcast", 4, "-r 4"),
        ({}, "hypercube", 6, "power of two"),
        ({"blocking": 3, "cudagraph": 1}, "all_reduce", 2, "-z 3"),
        ({"cudagraph": 1}, "all_reduce", 2, "-G 1"),
        ({"datatype": "f8e4m3"}, "all_reduce", 2, "-d f8e4m3"),
        ({"op": "avg"}, "all_reduce", 2, "-o avg"),
        ({"local_register": 1}, "all_reduce", 2, "-R 1"),
        ({"blocking": 1, "cudagraph": 1}, "all_reduce", 2, "-z 1"),
        ({"stream_null": 1, "cudagraph": 1}, "all_reduce", 2, "-y 1"),
        ({"stream_null": 1}, "all_reduce", 2, "-y 1"),
        ({"per_iter_timing": 1, "cudagraph": 1}, "all_reduce", 2, "-I 1"),
        ({"per_iter_skip": 1}, "all_reduce", 2, "-K 1"),
        ({"per_iter_skip": 20, "per_iter_timing": 1}, "all_reduce", 2, "-K 20"),
        ({"memory": 1}, "all_reduce", 2, "-M 1"),
        ({"parallel_init": 1}, "all_reduce", 2, "-p 1"),
        ({"timeout": 5}, "all_reduce", 2, "-T 5"),
    ],
)
def test_what_nccl_tests_would_replace_is_refused(
    given: dict, name: str, ranks: int, word: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check(Options(**given), ALL[name], "cpu", ranks)
    assert word in refused.value.problem


@pytest.mark.parametrize(
    "arguments",
    [["-o", "median"], ["-d", "quarter"], ["-n", "0"], ["-n", "ten"], ["-a", "4"], ["-I", "2"]],
)
def test_unknown_words_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(command.all_reduce, arguments).exit_code == 2


@pytest.mark.parametrize("option", ["-D", "-V", "-x"])
def test_options_that_are_not_there_are_refused_with_the_reason(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is not there: "):
        CliRunner().invoke(command.all_reduce, [option, "1"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "name", "op", "kind", "word"),
    [
        ("3d", "all_reduce", "sum", "float", "no such algorithm"),
        ("2d+zip", "all_reduce", "sum", "float", "no such algorithm"),
        ("flat", "all_gather", "sum", "float", "no all_gather"),
        ("flat", "all_reduce", "max", "float", "-o max"),
        ("flat", "all_reduce", "sum", "int8", "-d int8"),
    ],
)
def test_algorithms_that_cannot_be_are_refused(
    text: str, name: str, op: str, kind: str, word: str
) -> None:
    options = Options(algo=(text,), op=op, datatype=kind)
    with pytest.raises(UsageError) as refused:
        algorithms.check(options, ALL[name], "cpu", 1)
    assert word in refused.value.problem


def test_every_algorithm_and_wire_of_comm_is_taken() -> None:
    kinds, wires = algorithms.names()
    assert {"flat", "2d"} <= set(kinds)
    for kind in kinds:
        assert algorithms.parse(kind) == (kind, "exact")
        for wire in wires:
            assert algorithms.parse(f"{kind}+{wire}") == (kind, wire)


def test_iterations_are_figures_of_what_is_not_skipped(tmp_path: Path) -> None:
    seconds = (9.0, 1e-6, 2e-6, 3e-6, 4e-6)
    figures = Iterations.of(seconds, 1)
    assert (figures.min_us, figures.max_us) == (pytest.approx(1), pytest.approx(4))
    assert (figures.avg_us, figures.p50_us) == (pytest.approx(2.5), pytest.approx(2))
    assert figures.p99_us == pytest.approx(4)
    assert figures.cv_pct == pytest.approx(100 * 1.25**0.5 / 2.5)
    # And the columns that they add do not disturb who reads the table.
    stream = io.StringIO()
    report = Report(Options(per_iter_timing=1), "all_reduce", 0, True, [], stream)
    report.head([Device(r, "a", 1, r, "cpu", "x") for r in range(2)])
    report.row(1024, 256, "float", "sum", -1)
    for in_place in (False, True):
        report.side(Side(5e-6, 1.0, 2.0 + in_place, 0, seconds), in_place)
    report.foot(None)
    path = tmp_path / "bench.txt"
    path.write_text(stream.getvalue())
    found = picture(collect([path])).bandwidth
    assert found is not None
    assert (found.values, found.mean, found.peak) == (2, 2.5, 3.0)


@pytest.mark.parametrize("text", ["8Q", "-1", "", "1.0001K", "nan", "inf"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    shown = CliRunner().invoke(command.all_reduce, ["-b", text])
    assert isinstance(shown.exception, (UsageError, SystemExit)), shown.output
    assert shown.exit_code != 0


@pytest.mark.parametrize(
    "env", [{"NCCL_TESTS_SPLIT": "AND 0x1"}, {"NCCL_TESTS_DEVICE": "x"}, {"NCCL_TESTS_MIN_BW": "x"}]
)
def test_environment_that_would_be_ignored_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        environment(env)


def test_too_slow_a_run_fails() -> None:
    report = Report(Options(), "all_reduce", 0, False, [])
    report.bandwidths = [10.0]
    assert report.foot(11.0)
    assert not report.foot(11.2)


def test_names() -> None:
    assert set(COLLECTIVES) == set(NAMES) == set(ALL)
    assert plain("all_reduce_perf") == plain("all_reduce") == "all_reduce"
    assert plain("train") == "train"
    assert all(getattr(command, name).name == name for name in NAMES)
    for name in ("sendrecv", "sendrecv_perf"):
        shown = CliRunner().invoke(bench, [name, "--help"])
        assert "sendrecv_perf does" in shown.output


def test_sizes() -> None:
    assert list(Options(minbytes=8, maxbytes=128, stepfactor=4).sizes()) == [8, 32, 128]
    assert list(Options(minbytes=8, maxbytes=24, stepbytes=8).sizes()) == [8, 16, 24]
