"""Pre-train a small GPT on text that is already on this machine: Python's own documentation.

    python examples/pretrain_gpt.py                   a minute on a CPU
    python examples/pretrain_gpt.py --size 7b         on a GPU, states in host memory
    python examples/pretrain_gpt.py --size 7b --gpu 24GB --host 110GB --moments bf16
    python examples/pretrain_gpt.py --folder run1     checkpoints there; run it again to resume

Bytes are the tokens, so nothing is downloaded. Start from here: `initialize`, `backward`, `step`,
`begin_checkpoint` and `load_checkpoint` are all there is. The model is made on the meta device, and
its initial values chunk by chunk, so that it is never in memory as a whole.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from evener import zero

SIZES = {"tiny": (4, 128, 4), "1b": (22, 2048, 16), "7b": (32, 4096, 32)}
LENGTH = {"tiny": 128, "1b": 1024, "7b": 1024}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def text() -> torch.Tensor:
    """The documentation of Python's topics: about a million bytes."""
    from pydoc_data import topics

    return torch.frombuffer(
        bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8
    )


def batch(data: torch.Tensor, step: int, rows: int, length: int) -> torch.Tensor:
    """The batch of a step: the same in every run, so a resumed one goes on where it was."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length - 1, (rows,), generator=generator)
    return torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()


def initial(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's first value, drawn on the GPU where there is one: it has no time for cores."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if "norm" in name:
        return torch.ones(parameter.shape)
    return torch.randn(parameter.shape, device=device).mul_(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--gpu", default="auto", help="GPU budget, as 24GB")
    parser.add_argument("--host", default="auto", help="host budget, as 110GB")
    parser.add_argument("--moments", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="checkpoints are written and looked for there")
    arguments = parser.parse_args()
    length, large = LENGTH[arguments.size], arguments.size != "tiny"
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(*SIZES[arguments.size], length)
    count = sum(p.numel() for p in model.parameters())
    limits = {k: v for k, v in (("gpu", arguments.gpu), ("host", arguments.host)) if v != "auto"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4 if large else 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        "evener": {
            "budget": limits or "auto",
            "checkpointing": "auto" if large else False,
            "loss": "chunked",
            "moments": arguments.moments,
        },
    }
    engine, _, _, _ = zero.initialize(
        model=model, config=config, batch=(arguments.rows, length), weights=initial
    )
    first = 0
    if arguments.folder and zero.checkpoint.find(arguments.folder):
        first = zero.load_checkpoint(engine, arguments.folder)["step"]
        print(f"resumed at step {first}")
    print(f"{count / 1e6:.1f} M parameters on {engine.device.device}")
    if plan := engine.plan:
        print(
            f"planned: {plan.gpu_bytes / 1e9:.1f} GB of GPU and {plan.host_bytes / 1e9:.1f} GB of "
            f"host memory, {plan.tokens_per_second:,.0f} tokens/s, bound by {plan.bound}"
        )
    data = text()
    tokens, start = 0, time.perf_counter()
    for step in range(first, arguments.steps):
        rows = batch(data, step, arguments.rows, length)
        logits = engine(rows[:, :-1])
        loss = zero.cross_entropy(logits, rows[:, 1:].to(logits.device))
        engine.backward(loss)
        engine.step()
        tokens += rows[:, 1:].numel()
        last = step + 1 == arguments.steps
        if (step + 1) % 10 == 0 or last or (large and step - first < 5):
            rate = tokens / (time.perf_counter() - start)
            left = (arguments.steps - step - 1) * rows[:, 1:].numel() / rate
            print(
                f"step {step + 1:5}/{arguments.steps}  loss {loss.item():.3f}  "
                f"{rate:,.0f} tokens/s  {left:,.0f} s left",
                flush=True,
            )
        if arguments.folder and ((step + 1) % arguments.every == 0 or last):
            # Written while the next steps run.
            zero.begin_checkpoint(engine, arguments.folder, extra={"step": step + 1})
    if arguments.folder and isinstance(engine.saving, zero.Save):
        print(f"checkpoint {engine.saving.result()}")
    engine.close()


if __name__ == "__main__":
    main()
