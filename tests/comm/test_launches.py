"""Kernel launches per unit of FSDP2 in a step: the host's time is what a step waits for.

A count, not a time: benchmarks/fsdp_launches.py. A stage may take fewer, and then its bound here
goes down; one that takes more is slower on every machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Launches, and operators that only make views and memory.
MOST = {
    "own": (1, 2),
    "look": (3, 6),
    "announce": (1.6, 4),
    "write": (1, 1),
    "send": (0, 3),
    "apply": (4, 5),
    "copy": (4, 6),
    "reduce": (4, 14),
    "finish": (2, 6),
}


@pytest.mark.timeout(400)
def test_no_stage_of_a_step_launches_more_than_it_must(tmp_path: Path) -> None:
    record = tmp_path / "launches.json"
    script = str(BENCHMARKS / "fsdp_launches.py")
    words = ["--forms", "int4", "--turns", "0", "--json", str(record)]
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(record.read_text(encoding="utf-8"))["runs"]["int4"]["rows"]
    found = {stage: (row["launches"], row["others"]) for stage, row in rows.items()}
    assert found.keys() == MOST.keys()
    over = {
        stage: (have, MOST[stage], rows[stage]["kinds"])
        for stage, have in found.items()
        if have[0] > MOST[stage][0] or have[1] > MOST[stage][1]
    }
    assert not over, over
    assert all(found[stage][0] for stage in MOST if stage != "send"), "something counts nothing"


def test_one_operator_more_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fsdp_launches

    meter = fsdp_launches.Meter()
    look = meter.within("look", lambda weights: weights[1:].view(-1).add(1).sum())
    look(torch.ones(3))
    assert not meter.launches["look"]
    meter.counting = True
    look(torch.ones(3))
    assert dict(meter.launches["look"]) == {"add": 1, "sum": 1}
    assert dict(meter.others["look"]) == {"slice": 1, "view": 1}
