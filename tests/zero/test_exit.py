"""A program ends with the status that it asked for, whether it closed the engine or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from evener import zero
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
engine, *_ = zero.initialize(
    model=model, resident=set(), config={"evener": {"device": "cpu"},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage3_param_persistence_threshold": 0}})
for _ in range(3):
    engine.backward(engine(torch.randn(4, 256)).square().mean())
    engine.step()
zero.begin_checkpoint(engine, sys.argv[2])
how = sys.argv[1]
if how == "error":
    raise ValueError("meant")
if how == "status":
    sys.exit(7)
"""  # fmt: skip


def test_no_abort_and_no_thread_left(tmp_path: Path) -> None:
    """All at a time: the machine is then busy, as it is where threads are cut off."""
    wanted = {"end": 0, "error": 1, "status": 7}
    running = {
        way: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, way, str(tmp_path / way)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for way in wanted
    }
    for way, process in running.items():
        said, _ = process.communicate(timeout=240)
        assert "terminate called" not in said, said
        assert process.returncode == wanted[way], (way, process.returncode, said)
        assert (tmp_path / way / "latest").exists(), "what was begun is written"
