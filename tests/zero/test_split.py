"""MuonAdamW: one optimizer for matrices and the rest gives the bits of torch.optim.Muon and AdamW
in a script: given, by the configuration, and in the loops of frameworks that take one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from evener import zero
from evener.errors import UsageError
from evener.zero import split

from .models import Model, batches, loss_of
from .test_plan import MACHINE

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.05, "momentum": 0.9}
STEPS = 4


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine need not be measured here."""

    class Found:
        machine = MACHINE

    monkeypatch.setattr("evener.zero.api.probe", lambda *_, **__: Found())


def made() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def of_a_script(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What `OPTIONS` stand for."""
    chosen = split.hidden(model)
    rest = [p for p in model.parameters() if p not in chosen]
    return [
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.05),
        torch.optim.Muon(list(chosen), lr=2e-2, weight_decay=0.05, momentum=0.9,
                         adjust_lr_fn="match_rms_adamw"),
    ]  # fmt: skip


def settings(**more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage3_param_persistence_threshold": 0},
        "evener": {"device": "cpu"},
        **more,
    }


def start(model: nn.Module, given: Any = None, **more: Any) -> zero.Engine:
    return zero.initialize(
        model=model, optimizer=given, config=settings(**more), resident={"layers.1/0"}
    )[0]


def train(engine: zero.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in data:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("way", ["optimizer", "configuration", "model_parameters"])
def test_it_gives_the_bits_of_two_optimizers(way: str, tmp_path: Path) -> None:
    model, two, data = made(), made(), batches(2 * STEPS)
    if way == "optimizer":
        engine = start(model, zero.MuonAdamW(model, **OPTIONS))
    else:
        named = {"optimizer": {"type": "Muon", "params": {**OPTIONS, "adam_lr": "auto"}}}
        engine = start(model, **named)
        if way == "model_parameters":  # as DeepSpeed's scripts give them
            model = zero.give_back(engine)
            engine = zero.initialize(
                model=model, config=settings(**named), resident=set(),
                model_parameters=model.parameters(),
            )[0]  # fmt: skip
    reference = start(two, of_a_script(two))
    assert train(engine, data[:STEPS]) == train(reference, data[:STEPS])
    same(engine.module.state_dict(), reference.module.state_dict())
    zero.save_checkpoint(engine, tmp_path)
    again = made()
    resumed = start(again, zero.MuonAdamW(again, **OPTIONS))
    zero.load_checkpoint(resumed, tmp_path)
    assert train(resumed, data[STEPS:]) == train(reference, data[STEPS:])
    for each in (engine, reference, resumed):
        each.close()


def test_what_is_split_and_by_which_rates() -> None:
    model = made()
    found = zero.MuonAdamW(model, lr=3e-4)
    rest, matrices = (group["params"] for group in found.param_groups)
    names = {p: name for name, p in model.named_parameters()}
    assert all(p.dim() == 2 and names[p].startswith("layers.") for p in matrices)
    assert {names[p] for p in rest} >= {"embed.weight", "head.weight", "norm.weight"}
    assert len(rest) + len(matrices) == len(names)
    assert [group["lr"] for group in found.param_groups] == [3e-4, 3e-4]
    apart = zero.MuonAdamW(model, lr=1e-3, muon_lr=2e-2)
    assert [group["lr"] for group in apart.param_groups] == [1e-3, 2e-2]
    model.embed.requires_grad_(False)
    without = zero.MuonAdamW(model).param_groups[0]["params"]
    assert len(without) == len(rest) - 1
    config = settings(optimizer={"type": "Muon", "params": {}})
    by_name = zero.plan(model, config=config, example=batches(1)[0], machine=MACHINE)
    given = zero.plan(model, config=settings(), example=batches(1)[0], machine=MACHINE,
                      optimizer=of_a_script(model))  # fmt: skip
    assert by_name.host_bytes == given.host_bytes


def test_what_cannot_be_says_so() -> None:
    model = made()
    for options, words in (
        ({"rate": 1.0}, "has no option rate"),
        ({"adam_lr": "3e-4"}, "adam_lr = '3e-4'"),
        ({"weight_decay": -1.0}, r"weight_decay = -1\.0"),
        ({"adjust_lr_fn": "moonshot"}, "adjust_lr_fn = 'moonshot'"),
    ):
        with pytest.raises(UsageError, match=words):
            zero.MuonAdamW(model, **options)
        with pytest.raises(zero.ConfigError, match=words):
            start(model, optimizer={"type": "Muon", "params": options})
    with pytest.raises(UsageError, match="no matrix of Linear is trained"):
        zero.MuonAdamW(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="steps under the engine alone"):
        zero.MuonAdamW(model).step()
    with pytest.raises(UsageError, match="model_parameters has groups"):
        zero.initialize(
            model=model, config=settings(optimizer={"type": "Muon"}), resident=set(),
            model_parameters=[{"params": list(model.parameters())}],
        )  # fmt: skip
    with pytest.raises(UsageError, match="int8"):
        start(model, zero.MuonAdamW(model), evener={"device": "cpu", "moments": "int8"})


def _accelerated(folder: Path, steps: range, resume: bool) -> list[float]:
    from accelerate import Accelerator

    accelerator = zero.accelerate(Accelerator(cpu=True), settings(), batch=(4, 16))
    model = made()
    optimizer = zero.MuonAdamW(model, **OPTIONS)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    data = batches(2 * STEPS)
    for step in steps:
        loss = loss_of(model, data[step])
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == STEPS - 1 and not resume:
            accelerator.save_state(str(folder))
    accelerator.evener.close()
    return losses


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="in the environment of `make wild`")
    model = made()
    two = of_a_script(model)
    rates = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in two]
    engine = start(model, two)
    want = []
    for tokens in batches(2 * STEPS):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        for each in (*two, *rates):
            each.step()
        want.append(float(loss.detach()))
    engine.close()
    assert _accelerated(tmp_path, range(2 * STEPS), False) == want
    assert _accelerated(tmp_path, range(STEPS, 2 * STEPS), True) == want[STEPS:]


def _trainer(folder: Path, way: str, resume: bool = False) -> tuple[list[float], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, 100, (48, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=2, logging_steps=1, use_cpu=True,
        per_device_train_batch_size=2, learning_rate=1e-2, weight_decay=0.05, max_grad_norm=0.0,
        report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    params = {name: value for name, value in OPTIONS.items() if name in ("muon_lr", "momentum")}
    named = {"optimizer": {"type": "Muon", "params": params}} if way == "named" else {}
    optimizer = zero.MuonAdamW(model, **OPTIONS) if way == "given" else None
    base = zero.trainer(Trainer, settings(**named), batch=(2, 16))
    trainer = base(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.accelerator.evener.close()
    return [e["loss"] for e in trainer.state.log_history if "loss" in e], weights


def test_trainer(tmp_path: Path) -> None:
    """By name, with the rates of the training arguments, and given; resumed with the same bits."""
    pytest.importorskip("transformers", reason="in the environment of `make wild`")
    named, weights = _trainer(tmp_path / "named", "named")
    given, others = _trainer(tmp_path / "given", "given")
    assert named == given
    same(weights, others)
    again, resumed = _trainer(tmp_path / "named", "named", resume=True)
    assert again == named
    same(resumed, weights)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="in the environment of `make wild`")
    from evener.zero.frameworks.lightning import ZeroStrategy

    data = batches(STEPS)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = made()

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.model, tokens)

        def configure_optimizers(self) -> Any:
            return zero.MuonAdamW(self, **OPTIONS)

    module, two = Module(), made()
    lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_progress_bar=False,
        strategy=ZeroStrategy(settings(), example=(data[0], 0)), enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=False,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # fmt: skip
    engine = start(two, of_a_script(two))
    train(engine, data)
    same(module.model.state_dict(), engine.module.state_dict())
    engine.close()
