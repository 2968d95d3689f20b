"""benchmarks/accuracy_gpt.py: what is concluded, and the whole path in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accuracy_gpt

    module: ModuleType = accuracy_gpt
    return module


def test_the_verdict_compares_with_the_seeds_own_spread(gpt: ModuleType) -> None:
    def runs(mode: str, losses: list[float]) -> list[dict[str, object]]:
        return [{"mode": mode, "seed": seed, "loss": loss} for seed, loss in enumerate(losses)]

    exact = runs("exact", [1.0, 1.1, 1.2])  # a standard deviation of 0.1
    good = gpt.rows([*exact, *runs("auto", [1.05, 1.15, 1.25])], ["exact", "auto"])
    assert good[1]["keeps"] is True
    assert good[1]["difference"] == pytest.approx(0.05)
    assert good[1]["interval"] == pytest.approx(0.0, abs=1e-9)
    assert "does not lose" in gpt.verdicts(good)[0]
    bad = gpt.rows([*exact, *runs("auto", [1.2, 1.3, 1.4])], ["exact", "auto"])
    assert bad[1]["keeps"] is False
    assert "LOSES" in gpt.verdicts(bad)[0]
    one = gpt.rows([*exact, *runs("auto", [1.2])], ["exact", "auto"])
    assert one[1]["keeps"] is None
    assert "no verdict" in gpt.verdicts(one)[0]


def test_symbols_are_numbered_in_their_order(gpt: ModuleType) -> None:
    assert gpt.encode("banana é").tolist() == [2, 1, 3, 1, 3, 1, 0, 4]


def test_it_trains_and_reports(tmp_path: Path) -> None:
    sample = tmp_path / "text"
    sample.write_text("the quick brown fox jumps over the lazy dog\n" * 200, encoding="utf-8")
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "accuracy_gpt.py"), "--size", "tiny", "--steps", "4",
            "--seeds", "1", "--modes", "exact,int8", "--parallel", "1", "--limit", "120",
            "--text", str(sample), "--json", str(result),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["unfinished"] == []
    exact, int8 = found["rows"]
    assert list(exact["runs"][0]["forms_mb"]) == ["exact"]
    assert "int8" in int8["runs"][0]["forms_mb"]
    assert 0 < abs(int8["difference"]) < 0.05
