"""The staged transport past the kernel, between simulated nodes: nothing copied, nothing wrong.

`benchmarks/staged_xdp.py` compares every byte and counts what processors copied. The tests of the
crates (`crates/staging/tests/frames.rs`) have the shorter cases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.tools.lab import unavailable

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "staged_xdp.py"


def row(directory: Path, case: str, *more: str) -> dict[str, Any]:
    """What the script says of a case. Skips where AF_XDP is refused."""
    out = directory / "rows.json"
    argv = [sys.executable, str(SCRIPT), "--carrier", "xdp", "--case", case, "--json", str(out)]
    argv += ["--seconds", "4", "--rate", "400mbit", "--size", "4000000", *more]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), done.stderr[-2000:]
    (found,) = json.loads(out.read_text())["rows"]
    refused = [line for line in found["said"] if "UDP is taken" in line]
    if refused:
        pytest.skip(f"no AF_XDP here: {refused}")
    assert done.returncode == 0, found
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("case", ["clean", "three", "path dies"])
def test_no_byte_of_payload_is_copied_and_all_are_right(tmp_path: Path, case: str) -> None:
    found = row(tmp_path, case, "--cpu")
    assert found["frames"] and found["wrong"] == 0
    assert found["copied"] == [0, 0]
    assert min(found["not_copied"]) > 10_000_000
