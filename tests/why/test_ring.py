"""The ring: what a reader sees is what was written, whenever the writer dies."""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.tools.why.folders import jobs, sweep
from evener.watch import inside
from evener.watch.ring import SIZE, Reader, Writer

_names = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)
_marks = st.lists(
    st.tuples(_names, _names, st.integers(-1, 2**60), st.integers(-1, 2**60), st.booleans()),
    max_size=300,
)


@settings(max_examples=40, deadline=None)
@given(marks=_marks, steps=st.integers(0, 5))
def test_a_reader_sees_the_last_marks_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    marks: list[tuple[str, str, int, int, bool]],
    steps: int,
) -> None:
    path = tmp_path_factory.mktemp("ring") / "rank.3"
    writer = Writer(path, 3, 8, "gpu1")
    for _ in range(steps):
        writer.step()
    for what, group, seq, elements, entered in marks:
        writer.mark(what, group, seq, elements, "f32", entered)
    seen = Reader(path).read(marks=True)
    assert (seen.rank, seen.world, seen.pid, seen.host) == (3, 8, os.getpid(), "gpu1")
    assert (seen.step, seen.marks) == (steps, len(marks))
    assert [m.number for m in seen.last] == list(range(1, len(marks) + 1))[-256:]
    for mark, (what, group, seq, elements, entered) in zip(seen.last, marks[-256:], strict=True):
        assert (mark.what, mark.group) == (what[:24], group[:24])
        assert (mark.seq, mark.elements, mark.entered) == (seq, elements, entered)


def test_a_state_that_does_not_fit_leaves_the_last_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rank.0", 0, 1, "h")
    assert writer.state({"groups": {"0": 7}})
    assert not writer.state({"groups": "x" * SIZE})
    assert Reader(tmp_path / "rank.0").read().state == {"groups": {"0": 7}}


