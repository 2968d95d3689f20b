"""The example of a mixture of experts: it resumes where it was, on another number of ranks too."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import worlds

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_moe.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("pretrain_moe", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.SIZES["tiny"] = (2, 16, 2, 16, 4, 2, 16, 2)
    return example


def on_ranks(rank: int, size: int, folder: str, words: list[str]) -> None:
    example = load()
    os.environ["WORLD_SIZE"] = str(size)
    # The world has its process group already.
    example.dist.init_process_group = lambda *_: None
    example.dist.destroy_process_group = lambda: None
    sys.argv = ["x", "--folder", folder, *words]
    example.main()


def test_it_resumes_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load()

    def run(folder: str, steps: int) -> dict[int, str]:
        words = ["--rows", "2", "--steps", str(steps), "--every", "2"]
        monkeypatch.setattr(sys, "argv", ["x", "--folder", str(tmp_path / folder), *words])
        example.main()
        text = capsys.readouterr().out
        assert "tokens/s" in text and "checkpoint" in text
        return {int(s): loss for s, loss in re.findall(r"step +(\d+)/\d+  loss (\S+)", text)}

    whole = run("a", 4)
    run("b", 2)
    worlds.run([1, 1], on_ranks, str(tmp_path / "b"), ["--rows", "1", "--steps", "3"])
    saved = torch.load(tmp_path / "b/checkpoint.pt", weights_only=True)
    assert saved["step"] == 3
    assert saved["model"]["layers.0.moe.experts.gate_up_proj"].shape == (4, 32, 16)
    resumed = run("b", 4)
    # All ranks' rows are one batch, so two ranks trained what one would have.
    assert list(resumed) == [4] and abs(float(resumed[4]) - float(whole[4])) < 2e-3
