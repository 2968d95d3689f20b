"""Masked words and span corruption: as a plain loop, and resumed where they were."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evener import zero

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_text.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_text", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    machine = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
    found = type("Found", (), {"machine": machine})
    monkeypatch.setattr("evener.zero.api.probe", lambda *_, **__: found)  # not measured here
    monkeypatch.setattr(module, "SIZES", {"tiny": (2, 32, 2)})
    monkeypatch.setattr(module, "LENGTH", {"tiny": 48})
    return module


@pytest.mark.parametrize("objective", ["masked", "spans"])
def test_as_a_plain_loop_and_resumed(
    example: ModuleType,
    objective: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(steps: int, *more: str) -> tuple[str, list[float]]:
        words = ["--objective", objective, "--rows", "2", "--steps", str(steps), *more]
        monkeypatch.setattr(sys, "argv", ["x", *words])
        example.main()
        said = capsys.readouterr().out
        return said, [float(x) for x in re.findall(r"loss (\S+)", said)]

    _, plain = run(8, "--plain")
    _, whole = run(8)
    assert whole == pytest.approx(plain, abs=2e-3)
    assert whole[-1] < 5.9  # of 384 words that are as likely: 5.95
    run(4, "--folder", str(tmp_path / "b"))
    said, found = run(8, "--folder", str(tmp_path / "b"))
    assert "resumed at step 4" in said and "tokens/s" in said
    assert found == whole


def test_nothing_of_a_text_is_lost_in_spans(example: ModuleType) -> None:
    rows = torch.arange(2 * 48).view(2, 48)
    (given, before), labels = example.spans(rows, torch.Generator().manual_seed(0))
    for row, left, out in zip(rows, given, labels, strict=True):
        runs: dict[int, list[int]] = {}
        for token in out.tolist():
            if token >= example.FIRST_SENTINEL:
                now = runs.setdefault(token, [])
            else:
                now.append(token)
        whole = [x for token in left.tolist() for x in runs.get(token, [token])]
        assert whole == row.tolist()
    assert torch.equal(before[:, 1:], labels[:, :-1])


def test_hidden_bytes_are_what_is_guessed(example: ModuleType) -> None:
    rows = torch.randint(0, 256, (8, 400), generator=torch.Generator().manual_seed(1))
    (given,), labels = example.masked(rows, torch.Generator().manual_seed(0))
    guessed = labels != example.IGNORED
    assert guessed.float().mean() == pytest.approx(example.SHARE, abs=0.03)
    assert torch.equal(labels[guessed], rows[guessed])
    assert torch.equal(given[~guessed], rows[~guessed])
    assert (given[guessed] == example.MASK).float().mean() == pytest.approx(0.8, abs=0.08)
