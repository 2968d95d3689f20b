"""DeepSpeed's ZeRO-3 and ZeRO++ as columns of fsdp_ethernet.py: the same GPT, batches and steps.

`zero3` is plain. `zero++` adds what has a meaning with one rank per node: weights of 8 bits in all-
gathers (qwZ) and gradients of 4 bits (qgZ). Its third part (hpZ) shards a second copy of the
weights within a node, and with one rank per node there is nothing to shard. Wang et al., "ZeRO++",
arXiv 2306.10209.
"""

from __future__ import annotations

import argparse
from typing import Any

import hsdp
import torch

WAYS = ("zero3", "zero++")


class DeepSpeedColumn(hsdp.Column):
    """`name`: of WAYS. Collective."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        import deepspeed  # type: ignore[import-not-found]

        layers, width, heads, self.length, self.rows, words = hsdp.SIZES[args.size]
        torch.manual_seed(0)
        model = hsdp.GPT(layers, width, heads, words).to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        zero: dict[str, Any] = {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 0,
        }
        if name == "zero++":
            zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
            config={
                "train_micro_batch_size_per_gpu": self.rows,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": True},
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1_000_000,
            },
        )
        self.name, self.model, self.device = name, engine, device
        self.took, self.sent = [], []
        self.loss, self.steps, self.passes, self.late = 0.0, 0, 1, False

    def step(self) -> torch.Tensor:
        """One micro-batch and the optimizer's step."""
        loss: torch.Tensor = self.model(self.batch(0))
        self.model.backward(loss)
        self.model.step()
        self.steps += 1
        return loss.detach().float()
