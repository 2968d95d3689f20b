"""What happens to a rank's lines: whatever it is, the rank never waits for the launcher."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.tools.launch import output
from evener.tools.launch.job import _TORCHRUN_TAG, Tagged
from evener.tools.launch.output import Files, Output, emit, follow


def pumped(data: bytes, take: Callable[[str], None]) -> None:
    """Has a writer put `data`, more than a pipe holds, to `follow` as the launcher reads it."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as end:
            end.write(data)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with os.fdopen(reading, "r", encoding="utf-8", errors="replace") as stream:
        follow(stream, take)
    thread.join(10)
    assert not thread.is_alive(), "the writer waits: its pipe was not drained"


def test_a_reader_that_fails_goes_on_reading(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def take(line: str) -> None:
        seen.append(line)
        raise OSError(28, "No space left on device")

    pumped(b"line\n" * 100_000, take)
    assert len(seen) == 100_000
    assert capsys.readouterr().err.count("a line was lost: OSError") == 1


def test_bytes_that_are_no_text_and_lines_without_end_arrive() -> None:
    seen: list[str] = []
    pumped(b"\xff\xfe\x00ok\n" + b"x" * (3 << 20) + b"\nlast\n", seen.append)
    assert seen[0] == "\ufffd\ufffd\0ok\n"
    assert "".join(seen[1:-1]) == "x" * (3 << 20) + "\n"
    assert max(map(len, seen)) <= 1 << 20
    assert seen[-1] == "last\n"


def test_pieces_of_a_long_line_stay_with_their_rank() -> None:
    tagged = Tagged(_TORCHRUN_TAG)
    assert tagged.feed("<<evener-rank 3>>first") == [(3, "first")]
    assert tagged.feed("second") == [(3, "second")]
    assert tagged.feed("third\n") == [(3, "third")]
    assert tagged.feed("the engine's\n") == [(None, "the engine's")]


def test_a_terminal_without_the_letters_gets_what_it_can_show() -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    emit(ascii_only, "loss 3\u00b5 \ufffd")
    emit(ascii_only, "next")
    assert ascii_only.buffer.getvalue() == b"loss 3\\xb5 \\ufffd\nnext\n"  # type: ignore[attr-defined]


def test_a_terminal_that_is_gone_or_full_ends_nothing() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        for _ in range(3):
            emit(full, "x" * 10_000)
        with pytest.raises(OSError, match="No space"):  # it was really full
            os.write(full.fileno(), b"x")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    emit(full, "closed")


def test_a_full_disk_is_said_once_and_the_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rank.0"
    folder.mkdir()
    (folder / "stdout").symlink_to("/dev/full")
    files = Files(tmp_path, 1)
    for number in range(3):
        files.write(0, "stdout", f"line {number}")
        files.write(0, "stderr", f"line {number}")
    assert capsys.readouterr().err.count("No space left on device") == 1
    (folder / "stdout").unlink()
    files.write(0, "stdout", "line 3")  # there is room again
    files.write(0, "stdout", "line 4")
    files.close()
    files.write(0, "stdout", "late")
    lost = "[evener launch: 3 lines could not be written here]\n"
    assert (folder / "stdout").read_text() == f"{lost}line 3\nline 4\n"
    assert (folder / "stderr").read_text() == "line 0\nline 1\nline 2\n"


def test_an_elastic_jobs_output_goes_on_too(tmp_path: Path) -> None:
    (tmp_path / "rank.0").write_text("a file where the folder should be")
    kept = Output(folder=tmp_path)
    kept.write(5, "stdout", "early", "host/0")
    kept.rename(5, 0, "host")
    kept.write(5, "stdout", "late \udcff", "host/0")
    kept.close()


def test_a_job_whose_files_cannot_be_written_ends_well(tmp_path: Path) -> None:
    """Real ranks, which print more than all pipes hold, of bytes that are no text."""
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        (tmp_path / "out" / f"rank.{rank}").mkdir()
        (tmp_path / "out" / f"rank.{rank}" / "stdout").symlink_to("/dev/full")
    text = "import sys; sys.stdout.buffer.write((b'\\xff' * 100 + b'\\n') * 20000)"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "evener", "launch", "-np", "2", "--output-dir", "out"),
            *(sys.executable, "-c", text),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"@localhost] \\ufffd") == 40_000
    assert done.stderr.count(b"No space left on device") == 1
    assert output._LONGEST_LINE == 1 << 20
