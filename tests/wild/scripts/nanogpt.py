"""A GPT in the way of nanoGPT's training script: micro-steps with require_backward_grad_sync set by
hand, clipping, a learning rate that is written into the groups in each step."""

import argparse
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS = 96, 32, 48, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        parts = self.attention(self.ln1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.token.weight = self.head.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    wild.begin(group=True)
    raw = GPT()
    wild.watch(raw)
    decay = [p for p in raw.parameters() if p.dim() >= 2]
    rest = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    model = DistributedDataParallel(raw)
    wild.line(model, optimizer)
    for step in range(wild.STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / wild.STEPS)) / 2)
        for micro in range(args.accumulate):
            model.require_backward_grad_sync = micro == args.accumulate - 1
            batch = wild.tokens(10 * step + micro, VOCABULARY, 4, BLOCK + 1)
            _, loss = model(batch[:, :-1], batch[:, 1:])
            (loss / args.accumulate).backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wild.step(loss)
    wild.end()


if __name__ == "__main__":
    main()
