"""Programs that once differed: each is run both ways again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.twins import harness
from tests.twins._alone import Alone

CASES = [
    pytest.param(name, program, id=f"{name}-{path.stem}")
    for name in harness.names()
    for path, program in harness.kept(name)
]


@pytest.mark.skipif(not CASES, reason="no program is kept: none has differed yet")
@pytest.mark.parametrize(("name", "program"), CASES)
def test_a_program_that_differed_once_is_the_same_both_ways(name: str, program: object) -> None:
    twin = harness.twin(name)
    if twin.skipped:
        pytest.skip(twin.skipped)
    twin.check(program)


def test_a_fault_is_found_and_shrunk(tmp_path: Path) -> None:
    from hypothesis import strategies as st

    def check(program: list[int]) -> None:
        assert sum(program) == sum(x for x in program if x != 7)

    twin = harness.Twin("example", st.lists(st.integers(0, 9), max_size=8), check)
    result = harness.search(twin, seed=1, count=200)
    assert result.program == [7] and result.error


def _twin(way: str) -> harness.Twin:
    """Programs of a twin that hang, with a process of their own, or that die."""
    from hypothesis import strategies as st

    def check(_: list[str]) -> None:
        if way == "dies":
            print("last words", flush=True)
            os._exit(3)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["TWIN_CHILD"]).write_text(str(child.pid), encoding="utf-8")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(600)

    return harness.Twin("example", st.just([way]), check, limit=5.0)


@pytest.mark.parametrize(
    ("way", "error"),
    [("hangs", "not finished after 5 s"), ("dies", "the process died; last words")],
)
def test_a_program_that_hangs_or_dies_ends_alone_and_is_named(
    way: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    monkeypatch.setenv("TWIN_CHILD", str(child))
    with contextlib.closing(Alone("example", partial(_twin, way))) as alone:
        for _ in range(2):  # a new process takes over
            result = alone.search(seed=1, count=3)
            assert (result.program, result.error) == ([way], error)
    if way == "hangs":
        state = Path(f"/proc/{child.read_text(encoding='utf-8')}/stat")
        assert not state.exists() or state.read_text(encoding="utf-8").split()[2] == "Z"
