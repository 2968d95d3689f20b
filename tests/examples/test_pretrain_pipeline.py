"""The pipeline example: two nodes of one process in a lab, a checkpoint, and on from there."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from tests import worlds

from evener.tools.lab import unavailable

EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_pipeline.py"


def example(rank: int, size: int, words: list[str]) -> str:
    """What a rank of the example prints, where a group is there already."""
    spec = importlib.util.spec_from_file_location("pretrain_pipeline", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.begin = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as said, patch.object(sys, "argv", words):
        module.main()
    return said.getvalue()


@pytest.mark.lab
@pytest.mark.slow
def test_it_learns_stops_and_goes_on(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path / "run"
    words = [str(EXAMPLE), "--rows", "8", "--folder", str(folder), "--every", "10", "--steps"]
    lab = [sys.executable, "-m", "evener", "lab", "run", "--nodes", "2", "--slots", "1"]
    lab += ["--keep", str(tmp_path), "--"]  # a node's /tmp is its own
    done = subprocess.run(
        [*lab, sys.executable, *words, "10"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout
    assert "over 2 ranks" in first and f"checkpoint {folder}" in first
    second = worlds.run([1, 1], example, [*words, "20"])[0]
    assert "resumed at step 10" in second
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", first + second)]
    assert losses[-1] < losses[0]
