"""`evener net trace`: what an engine wrote is what it counted, and what is no trace is refused."""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from evener.base import settings
from evener.errors import UsageError
from evener.net import plugin_path
from evener.net.command import net
from evener.net.trace import files, page, read, summed_up
from evener.net.trace.pcapng import ARRIVED, DECIDED, EVENT, LOST, OPENED, OVER, REPLACED, SILENT
from evener.net.trace.summary import as_json
from evener.tools.bench.net.drive import Job, command
from evener.tools.lab import Lab, Spec, unavailable
from tests.pages import needs_browser, nothing_is_clipped

SECOND = 1_000_000_000


def block(kind: int, body: bytes) -> bytes:
    body += b"\0" * (-len(body) % 4)
    length = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + length + body + length


def option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + b"\0" * (-len(value) % 4)


def begin(links: tuple[int, int] = (101, 147)) -> bytes:
    section = struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1) + option(1, b"net-here-7") + b"\0" * 4
    interfaces = (block(1, struct.pack("<HHI", link, 0, 0)) for link in links)
    return block(0x0A0D0D0A, section) + b"".join(interfaces)


def enhanced(
    interface: int, at: int, data: bytes, size: int, comment: str, flags: int = 0
) -> bytes:
    head = struct.pack("<IIIII", interface, at >> 32, at & 0xFFFFFFFF, len(data), size)
    more = option(2, struct.pack("<I", flags)) if flags else b""
    more += option(1, comment.encode()) if comment else b""
    return block(6, head + data + b"\0" * (-len(data) % 4) + more + (b"\0" * 4 if more else b""))


def event(
    at: int, kind: int, path: int = 255, detail: int = 0, comment: str = "", **more: int
) -> bytes:
    names = ("number", "size", "took", "trip", "", "window", "flying")
    values = [more.get(name, 0) for name in names]
    return enhanced(1, at, EVENT.pack(1, kind, path, detail, 5, *values), EVENT.size, comment)


def packet(
    at: int, connection: int, path: int, size: int, inbound: bool, comment: str = ""
) -> bytes:
    ip = bytes([0x45]) + bytes(19)
    ports = struct.pack(">HH", 20_001, 20_002) + bytes(4)
    head = struct.pack("<BBBBII", 0xE7, 1, 4, path, connection, 1) + bytes(12)
    return enhanced(0, at, ip + ports + head, 28 + size, comment, 1 if inbound else 2)


def counted(missed: int) -> bytes:
    return block(5, struct.pack("<III", 1, 0, 0) + option(5, struct.pack("<Q", missed)) + b"\0" * 4)


