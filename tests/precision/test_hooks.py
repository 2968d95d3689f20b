"""`precision.follow` in loops that stay as they are: hooks, transformers' Trainer, Lightning."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import precision
from evener.errors import UsageError
from evener.precision import State, hooks
from tests.precision.test_torch import QUICK, Tower, batch


def loop(model: Any, optimizer: Any, steps: int, begin: int = 0, shift: float = 0.0) -> None:
    """As programs write it."""
    for step in range(begin, begin + steps):
        x, y = batch(step, shift * (step - begin))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def test_a_loss_under_the_policys_autocast() -> None:
    """The outputs stay as they are, the loss is float32, and a spike is still found."""
    model = Tower()
    model.forward = lambda x: _narrow(model, x)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = precision.follow(model, optimizer, limits=QUICK)
    seen = set()
    for step in range(140):
        x, y = batch(step)
        model.spike = 20.0 if step >= 120 else 0.0
        optimizer.zero_grad()
        with policy.autocast():
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
        seen.add((policy.half, out.dtype, loss.dtype))
        loss.backward()
        optimizer.step()
    assert seen == {
        (False, torch.float32, torch.float32),
        (True, torch.bfloat16, torch.float32),
    }
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause == "loss"
    assert model(x).dtype == torch.float32


def _narrow(model: Tower, x: torch.Tensor) -> torch.Tensor:
    """As Tower computes, with outputs as autocast makes them."""
    out = model.last(torch.tanh(model.first(x)))
    if out.dtype != torch.float32 and model.spike:
        out = out + model.spike * torch.randn_like(out)
    return out


def made() -> tuple[Tower, Any, precision.torch.Policy]:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = precision.follow(model, optimizer, limits=QUICK)
    loop(model, optimizer, 120)
    assert policy.half
    return model, optimizer, policy


def test_a_loop_of_its_own_is_mostly_half() -> None:
    model, _, policy = made()
    assert policy.machine.half_steps == 120 - QUICK.settle
    x, y = batch(1)
    assert model(x).dtype == torch.float32
    assert (model(x).argmax(1) == y).float().mean() > 0.8


def test_a_spike_is_noticed() -> None:
    model, optimizer, policy = made()
    model.spike = 20.0
    loop(model, optimizer, 20, 120)
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause == "loss"


def test_what_is_infinite_in_half_alone_changes_no_weight() -> None:
    model, optimizer, policy = made()
    model.last.register_forward_hook(
        lambda _m, _i, out: out * float("inf") if out.dtype == torch.bfloat16 else out
    )
    loop(model, optimizer, 3, 120)
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause == "loss"
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_drifting_data_switch_nothing() -> None:
    model, optimizer, policy = made()
    before = policy.machine.switches
    loop(model, optimizer, 100, 120, shift=0.015)
    optimizer.zero_grad()
    x, y = batch(1)
    nn.functional.cross_entropy(model(x), 3 - y).backward()  # wrong labels
    optimizer.step()
    assert policy.machine.switches == before


def test_nothing_is_left_behind() -> None:
    gc.collect()  # policies of the tests before, which would keep the hook
    backward, forward = hooks._backward or torch.Tensor.backward, Tower.forward
    _model, _, policy = made()
    policy.detach()
    policy.detach()
    assert torch.Tensor.backward is backward
    assert policy.model.forward.__func__ is forward
    assert not policy.optimizer._optimizer_step_pre_hooks


def test_float16_wants_a_scale() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.follow(model, optimizer, dtype=torch.float16)
    with pytest.raises(UsageError, match="loss scale"):
        loop(model, optimizer, 1)


def test_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from evener.ddp.integrations.transformers import FollowPrecision

    class Model(Tower):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for step in range(50) for x, y in zip(*batch(step), strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=32, max_steps=90, use_cpu=True,
        learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    follow = FollowPrecision(limits=QUICK)
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[follow])
    trainer.train()
    assert follow.policy.machine.step == 90
    assert follow.policy.machine.half_steps == 90 - QUICK.settle
    arguments.bf16 = True
    with pytest.raises(UsageError, match="bf16=True"):
        follow.on_train_begin(arguments, None, None)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    from evener.ddp.integrations.lightning import FollowPrecision

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()

        def training_step(self, pair: Any, index: int) -> Any:
            x, y = pair
            return nn.functional.cross_entropy(self.tower(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    follow = FollowPrecision(limits=QUICK)
    module = Module()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=140, accelerator="cpu", callbacks=[follow], default_root_dir=tmp_path, **options
    )
    batches = [batch(step) for step in range(140)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert follow.policy.machine.step == 140
    assert follow.policy.machine.half_steps == 140 - QUICK.settle
