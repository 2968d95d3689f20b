"""Programs that once differed: each is run both ways again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.twins import harness

CASES = [
    pytest.param(name, program, id=f"{name}-{path.stem}")
    for name in harness.names()
    for path, program in harness.kept(name)
]


@pytest.mark.skipif(not CASES, reason="no program is kept: none has differed yet")
@pytest.mark.parametrize(("name", "program"), CASES)
def test_a_program_that_differed_once_is_the_same_both_ways(name: str, program: object) -> None:
    harness.twin(name).check(program)


def test_a_fault_is_found_and_shrunk(tmp_path: Path) -> None:
    from hypothesis import strategies as st

    def check(program: list[int]) -> None:
        assert sum(program) == sum(x for x in program if x != 7)

    twin = harness.Twin("example", st.lists(st.integers(0, 9), max_size=8), check)
    result = harness.search(twin, seed=1, count=200)
    assert result.program == [7] and result.error
