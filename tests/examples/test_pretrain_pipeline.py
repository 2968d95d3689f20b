"""The pipeline example: two nodes of one process in a lab, a checkpoint, and on from there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.tools.lab import unavailable

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_pipeline.py"


@pytest.mark.lab
@pytest.mark.slow
def test_it_learns_stops_and_goes_on(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path / "run"

    def run(steps: int) -> str:
        lab = [sys.executable, "-m", "evener", "lab", "run", "--nodes", "2", "--slots", "1"]
        lab += ["--keep", str(tmp_path), "--"]  # a node's /tmp is its own
        script = [sys.executable, str(EXAMPLE), "--rows", "8", "--folder", str(folder)]
        done = subprocess.run(
            [*lab, *script, "--steps", str(steps), "--every", "10"],
            capture_output=True, text=True, timeout=170,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run(10)
    assert "over 2 ranks" in first and f"checkpoint {folder}" in first
    second = run(20)
    assert "resumed at step 10" in second
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", first + second)]
    assert losses[-1] < losses[0]