def test_a_state_with_thousands_of_ranks_goes_without_their_numbers(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rank.0", 0, 1, "h")
    few, many = {"ranks": [0, 1], "issued": 5}, {"ranks": list(range(4096)), "issued": 7}
    inside._tell(writer, {"groups": {"0": few}, "looks": 1})
    assert Reader(tmp_path / "rank.0").read().state == {"groups": {"0": few}, "looks": 1}
    inside._tell(writer, {"groups": {"0": many, "1": few}, "looks": 2})
    seen = Reader(tmp_path / "rank.0").read().state
    assert {name: group["issued"] for name, group in seen["groups"].items()} == {"0": 7, "1": 5}
    assert seen["looks"] == 2


def test_words_of_the_progress_are_never_seen_in_parts(tmp_path: Path) -> None:
    """Each byte of a word that is written is the same, so half a word would show."""
    path = tmp_path / "rank.0"
    pid = os.fork()
    if pid == 0:
        writer, number = Writer(path, 0, 1, "h"), 0
        while True:
            number = (number + 1) % 128
            word = number * 0x0101010101010101
            writer.loader(word, struct.unpack("<d", struct.pack("<Q", word))[0], 0.0)
    try:
        while not path.exists() or not path.stat().st_size or path.read_bytes()[:1] == b"\0":
            time.sleep(0.01)
        reader, seen = Reader(path), set()
        for _ in range(100_000):
            now = reader.read()
            for word in (now.batches, struct.unpack("<Q", struct.pack("<d", now.since))[0]):
                assert word % 0x0101010101010101 == 0
                seen.add(word)
        assert len(seen) > 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_is_seen_of_a_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's loader, looked at from inside and outside of it."""
    from torch.utils.data import dataloader

    monkeypatch.setattr(inside, "_iterators", weakref.WeakSet())
    kind = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    inside._loader(dataloader)
    look, clock = inside._Loader(), iter(range(1, 99))
    look._last = 0.0

    def now() -> tuple[int, float, float]:
        return look.look(float(next(clock)), sys._getframe())

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            inner.append(now())
            if index == 2:
                inner.append(now())  # still the same batch
            return index

    inner: list[tuple[int, float, float]] = []
    assert now() == (0, 0.0, 0.0)
    outer = []
    for _ in dataloader.DataLoader(Data(), batch_size=1):
        outer.append(now())
    assert inner == [(1, 2.0, 1.0), (2, 4.0, 2.0), (3, 6.0, 3.0), (3, 6.0, 4.0), (4, 9.0, 5.0)]
    assert outer == [(2, 0.0, 1.0), (3, 0.0, 2.0), (4, 0.0, 4.0), (5, 0.0, 5.0)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_broken_byte_is_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever stands in states and marks: a reader gives what was written, or nothing."""
    path = tmp_path_factory.mktemp("ring") / "rank.0"
    writer = Writer(path, 0, 2, "h")
    writer.state({"n": 1})
    writer.state({"n": 2})
    for number in range(5):
        writer.mark(f"op{number}", "0", number)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        raw[data.draw(st.integers(512, SIZE - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    seen = Reader(path).read(marks=True)
    assert seen.state in ({"n": 1}, {"n": 2}, {})
    assert {(m.what, m.seq) for m in seen.last} <= {(f"op{n}", n) for n in range(5)}


@pytest.mark.parametrize("turn", range(8))
def test_a_writer_killed_in_the_middle_leaves_a_whole_state(tmp_path: Path, turn: int) -> None:
    path = tmp_path / "rank.0"
    pid = os.fork()
    if pid == 0:
        writer = Writer(path, 0, 1, "h")
        number = 0
        while True:  # states of every size, so that a torn one would show
            number += 1
            writer.state({"n": number, "again": number, "fill": "x" * (number % 9000)})
            writer.mark("all_reduce", "0", number, number)
            writer.loader(number, float(number), float(number))
            writer.step()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            reader = Reader(path)
        except (OSError, ValueError):
            continue
        if reader.read().step > 50:
            break
    time.sleep(0.001 * turn)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    seen = reader.read(marks=True)
    assert seen.step > 50
    assert seen.state["n"] == seen.state["again"]
    assert len(seen.state["fill"]) == seen.state["n"] % 9000
    assert all(mark.seq == mark.elements for mark in seen.last)
    assert len(seen.last) >= 50
    # The ring of a process that is gone is taken over.
    Writer(path, 0, 1, "other")
    assert Reader(path).read().host == "other"
    assert reader.read().step == seen.step  # and who holds the old one still reads it


def test_a_second_process_of_a_rank_does_not_take_its_ring(tmp_path: Path) -> None:
    path = tmp_path / "rank.0"
    parent, child = os.pipe()
    pid = os.fork()
    if pid == 0:
        Writer(path, 0, 1, "h")
        os.write(child, b"x")
        time.sleep(60)
    os.read(parent, 1)
    try:
        with pytest.raises(FileExistsError):
            Writer(path, 0, 1, "h")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_is_no_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank.0").write_bytes(b"\0" * SIZE)
    with pytest.raises(ValueError, match="no ring"):
        Reader(tmp_path / "rank.0")


def test_rings_without_a_living_rank_are_removed_by_the_next_job(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            for name in ("killed", "young"):
                (tmp_path / f"evener-watch-{name}").mkdir()
                kept = Writer(tmp_path / f"evener-watch-{name}" / "rank.0", 0, 1, "gpu1")
                kept.step()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    living = tmp_path / "evener-watch-living"
    living.mkdir()
    writer = Writer(living / "rank.0", 0, 1, "gpu1")
    for name in ("killed", "living"):
        for path in (
            tmp_path / f"evener-watch-{name}" / "rank.0",
            tmp_path / f"evener-watch-{name}",
        ):
            os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / "another").mkdir()
    sweep([str(tmp_path)])
    assert set(jobs([str(tmp_path)])) == {"living", "young"}
    assert (tmp_path / "another").exists()
    writer.step()
    del writer
    os.utime(living / "rank.0", (time.time() - 60,) * 2)
    sweep([str(tmp_path)])
    assert set(jobs([str(tmp_path)])) == {"young"}


def test_a_look_at_the_main_thread_keeps_nothing_of_it() -> None:
    class Held:
        """Stands for a process group in a variable of a function."""

    looked, end = threading.Event(), threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        inside._look(inside._Loader(), 0.0, main)
        looked.set()
        end.wait()

    def program() -> weakref.ref[Held]:
        held = Held()
        thread.start()
        looked.wait()
        return weakref.ref(held)

    thread = threading.Thread(target=watch)
    ref = program()
    try:
        assert ref() is None
    finally:
        end.set()
        thread.join()
