"""The example that people start from: a second call goes on where the first ended."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_gpt.py"


def test_it_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("pretrain_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "LENGTH", {"tiny": 32})

    def run(folder: str, steps: int) -> tuple[str, dict[int, str]]:
        words = ["--rows", "1", "--steps", str(steps), "--every", "2"]
        monkeypatch.setattr(sys, "argv", ["x", "--folder", str(tmp_path / folder), *words])
        state = torch.get_rng_state()
        example.main()
        torch.set_rng_state(state)
        text = capsys.readouterr().out
        found = re.findall(r"step +(\d+)/\d+  loss (\S+)", text)
        return text, {int(step): loss for step, loss in found}

    _, whole = run("a", 4)
    first, _ = run("b", 2)
    second, found = run("b", 4)
    assert "resumed" not in first and "resumed at step 2" in second
    assert found[4] == whole[4]
    assert "tokens/s" in second and "planned" in second
