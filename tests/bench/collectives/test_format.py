"""The table and the formulas, against the parser that reads real nccl-tests output."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.analyze import collect, picture
from evener.bench.collectives import command
from evener.bench.collectives.names import COLLECTIVES, NAMES, plain
from evener.bench.collectives.options import Options, check, environment
from evener.bench.collectives.output import Device, Report, Side, number
from evener.bench.collectives.shapes import ALL
from evener.bench.command import bench
from evener.errors import UsageError


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
    [["-o", "median"], ["-d", "quarter"], ["-n", "0"], ["-n", "ten"], ["-a", "4"], ["-I", "1"]],
)
def test_unknown_words_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(command.all_reduce, arguments).exit_code == 2


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
