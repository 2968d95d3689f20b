"""evener.zero under Accelerate, transformers' Trainer and Lightning: the losses of the same script
without it, and checkpoints and resuming through the framework's own calls.

The frameworks are in the environment that `make wild` makes; elsewhere their tests are skipped.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from evener import zero
from evener.errors import UsageError
from evener.zero.config import Config, read
from evener.zero.frameworks import faces
from evener.zero.frameworks.trainer import _batch

from .models import Model, batches, loss_of

MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
STEPS = 6


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine need not be measured here."""
    monkeypatch.setattr("evener.zero.api.probe", lambda *_, **__: _Found())


class _Found:
    machine = MACHINE


def settings(gpu: str = "700KB") -> dict[str, Any]:
    """All blocks on the host but the first."""
    return {
        "zero_optimization": {"stage3_param_persistence_threshold": 100},
        "evener": {"device": "cpu", "budget": {"gpu": gpu, "host": "1GB"}},
    }


def made(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(tied=tied)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Pair:
    """A trainer as trl's: two models, which may share a layer."""

    def __init__(self, model: nn.Module, ref_model: nn.Module | None) -> None:
        self.model, self.ref_model = model, ref_model

    def create_accelerator_and_postprocess(self) -> None: ...


def test_autocast_keeps_no_copies_of_a_reference_model() -> None:
    """It does of weights that ask for gradients."""
    model, reference = made(), made()
    shared = model.get_submodule("layers.0")
    reference.layers[0] = shared  # type: ignore[index,union-attr]
    zero.trainer(Pair)(model, reference)
    assert all(p.requires_grad for p in model.parameters())
    mine = set(model.parameters())
    assert not any(p.requires_grad for p in set(reference.parameters()) - mine)
    zero.trainer(Pair)(model, None)


def test_a_model_under_the_engine_shows_and_takes_its_values() -> None:
    model, data = made(tied=True), batches(4)
    want = copy.deepcopy(model)
    engine, front = faces.take_over(model, adam(model), Config(device="cpu"), batch=(4, 16))
    try:
        first = model.state_dict()
        for name, value in want.state_dict().items():
            assert torch.equal(first[name], value), name
        assert first["head.weight"].data_ptr() == first["embed.weight"].data_ptr()
        for tokens in data[:2]:
            loss_of(model, tokens).backward()
            front.step()
        later = model.state_dict()
        assert not torch.equal(later["layers.0.up.weight"], first["layers.0.up.weight"])
        before = float(loss_of(model, data[2]))
        assert model.load_state_dict(first).missing_keys == []
        assert float(loss_of(model, data[2])) != before
        with torch.no_grad():
            assert float(loss_of(model, data[2])) == float(loss_of(want, data[2]))
        with pytest.raises(RuntimeError, match="missing"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
            model.load_state_dict({**first, "norm.weight": torch.zeros(3)})
        model.load_state_dict(later)
    finally:
        faces.give_back(engine, model)
    for name, value in later.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_gradients_are_forgotten_between_the_two_passes() -> None:
    losses = []
    for between in (False, True):
        model = made()
        _, front = faces.take_over(model, adam(model), read(settings()), batch=(4, 16))
        found = []
        for tokens in batches(4):
            if not between:
                front.zero_grad()
            loss = loss_of(model, tokens)
            if between:
                front.zero_grad()
            loss.backward()
            front.step()
            found.append(float(loss.detach()))
        front.engine.close()
        losses.append(found)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_two_numbers_of_micro_batches_are_refused() -> None:
    for config, steps, want in ((1, 4, 4), (4, 1, 4), (4, 4, 4)):
        assert faces.accumulation(Config(accumulation=config), steps, "the Trainer") == want
    with pytest.raises(UsageError, match="gradient_accumulation_steps = 4, and the Trainer 8"):
        faces.accumulation(Config(accumulation=4), 8, "the Trainer")


def test_the_collator_says_how_large_a_batch_is() -> None:
    def pairs(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.rand(1)
        return {"input_ids": torch.stack(rows + rows)}

    args = SimpleNamespace(per_device_train_batch_size=3, max_length=None)
    given = SimpleNamespace(train_dataset=list(torch.ones(8, 16)), data_collator=pairs, args=args)
    before = torch.get_rng_state()
    assert _batch(given) == (6, 16)
    assert torch.equal(torch.get_rng_state(), before)
    args.max_length = 64
    assert _batch(given) == (6, 64)
    given.data_collator = lambda rows: {"pixel_values": rows}
    assert _batch(given) is None
    given.train_dataset = iter(())
    assert _batch(given) is None


def _accelerated(under: bool, folder: Path, steps: range, resume: bool) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if under:
        zero.accelerate(accelerator, settings(), batch=(4, 16))
    model = made()
    optimizer = adam(model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    data = batches(2 * STEPS)
    for step in steps:
        for tokens in data[2 * step : 2 * step + 2]:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    assert float(norm) > 0
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        if step == 2 and not resume:
            accelerator.save_state(str(folder))
    if under:
        accelerator.evener.close()
    return losses


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="in the environment of `make wild`")
    plain = _accelerated(False, tmp_path / "plain", range(STEPS), False)
    under = _accelerated(True, tmp_path / "under", range(STEPS), False)
    assert under == pytest.approx(plain, rel=1e-5)
    again = _accelerated(True, tmp_path / "under", range(3, STEPS), True)
    assert again == under[6:]
    # What the engine saved, a script without it reads.
    without = _accelerated(False, tmp_path / "under", range(3, STEPS), True)
    assert without == pytest.approx(plain[6:], rel=1e-5)


def test_accelerate_says_what_it_cannot_do() -> None:
    accelerate = pytest.importorskip("accelerate", reason="in the environment of `make wild`")
    accelerator = zero.accelerate(accelerate.Accelerator(cpu=True), settings())
    with pytest.raises(UsageError, match="1 models and 0 optimizers"):
        accelerator.prepare(made())
    with pytest.raises(UsageError, match="by value"):
        accelerator.clip_grad_value_([], 1.0)


def _trained(under: bool, folder: Path, resume: bool) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    rows = torch.randint(0, 100, (48, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=3, logging_steps=1, use_cpu=True,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_grad_norm=0.5, report_to=[], disable_tqdm=True, gradient_checkpointing=True,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    base = zero.trainer(Trainer, settings(), batch=(2, 16)) if under else Trainer
    trainer = base(LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    if under:
        assert not trainer.accelerator.evener.plan.resident >= {
            place.name for place in trainer.accelerator.evener.plan.places
        }
        trainer.accelerator.evener.close()
    history = trainer.state.log_history
    return [e[key] for e in history for key in ("loss", "grad_norm", "eval_loss") if key in e]


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="in the environment of `make wild`")
    plain = _trained(False, tmp_path / "plain", False)
    under = _trained(True, tmp_path / "under", False)
    assert under == pytest.approx(plain, rel=1e-3)
    assert _trained(True, tmp_path / "under", True) == under


def _fitted(under: bool, folder: Path, resume: bool) -> tuple[list[float], Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from evener.zero.frameworks.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = made()
            self.losses: list[float] = []

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            loss = loss_of(self.model, tokens)
            self.log("loss", loss)
            if loss.device.type != "meta" and not hasattr(loss, "fake_mode"):
                self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, tokens: torch.Tensor, _: int) -> None:
            self.log("val", loss_of(self.model, tokens))

        def configure_optimizers(self) -> Any:
            optimizer = adam(self)
            schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    strategy = ZeroStrategy(settings(), example=(batches(1)[0], 0)) if under else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        callbacks=[
            ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
        ],
    )  # fmt: skip
    data = batches(STEPS // 2)  # Lightning goes on from a whole epoch
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    path = str(folder / "step=3.ckpt") if resume else None
    trainer.fit(module, loader, torch.utils.data.DataLoader(data[:2], batch_size=None),
                ckpt_path=path)  # fmt: skip
    return [*module.losses, float(trainer.callback_metrics["val"])], module


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="in the environment of `make wild`")
    plain, want = _fitted(False, tmp_path / "plain", False)
    under, module = _fitted(True, tmp_path / "under", False)
    assert under == pytest.approx(plain, rel=1e-5)
    for name, value in want.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, atol=1e-5), name
    again, _ = _fitted(True, tmp_path / "under", True)
    assert again == under[3:]
    named = lightning.Trainer(
        accelerator="cpu", strategy="evener_zero", logger=False, enable_checkpointing=False
    )
    assert type(named.strategy).__name__ == "ZeroStrategy"
