"""Two nodes of two ranks on links of 1 Gb/s: what really crosses, by the counters of the NICs."""

import json
import sys
from pathlib import Path

import pytest

from evener.tools.lab import Lab, unavailable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(360)]
ROOT = Path(__file__).parents[2]


def test_what_crosses_the_wire_is_near_the_deduplicated_bound() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    lines: list[str] = []
    # A deep queue: on a busy machine a burst overflows one of 2 ms, and what is lost goes twice.
    with Lab("2x1@1gbit,queue=50ms") as lab:
        done = lab.launch(
            [sys.executable, "-m", "tests.embedding.lab_ranks"],
            cwd=ROOT,
            timeout=300,
            on_line=lambda *told: lines.append(told[3]),
        )
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 4, "\n".join(lines)
    assert done.status == 0
    bound = found[0]["bound"]
    counted = sum(each["counted"] for each in found)
    # Both ranks of a node read the same NIC: the larger of the two saw all of it.
    wire = sum(max(e["wire"] for e in found if e["node"] == node) for node in (0, 1))
    print(f"bound {bound:,}, counted {counted:,}, on the wire {wire:,}: {wire / bound:.4f} x")
    assert bound > 5_000_000
    assert bound <= counted <= 1.001 * bound
    assert bound <= wire <= 1.05 * bound
