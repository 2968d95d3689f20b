"""What can be read, and what is refused: folders, archives, encodings, hostile files."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import incidents as made

from evener.errors import UsageError
from evener.tools.analyze import collect, picture, run_checks
from evener.tools.analyze.command import analyze
from evener.tools.analyze.evidence import pickles
from evener.tools.analyze.parse import inputs, unwrap, wrapped

TEXT = "\n".join(
    ["world size: 4", *[line for rank in (0, 1, 3) for line in made.watchdog(rank, 7)]]
)


def ask(*paths: Path | str, given_text: bytes | None = None) -> str:
    done = CliRunner().invoke(analyze, [*map(str, paths), "-q"], input=given_text)
    if isinstance(done.exception, UsageError):
        raise done.exception
    return done.output


CUT = "1 packed file cut or damaged, and read up to there"


def titles(path: Path) -> list[str]:
    return [finding.title for finding in run_checks(picture(collect([path])))]


def zstd(data: bytes) -> bytes:
    try:
        import zstandard

        return bytes(zstandard.ZstdCompressor().compress(data))
    except ImportError:
        tool = shutil.which("zstd")
        if tool is None:
            pytest.skip("nothing here packs zstd")
        return subprocess.run([tool, "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


PACKED = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd,
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "utf-16-le": lambda data: data.decode().encode("utf-16-le"),
    "utf-16-be": lambda data: data.decode().encode("utf-16-be"),
    "utf-8-sig": lambda data: b"\xef\xbb\xbf" + data,
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "gz of utf-16": lambda data: gzip.compress(data.decode().encode("utf-16")),
}  # fmt: skip


@pytest.mark.parametrize("form", sorted(PACKED))
@pytest.mark.parametrize("wrap", ["plain", "docker", "gcp_document"])
def test_packed_and_encoded(form: str, wrap: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(PACKED[form]("\n".join(made.WRAPS[wrap](TEXT.split("\n"))).encode()))
    assert "rank 2 never joined" in ask(path)


def test_a_folder_a_pattern_an_archive_and_stdin(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    for rank, lines in enumerate(
        (made.watchdog(0, 7), made.watchdog(1, 7), [], made.watchdog(3, 7))
    ):
        (folder / f"rank_{rank}").mkdir(parents=True)
        (folder / f"rank_{rank}" / "stderr.log").write_text("\n".join(["world size: 4", *lines]))
    (folder / "weights.bin").write_bytes(os.urandom(4096))
    (folder / "core.77").write_bytes(os.urandom(4096))
    (folder / ".hidden").write_text("rank 9 raised")
    said = "rank 2 never joined"
    assert said in ask(folder)
    assert said in ask(folder / "rank_*" / "stderr.log")
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in folder.rglob("*.log"):
            file.write(path, path.relative_to(folder))
    assert said in ask(archive)
    assert said in ask("-", given_text=TEXT.encode())
    assert said in ask("-", given_text=gzip.compress(TEXT.encode()))
    with pytest.raises(UsageError, match="no file fits"):
        ask(tmp_path / "*.none")


def test_the_line_of_a_wrapped_log_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(made.docker(TEXT.split("\n"))))
    run = collect([path])
    assert run.cite(run.evidence.waits[1].where) == f"{path}:7"
    path.write_text("\n".join(made.cloudwatch(TEXT.split("\n"))))
    run = collect([path])
    number = int(run.cite(run.evidence.waits[0].where).rsplit(":", 1)[1])
    assert "Watchdog caught" in path.read_text().split("\n")[number - 1]


def test_docs_read_a_folder_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    assert (
        "evener analyze tests/analyze/runs/sockets" in (root / "docs/guide/operator.md").read_text()
    )
    done = CliRunner().invoke(analyze, ["tests/analyze/runs/sockets"])
    assert done.exit_code == 1, done.output
    assert "TCP stream" in done.output


# --- hostile files ---


class Bomb:
    def __reduce__(self) -> tuple:
        return (os.system, ("touch evener-pickle-ran",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb(), protocol=2),
        pickle.dumps({"version": "2.10", "entries": [Bomb()]}, protocol=4),
        b"\x80\x02cposix\nsystem\nq\x00X\x02\x00\x00\x00idq\x01\x85q\x02Rq\x03.",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02(i__main__\nX\n.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
    ],
)
def test_a_pickle_that_would_run_code_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    marker = Path("evener-pickle-ran")
    with pytest.raises(UsageError, match="would run code"):
        collect([path])
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02.",
        b"\x80\x02}q\x00(X\xff\xff\xff\xff",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b".",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02I" + b"9" * 5000 + b"\n.",
        b"\x80\x02]2aaaaa.",
        b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    ],
)
def test_a_damaged_pickle_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        collect([path])


def test_many_references_to_one_list_take_no_memory(tmp_path: Path) -> None:
    value: list = []
    for _ in range(60):
        value = [value, value]
    path = tmp_path / "trace"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": value}, protocol=2))
    assert not collect([path]).evidence.dumps[0].operations


@pytest.mark.parametrize("form", ["gz", "bz2", "xz", "zip"])
def test_a_bomb_is_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_BOMB_SIZE", 4 << 20)
    zeros = b"\0" * (64 << 20) if form != "gz" else b" " * (64 << 20)
    path = tmp_path / ("bomb.zip" if form == "zip" else "bomb")
    if form == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("log", zeros)
    else:
        path.write_bytes(PACKED[form](zeros))
    with pytest.raises(UsageError):
        collect([path])


@pytest.mark.parametrize("begin", [b"", b"[rank0]: " + b"x" * 70000, b'{"a": 1}\n{"b": "'])
def test_a_gigabyte_of_one_line_takes_bounded_memory(begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(1 << 30)  # sparse: a gigabyte of zero bytes without a line's end
        file.seek(0 if not begin else 1 << 29)
        file.write(b"x" * 4096)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from pathlib import Path\n"
        "from evener.tools.analyze.parse import inputs, stream\n"
        "from evener.tools.analyze.collect import Collector\n"
        "given = inputs.Input(Path('x'), lambda: open(sys.argv[1], 'rb'))\n"
        "class Text(inputs.Stream):\n    binary = False\n"
        "stream.Stream = Text\n"
        "collector = Collector(); stream.read(given, 0, collector)\n"
        # Not ru_maxrss: that of a process begins with what its parent had.
        "status = Path('/proc/self/status').read_text()\n"
        "print(collector.run.lines, int(status.split('VmHWM:')[1].split()[0]) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-600:]
    lines, megabytes = map(int, done.stdout.split())
    assert (lines, megabytes < 300) == (1 + begin.count(b"\n"), True)
    if not begin:
        with pytest.raises(UsageError, match="binary"):
            collect([path])


def test_binary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "core"
    for data in (os.urandom(1 << 16), b"\x7fELF" + bytes(4096), b"\0" * 4096):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="binary"):
            collect([path])


def test_an_archive_that_is_damaged_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.log", os.urandom(2000).hex())
    data = bytearray(path.read_bytes())
    for place in (0, 60):  # the member's own head, its packed bytes
        path.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
        with pytest.raises(UsageError, match="cannot be unpacked"):
            collect([path])


def test_a_gzip_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    long = TEXT + "\n" + "\n".join(os.urandom(40).hex() for _ in range(80_000))
    path.write_bytes(gzip.compress(long.encode())[:-50_000])
    assert "rank 2 never joined" in ask(path)
    assert CUT in titles(path)
    path.write_bytes(zstd(long.encode())[:-50_000])
    assert CUT in titles(path)
    path.write_bytes(b"\x1f\x8b" + b"garbage" * 30)
    with pytest.raises(UsageError, match="unpacked"):
        ask(path)


def test_what_was_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(TEXT)
    (tmp_path / "core").write_bytes(os.urandom(1 << 12))
    assert "1 file left out: neither text nor a recorder's dump" in titles(tmp_path)
    packed = tmp_path / "x.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.log", TEXT + "\n" + os.urandom(4 << 20).hex())
    data = packed.read_bytes()
    half = len(data) // 2
    packed.write_bytes(data[:half] + os.urandom(64) + data[half + 64 :])
    assert CUT in titles(packed)


def test_a_pattern_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(TEXT)
    monkeypatch.setattr(inputs, "_FILES", 2)
    with pytest.raises(UsageError, match="more than 2 files"):
        ask(tmp_path / "*.log")


# --- fuzz ---

PIECES = [
    "Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: x",
    "[rank3]: ",
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", "OpType=ALLREDUCE, ",
    "NumelIn=", ") ran for ", " milliseconds", "last enqueued work: ", ", last completed work: ",
    "[PG ID 0 PG GUID 0(default_pg) Rank 1]", "NVRM: Xid (PCI:0000:3b:00): 79, ", "rank      : ",
    " (local_rank: ", "exitcode  : -9 (pid: ", "Job summary", "#0-0 (c41e88d20b7a90f3) MISMATCH",
    "Communicator ranks have different AllGather operation counts", "30 ranks have launched up "
                                                                    "to operation ",
    "Rank 12 -- GPU 4", "GPU 00000000:3B:00.0", "    Pending : Yes", "JobID State", "OUT_OF_ME+",
    '{"log": "', '\\n"}', '{"MESSAGE": [1, 2]}', '{"textPayload": 3}', '{"coll_perf": {}}', "\n",
    "\n",
    "\n", "9" * 30, "-1", "[", "]", "(", ")", " ", "NCCL WARN ", "n:1:2 [0] ", "Root Cause "
                                                                               "(first observed "
                                                                               "failure)",
    "host      : x", "Detected mismatch between collectives on ranks. Rank 1 is running "
                     "collective: ",
    "workMetaList_.size()=", "During handling of the above exception, another exception occurred:",
    "\x1b[31m", "\x00", "é", "MNNVL busId 0x1", "- [7] finished collective #3, but didn't join "
                                                "collective #4",
    "3/4 clients joined", "errno: 98", "failed to bind to [::]:29500 (98)", "2026-02-14T11:00:00Z ",
]  # fmt: skip


def check(path: Path) -> None:
    done = CliRunner().invoke(analyze, [str(path)])
    if done.exception and not isinstance(done.exception, SystemExit | UsageError):
        raise done.exception


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_pieces_of_formats_in_any_order(text: str) -> None:
    path = Path(tempfile.gettempdir()) / f"evener-fuzz-{os.getpid()}"
    path.write_text(text)
    try:
        check(path)
    finally:
        path.unlink()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["entries", "version", "pg_config", "pg_status", "ranks", "rank", "frames", "events",
             "message", "communicators", "missing_ranks", "status", "collective_counts", "hash",
             "process_group", "collective_seq_id", "state", "input_sizes", "profiling_name", "0",
             "log", "header", "coll_perf", "results", "streams", "values", "stream", "is_p2p",
             "time_created_ns", "desc", "textPayload", "input_dtypes", "filename"]
        ),
        inner,
        max_size=6,
    ),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(json_values, st.sampled_from(["json", "pickle", "pickle4", "entries", "comms"]))
def test_documents_of_any_shape(value: object, form: str) -> None:
    path = Path(tempfile.gettempdir()) / f"evener-fuzz-trace_rank_{os.getpid()}"
    if form == "entries":
        value = {
            "version": "2.10",
            "entries": [value, made.entry(3)],
            "pg_config": value,
            "pg_status": value,
        }
    elif form == "comms":
        value = {"communicators": [value, {"ranks": [value], "missing_ranks": [value]}]}
    path.write_bytes(made.dumped(value, form if form.startswith("pickle") else "json"))  # type: ignore[arg-type]
    try:
        check(path)
    finally:
        path.unlink()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_as_a_pickle(data: bytes) -> None:
    with contextlib.suppress(pickles.RefusedError):
        pickles.loads(b"\x80\x02" + data, "x")


@settings(max_examples=80, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
        | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    ),
    st.sampled_from([2, 3, 4, 5]),
)  # fmt: skip
def test_a_plain_pickle_is_read_as_pickle_reads_it(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    if protocol < 3 and any(isinstance(leaf, bytes) for leaf in _leaves(value)):
        return  # bytes are made by a call there
    try:
        read = pickles.loads(data, "x")
    except pickles.RefusedError:
        if any(isinstance(v, int) and abs(v) > 1 << 100 for v in _leaves(value)):
            return
        raise
    assert read == value


def _leaves(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [value]


@settings(max_examples=80, deadline=None)
@given(json_values)
def test_any_line_of_json_is_unwrapped_or_left(value: object) -> None:
    unwrap.line(made.dumped(value, "json"))  # type: ignore[arg-type]
    unwrap.document(value)


def test_the_memory_of_a_stream_is_bounded() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    given_ = inputs.Input(Path("x"), lambda: io.BytesIO(b"a" * (32 << 20)))
    with inputs.Stream(given_) as stream:
        while stream.read(1 << 20):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_lines_that_a_terminal_broke_are_put_together(tmp_path: Path) -> None:
    said = []
    for rank in range(8):
        op = "BROADCAST" if rank == 6 else "ALLREDUCE"
        text = (
            f"[E ProcessGroupNCCL.cpp:474] [Rank {rank}] Watchdog caught collective operation "
            f"timeout: WorkNCCL(SeqNum=51277, OpType={op}, NumelIn=38400, NumelOut=38400, "
            "Timeout(ms)=1800000) ran for 1800201 milliseconds before timing out."
        )
        said += [text[at : at + 110] for at in range(0, len(text), 110)]
    log = tmp_path / "log"
    for pad in (0, 110):  # what was copied from a screen has spaces to its edge
        log.write_text("".join(line.ljust(pad) + "\n" for line in said))
        found = run_checks(picture(collect([log]), None))[0]
        assert found.title.startswith("rank 6 ran BROADCAST where ranks 0-5, 7 ran ALLREDUCE")


def test_a_table_is_not_taken_for_broken_lines() -> None:
    row = b"  1073741824     268435456     float     sum      -1   5000.0  214.75  402.65       0 "
    assert wrapped.width(b"\n".join([row] * 40)) == 0
    same = b"node-1:100:200 [0] NCCL INFO comm 0x7f00 rank 0 nranks 8 cudaDev 0 - Init COMPLETE."
    assert wrapped.width(b"\n".join([same] * 40)) == 0