def whole() -> bytes:
    ms = SECOND // 1000
    return b"".join(
        [
            begin(),
            event(SECOND, OPENED, number=6, comment="open: there"),
            packet(SECOND + ms, 6, 3, 1000, inbound=False),
            packet(SECOND + ms, 6, 4, 500, inbound=False),
            event(SECOND + 2 * ms, ARRIVED, 3, size=1000, took=900, trip=800, flying=500),
            event(SECOND + 9 * ms, LOST, 4, 2, size=500),
            event(SECOND + 9 * ms, SILENT, 4, size=1),
            event(SECOND + 9 * ms, REPLACED, 4, 7),
            packet(SECOND + 30 * ms, 6, 3, 500, inbound=False),
            event(SECOND + 32 * ms, ARRIVED, 3, size=500, took=2000, trip=1900),
            event(SECOND + 32 * ms, DECIDED, 3, 1, size=900),
            packet(SECOND + 33 * ms, 5, 0, 70, inbound=True),
            packet(SECOND + 33 * ms, 5, 0, 70, inbound=True, comment="dropped: the tag is wrong"),
            # 900 ms later, with nothing in flight before: no stall.
            event(SECOND + 932 * ms, ARRIVED, 3, size=500, took=1000, trip=1000),
            event(2 * SECOND, OVER, comment="over: closed"),
            counted(4),
        ]
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "net-here-7.pcapng"
    path.write_bytes(whole())
    return path


def test_a_trace_is_summed_up_by_connection_and_path(trace: Path) -> None:
    found = as_json(summed_up([read(trace)]))
    assert (found["left_out"], found["cut"]) == (4, [])
    (one,) = found["connections"]
    assert (one["process"], one["number"], one["peer"]) == ("net-here-7", 5, "there")
    assert (one["bytes_sent"], one["bytes_received"], one["over"]) == (2000, 70, "closed")
    assert one["dropped"] == {"the tag is wrong": 1}
    assert one["replaced"] == [{"path": 4, "by": 7}]
    assert one["decisions"] == {"shrink": 1}
    # From the acknowledgement that left 500 bytes in flight to the next.
    assert one["longest_stall_ms"] == 30.0
    assert [stall["ms"] for stall in one["stalls"]] == [30.0]
    assert one["rtt_ms"] == {"p50": 1.0, "p90": 1.9, "p99": 1.9, "max": 1.9}
    paths = {path["path"]: path for path in one["paths"]}
    assert paths[3]["source_port"] == 20_001
    assert (paths[3]["bytes_sent"], paths[3]["acknowledged_bytes"]) == (1500, 2000)
    assert (paths[4]["timed_out"], paths[4]["lost"], paths[4]["silences"]) == (1, 0, 1)


def test_the_older_file_of_a_process_belongs_to_the_newer_one(trace: Path) -> None:
    older = trace.with_name("net-here-7.old.pcapng")
    older.write_bytes(begin() + event(SECOND // 2, ARRIVED, 3, size=9, took=1) + counted(1))
    both = as_json(summed_up([read(path) for path in files([trace.parent])]))
    assert both["left_out"] == 4
    (one,) = both["connections"]
    assert {path["path"]: path["acknowledged"] for path in one["paths"]}[3] == 4


def test_a_file_that_is_still_written_is_read_to_its_end(trace: Path) -> None:
    data = trace.read_bytes()
    last = len(counted(4))
    for end in (len(data) - 1, len(data) - last, len(data) - last - 5):
        trace.write_bytes(data[:end])
        found = read(trace)
        assert found.cut and found.events
    words = CliRunner().invoke(net, ["trace", "show", str(trace)])
    assert words.exit_code == 0 and "is not closed" in words.output


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"no capture at all", "is no pcapng"),
        (begin((1, 147)), "link type 1"),
        (begin() + struct.pack("<II", 6, 13) + bytes(20), "a block of 13"),
        (begin() + struct.pack("<III", 6, 12, 16), "two lengths"),
        (begin() + block(9, b""), "kind 9"),
        (begin() + enhanced(1, 0, bytes([2]) + bytes(47), 48, ""), "layout 2"),
        (begin() + enhanced(1, 0, bytes(47), 48, ""), "48 bytes"),
        (begin() + block(6, struct.pack("<IIIII", 0, 0, 0, 999, 999)), "999 bytes"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, data: bytes, word: str) -> None:
    path = tmp_path / "broken.pcapng"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=word):
        read(path)


def test_the_command_shows_draws_and_says_what_is_missing(trace: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    html = tmp_path / "trace.html"
    shown = run(net, ["trace", "show", str(trace), "--html", str(html)])
    assert shown.exit_code == 0, shown.output
    for word in ("there", "4 by 7", "1 x the tag is wrong", "4 records were left out", "30.0 ms"):
        assert word in shown.output, (word, shown.output)
    drawn = html.read_text()
    assert drawn == page(summed_up([read(trace)]))
    # Twice, for wide pages and narrow ones: path 4 was silent once and lost once.
    assert drawn.count('class="silent"') == 2 and drawn.count('class="lost"') == 2
    for outside in ("http://", "https://", "<script"):
        assert outside not in drawn
    env = {settings.EVENER_NET_TRACE_DIR.name: str(tmp_path)}
    found = json.loads(run(net, ["trace", "show", "--json"], env=env).output)
    assert found["connections"][0]["peer"] == "there"
    none = run(net, ["trace", "show"], env={settings.EVENER_NET_TRACE_DIR.name: ""})
    assert "no trace to show" in str(none.exception)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no trace in"):
        files([tmp_path / "empty"])
    with pytest.raises(UsageError, match="is not there"):
        files([tmp_path / "gone"])


@needs_browser
def test_the_page_fits_a_phone_and_a_laptop(trace: Path, tmp_path: Path) -> None:
    nothing_is_clipped(page(summed_up([read(trace)])), tmp_path)


@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_job_writes_what_it_counts() -> None:
    # Nodes have a /tmp of their own: what they write is read in the working directory.
    directory = Path(f".evener-trace-{os.getpid()}").resolve()
    env = {
        "EVENER_NET_ENGINE": "udp",
        "EVENER_NET_TRACE_DIR": str(directory),
        "EVENER_STATS_DIR": str(directory),
    }
    job = Job(str(plugin_path()), comms=1, depth=2, sizes="65536", seconds=0.3, verify=True)
    try:
        with Lab(Spec.parse("2x1@200mbit,queue=20ms")) as lab:
            lab.fault("path0", "loss 2%")
            assert lab.launch(command(job), env=env, timeout=40.0).ok
        records = [json.loads(path.read_text()) for path in directory.glob("net-*.json")]
        traces = files([directory])
        assert len(records) == len(traces) == 2
        ways: dict[str, list[int]] = {}
        for path in traces:
            found = read(path)
            assert not found.cut
            count = len(found.packets) + len(found.events)
            # A machine that is busy may leave records out; then sums do not agree.
            if not found.left_out:
                (record,) = [one for one in records if one["host"] in path.name]
                counted = record["net"]["packets"]
                # The record is of some moment before the end.
                ways[path.name] = [
                    sum(one.inbound is inbound for one in found.packets)
                    for inbound in (False, True)
                ]
                assert ways[path.name][0] >= counted["sent"] > 0
                lost = [event.detail for event in found.events if event.kind == LOST]
                assert lost.count(1) >= counted["lost"]
                assert lost.count(2) >= counted["timed_out"]
            if shutil.which("capinfos"):
                said = subprocess.run(
                    ["capinfos", "-c", "-M", "-T", "-r", str(path)],
                    capture_output=True, text=True, check=True, timeout=30,
                )  # fmt: skip
                assert int(said.stdout.split("\t")[1]) == count
        if len(ways) == 2:
            (out, back), (other_out, other_back) = ways.values()
            # What came was sent, and 2% were lost.
            assert 0 < back <= other_out and 0 < other_back <= out
            assert back + other_back < out + other_out
        whole = as_json(summed_up([read(path) for path in traces]))
        sent = [one for one in whole["connections"] if one["paths"] and one["peer"]]
        assert sent and all(path["source_port"] for one in sent for path in one["paths"])
    finally:
        shutil.rmtree(directory)
