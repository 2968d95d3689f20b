"""The published case in a lab: both cablings are measured and analyzed, and differ as they should.

Rates are not asserted: a busy machine may not carry them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evener.tools.lab import unavailable

RUN = Path(__file__).parents[2] / "examples" / "asterfusion" / "run.py"


@pytest.mark.lab
@pytest.mark.slow
def test_before_and_after(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    command = [sys.executable, str(RUN), "--out", str(tmp_path), "--largest", "20"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "fabric.crossings" in summary["before"]["findings"]
    assert "fabric.crossings" not in summary["after"]["findings"]
    for name in ("before", "after"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(found["pairs"]) == 8
        assert found["rings"]["distinct"] == 4
        assert found["fabric"]["today"]["crossing_share"] == (name == "before")
        assert "<svg" in (tmp_path / f"{name}.html").read_text()
