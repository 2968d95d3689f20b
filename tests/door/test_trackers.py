"""Figures of a model in trackers: W&B's and MLflow's calls on stand-ins, TensorBoard's for real."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from evener.ddp.integrations import trackers
from evener.errors import UsageError
from tests import worlds


class Run:
    """As a run of W&B's."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, Any]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def train(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4)))
    before = trackers.figures(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model = accelerate(plain, optimizer, mode="int8")
    run, calls = Run(), []
    sys.modules["wandb"] = SimpleNamespace(run=run)  # type: ignore[assignment]
    log = SimpleNamespace(log_metrics=lambda found, step: calls.append((step, found)))
    sys.modules["mlflow"] = log  # type: ignore[assignment]
    tracks = [trackers.wandb(model, every=4), trackers.mlflow(model, every=4)]
    writer = None
    if importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(f"{folder}/{rank}")
        tracks.append(trackers.tensorboard(model, writer, every=4))
    for step in range(9):
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for track in tracks:
            track(step)
    if writer is not None:
        writer.close()
    return {"before": before, "wandb": run.logged, "axes": run.axes, "mlflow": calls}


def test_rank_0_writes_bytes_and_forms(tmp_path: Any) -> None:
    first, second = worlds.run((1, 1), train, str(tmp_path))
    assert first["before"] == {} and not second["wandb"] and not second["mlflow"]
    assert [row["evener/step"] for row in first["wandb"]] == [0, 4, 8]
    assert first["axes"] == [("evener/step", None), ("evener/*", "evener/step")]
    last = first["wandb"][-1]
    assert last["evener/gradients_mb"] == pytest.approx(
        4 * (256 * 256 + 256 + 256 * 4 + 4) / 1e6, rel=0.01
    )
    assert 0 < last["evener/sent_mb"] < 0.5 * last["evener/gradients_mb"], "INT8 is not sent"
    assert last["evener/buckets_int8"] >= 1 and last["evener/exposed_ms"] >= 0
    assert [step for step, _ in first["mlflow"]] == [0, 4, 8]
    assert "evener/sent_mb" in first["mlflow"][0][1]
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{tmp_path}/0")
        events.Reload()
        assert [e.step for e in events.Scalars("evener/sent_mb")] == [0, 4, 8]


def test_what_cannot_be_is_said() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="every=0"):
        trackers.mlflow(model, every=0)
    with pytest.raises(UsageError, match="was given a str"):
        trackers.tensorboard(model, "runs")


def test_no_tracker_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys; from evener.ddp.integrations import trackers;"
        "print({'wandb', 'mlflow', 'tensorboard'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
