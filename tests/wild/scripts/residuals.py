"""What INT8 or top-k has not sent yet, through the checkpoints of Trainer and of Lightning: saved
in the middle, and there again after a resume. The framework saves and loads, not the script.

Under a door the model is accelerated with a forced form, so each step keeps something back.
"""

import argparse
import os
import sys

import torch
from torch import nn

from tests.wild import harness as wild

DOOR = bool(os.environ.get("EVENER_DDP"))
HALF = wild.STEPS // 2
TOPK = "--topk" in sys.argv
if TOPK:  # the model is small
    os.environ["LIGHT_TOPK_THRESHOLD"] = "0"
owed: list[dict[str, torch.Tensor]] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x), labels)}


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(64, generator=generator), "labels": torch.tensor(index % 8)}


def accelerate(ddp: nn.Module) -> None:
    """Instead of what the door would choose on this network, which is no compression at all."""
    if DOOR:
        import evener.ddp

        if TOPK:
            evener.ddp.accelerate(ddp, mode="topk", ratio=0.25)
        else:
            evener.ddp.accelerate(ddp, mode="int8")


def look(ddp: nn.Module) -> None:
    """Keep the residuals: collective."""
    if DOOR:
        owed.append(ddp.evener.state_dict()["residual"])


def trainer(resume: bool) -> nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Follow(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            accelerate(made.model_wrapped)

        def on_step_end(self, args, state, control, **_):
            if state.global_step == (HALF + 1 if resume else HALF):
                look(made.model_wrapped)

        def on_log(self, args, state, control, logs=None, **_):
            if logs and "loss" in logs:
                wild.step(logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(wild.OUT / "trainer"),
        max_steps=wild.STEPS if resume else HALF,
        per_device_train_batch_size=4,
        learning_rate=1e-2 if TOPK else 1e-3,
        optim="sgd" if TOPK else "adamw_torch",
        logging_steps=1,
        save_steps=HALF,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    made = Trainer(Net(), arguments, train_dataset=Data(), callbacks=[Follow()])
    made.train(resume_from_checkpoint=resume)
    return made.model


def lightning_(resume: bool) -> nn.Module:
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    if DOOR:  # the entry point of an installed Evener does this; here it is only on the path
        from evener.ddp.integrations import lightning_callbacks
    path = wild.OUT / "half.ckpt"

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def on_train_start(self) -> None:
            accelerate(self.trainer.strategy.model)

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def on_train_batch_end(self, outputs, batch, index):
            wild.step(outputs["loss"])
            if self.trainer.global_step == (HALF + 1 if resume else HALF):
                look(self.trainer.strategy.model)

        def configure_optimizers(self):
            if TOPK:
                return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    made = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        callbacks=lightning_callbacks() if DOOR else [],
        max_steps=wild.STEPS if resume else HALF,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(Data(), batch_size=4)
    made.fit(module, loader, ckpt_path=path if resume else None)
    if not resume:
        made.save_checkpoint(path)
    return module.net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lightning", action="store_true")
    parser.add_argument("--topk", action="store_true", help="a quarter of the entries, and SGD")
    train = lightning_ if parser.parse_args().lightning else trainer
    wild.begin()
    wild.watch(Net())  # where training begins
    train(resume=False)
    wild._watched[:] = [train(resume=True)]
    if DOOR:
        # A new reducer's first step is exact, and takes over behind it what was kept back.
        before, after = owed
        if not any(part.abs().sum() > 0 for part in before.values()):
            sys.exit("nothing is kept back: this proves nothing")
        for name, part in before.items():
            if not torch.equal(part, after[name]):
                sys.exit(f"{name}: what was kept back has not come through the checkpoint")
    wild.end()


if __name__ == "__main__":
    main()
