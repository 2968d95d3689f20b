"""GPT-2 small under transformers' Trainer, Accelerate, Lightning, or a bare loop, as it is.

    evener lab run --ddp --nodes 2 --slots 1 --link 25gbit -- \
        env EVENER_DDP=auto EVENER_FLOOR=int8 python benchmarks/trainer_gpt2.py 150 [--loop LOOP]

Nothing here knows of Evener. AdamW, bf16, clipping on, 16 x 512 random tokens per rank. The door
trains the first steps as plain DDP, and says at the end how long its steps and Evener's took. At
the end each rank prints the milliseconds of a step over the last 50, between two moments at which
the device had done everything, and the sum of its weights: they are equal where nothing drifted
apart. `--tiny`: a small model, on CPUs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

os.environ["HF_HUB_OFFLINE"] = "1"
if torch.cuda.device_count() > 1:  # the lab's nodes share the GPUs of one machine
    os.environ["LOCAL_RANK"] = os.environ["RANK"]

from transformers import GPT2Config, GPT2LMHeadModel

COUNTED = 50
"""Steps whose time is told."""


class Tokens(Dataset):
    """Random ones, by number."""

    def __init__(self, length: int, words: int) -> None:
        self.length, self.words = length, words

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.words, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Clock:
    """Counts a loop's steps, and times the last ones."""

    def __init__(self, steps: int) -> None:
        self.left, self.began, self.ms = steps, 0.0, 0.0

    def step(self) -> bool:
        """A step is over; whether it was the last."""
        self.left -= 1
        if self.left in (0, COUNTED):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ms = 1e3 * (time.perf_counter() - self.began) / COUNTED
            self.began = time.perf_counter()
        return self.left == 0


def trainer(model: Any, data: Tokens, clock: Clock, tiny: bool) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.step()

    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=clock.left, bf16=True,
        max_grad_norm=1.0, logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_num_workers=2, use_cpu=tiny,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, callbacks=[Counts()]).train()


def accelerate(model: Any, data: Tokens, clock: Clock, tiny: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=tiny)
    loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=not tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(wrapped(**batch).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if clock.step():
            return


def lightning(model: Any, data: Tokens, clock: Clock, tiny: bool) -> None:
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.trainer.should_stop = clock.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    trainer = lightning.Trainer(
        accelerator="cpu" if tiny else "gpu", devices=1, num_nodes=2, strategy="ddp",
        plugins=[TorchElasticEnvironment()], precision="bf16-mixed", gradient_clip_val=1.0,
        max_steps=clock.left, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=16, num_workers=2, pin_memory=not tiny))


def bare(model: Any, data: Tokens, clock: Clock, tiny: bool) -> None:
    import harness

    device = harness.join()
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=5e-5)
    wrapped = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=False)
    for batch in DataLoader(data, 16, sampler=sampler, num_workers=2, pin_memory=not tiny):
        given = {name: part.to(device, non_blocking=True) for name, part in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = wrapped(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if clock.step():
            return


LOOPS = {"trainer": trainer, "accelerate": accelerate, "lightning": lightning, "bare": bare}


def main() -> None:
    """Train, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", type=int)
    parser.add_argument("--loop", choices=LOOPS, default="trainer")
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPUs")
    given = parser.parse_args()
    torch.manual_seed(0)
    small = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512} if given.tiny else {}
    model = GPT2LMHeadModel(GPT2Config(**small, use_cache=False))
    data = Tokens(32, 512) if given.tiny else Tokens(512, 50_000)
    clock = Clock(given.steps)
    LOOPS[given.loop](model, data, clock, given.tiny)
    total = sum(p.double().sum().item() for p in model.parameters())
    print(
        f"rank {os.environ['RANK']}: {clock.ms:.1f} ms per step, sum of the weights {total!r}",
        flush=True,
    )


if __name__ == "__main__":
    main()
