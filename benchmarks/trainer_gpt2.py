"""transformers' Trainer on GPT-2 small, as it is: nothing here knows of Evener.

    evener lab run --ddp --nodes 2 --slots 1 --link 25gbit -- \
        env EVENER_DDP=auto EVENER_FLOOR=int8 python benchmarks/trainer_gpt2.py 150

AdamW, bf16, clipping on, 16 x 512 random tokens per rank. The door trains the first steps as plain
DDP, and says at the end how long its steps and Evener's took. At the end each rank prints the sum
of its weights: they are equal where nothing drifted apart.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch.utils.data import Dataset

os.environ["HF_HUB_OFFLINE"] = "1"
if torch.cuda.device_count() > 1:  # the lab's nodes share the GPUs of one machine
    os.environ["LOCAL_RANK"] = os.environ["RANK"]

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    """Random ones, by number."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50_000, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        max_steps=int(sys.argv[1]),
        bf16=True,
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2,
    )
    Trainer(model, arguments, train_dataset=Tokens()).train()
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"rank {os.environ['RANK']}: sum of the weights {total!r}", flush=True)


if __name__ == "__main__":
    main()
