"""What torch found out about the processor is not asked again by the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._inductor import cpu_vec_isa

from evener.compile import isa


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Programs that torch's own check was asked for; it says no to "bad"."""
    monkeypatch.setenv("EVENER_COMPILE_DIR", str(tmp_path))
    asked: list[str] = []

    def check_build(self: Any, code: str) -> bool:
        asked.append(code)
        return code != "bad"

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    isa.remember()
    return asked


def next_process(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """Nothing but the file is left."""

    def check_build(self: Any, code: str) -> bool:
        asked.append(code)
        return code != "bad"

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    asked.clear()
    isa.remember()
    isa.remember()


def test_a_yes_is_kept_and_a_no_is_not(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    avx2, avx512 = cpu_vec_isa.VecAVX2(), cpu_vec_isa.VecAVX512()
    assert avx2.check_build("good") and avx512.check_build("good")
    assert not avx2.check_build("bad")
    assert asked == ["good", "good", "bad"]  # each has flags of its own
    next_process(monkeypatch, asked)
    assert avx2.check_build("good") and avx512.check_build("good")
    assert not avx2.check_build("bad")
    assert avx2.check_build("other")
    assert asked == ["bad", "other"]


@pytest.mark.parametrize("what", ["processor", "compiler", "file"])
def test_it_is_asked_again(
    what: str, monkeypatch: pytest.MonkeyPatch, asked: list[str], tmp_path: Path
) -> None:
    avx2 = cpu_vec_isa.VecAVX2()
    assert avx2.check_build("good")
    if what == "processor":
        monkeypatch.setattr(isa, "_processor", lambda: "flags: fewer")
    if what == "compiler":
        monkeypatch.setattr(
            cpu_vec_isa, "_get_isa_dry_compile_fingerprint", lambda flags: f"newer {flags}"
        )
    if what == "file":
        (tmp_path / "torch" / "vector-instructions.json").write_text("{broken")
    next_process(monkeypatch, asked)
    assert avx2.check_build("good")
    assert asked == ["good"]
