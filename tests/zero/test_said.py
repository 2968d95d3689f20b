"""What is not done as it was asked for is said once, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero import schedule
from evener.zero.activations import Offload
from evener.zero.device import SimulatedDevice
from evener.zero.host import HostMemory
from evener.zero.spans import Spans
from tests.zero.models import Model
from tests.zero.test_checkpoint import start


def test_places_without_those_that_stay_are_refused() -> None:
    for given in ({"streaming": True}, {"away": {"layers.0/0"}}):
        with pytest.raises(UsageError, match="with no `resident` that is planned"):
            zero.initialize(model=Model(), config={}, **given)  # type: ignore[arg-type]


def test_values_cannot_be_assigned() -> None:
    engine = start(Model())
    with pytest.raises(UsageError, match="assign=True"):
        engine.module.load_state_dict(engine.module.state_dict(), assign=True)
    engine.close()


def test_a_fused_loss_without_a_layer_for_it(caplog: pytest.LogCaptureFixture) -> None:
    config = {"evener": {"device": "cpu", "loss": "fused"}}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = zero.initialize(model=model, config=config, resident=set())
    assert "no linear layer that makes logits" in caplog.text
    engine.close()


def test_what_is_given_twice_and_what_has_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    config = {
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "bf16": {"enabled": False, "check_grad_overflow": True},
        "fp16": {"auto_cast": False},
        "evener": {"device": "cpu", "crossing": "int8", "budget": {"host": "1GB"}},
    }
    caplog.set_level("INFO", "evener.zero")
    engine, *_ = zero.initialize(
        model=model,
        config=config,
        optimizer=optimizer,
        model_parameters=model.parameters(),
        lr_scheduler=scheduler,
        resident=set(),
        batch=(2, 8),
    )
    (line,) = (m for m in caplog.messages if m.startswith("taken and not needed: "))
    for said in (
        "fp16.auto_cast",
        "bf16.check_grad_overflow",
        "optimizer of the configuration (one was given)",
        "scheduler of the configuration (one was given)",
        "model_parameters (the optimizer has its own)",
        "batch (there is no plan: resident= was given)",
        "evener.budget.host (there is no plan: resident= was given)",
    ):
        assert said in line
    assert "evener.crossing = 'int8': there is one copy of the states" in caplog.text
    engine.close()


def test_units_that_cannot_be_run_before_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "evener.zero")
    zero.plan(Model(), config={"evener": {"device": "cpu", "rehearse": True}}, batch=(2, 8))
    assert "evener.rehearse = true: no unit is run before the plan: there is no GPU" in caplog.text


def test_a_device_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match=r"evener\.device = 'cuda:1'"):
        zero.initialize(model=Model(), config={"evener": {"device": "cuda:1"}}, resident=set())


def test_a_schedule_decays_to_its_least_rate() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    params = {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 4}
    made = schedule.make(optimizer, "WarmupDecayLR", {**params, "total_num_steps": 12})
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert rates[0] == pytest.approx(0.02) and max(rates) == pytest.approx(0.1)
    assert rates[8] == pytest.approx(0.06) and rates[12:] == pytest.approx([0.02, 0.02])


def test_what_a_checkpoint_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Model())
    saved = zero.save_checkpoint(engine, tmp_path)
    engine.close()
    changes: dict[str, Any] = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    engine = start(Model(), **changes)
    zero.load_checkpoint(engine, tmp_path)
    assert "holds no learning rate schedule" in caplog.text
    meta = json.loads((saved / "meta.json").read_text(encoding="utf-8"))
    (saved / "meta.json").write_text(json.dumps({**meta, "ranks": 2}), encoding="utf-8")
    zero.load_checkpoint(engine, tmp_path)
    assert "is of 2 ranks and this run has 1: random numbers go on as they are" in caplog.text
    engine.close()


def test_activations_that_have_no_room(caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice()
    offload = Offload(device, Spans(device), HostMemory(1 << 20))
    for _ in range(3):
        assert offload._room(1 << 24, torch.float32) is None
    assert caplog.text.count("activations stay on the accelerator") == 1
