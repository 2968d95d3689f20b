"""Pre-train a GPT over the stages of a pipeline, on text that is already on this machine.

    evener lab run --nodes 2 --slots 2 -- python examples/pretrain_pipeline.py    a minute on a CPU
    torchrun --nproc-per-node 2 examples/pretrain_pipeline.py --size 1b           on two GPUs
    ... --folder run1                            checkpoints there; run it again to resume

Bytes are the tokens, so nothing is downloaded. Start from here: `auto`, `step`, `save` and `load`
are all there is. The model is made on the meta device; each rank makes the values of its own stage.
Every rank runs the same lines, with the same batches.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from evener import pipeline

# Layers, width, heads, tokens of a row, rows of a step.
SIZES = {
    "tiny": (6, 128, 4, 64, 16),
    "1b": (22, 2048, 16, 1024, 64),
    "7b": (32, 4096, 32, 1024, 64),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight)


class Block(nn.Module):
    """A block in the shape of Llama's: RMSNorm, rotary positions, SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        inner = width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class GPT(nn.Module):
    """Bytes in, the loss of the next byte out; the head is the embedding."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.half = width // heads // 2
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        step = torch.arange(self.half, device=tokens.device)
        angle = place * 10_000.0 ** (-step / self.half)
        x, cos, sin = self.embed(tokens), angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def text() -> torch.Tensor:
    """The documentation of Python's topics: about a million bytes."""
    from pydoc_data import topics

    return torch.frombuffer(
        bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8
    )


def batch(data: torch.Tensor, step: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """The batch of a step: the same on all ranks, and in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length - 1, (rows,), generator=generator)
    drawn = torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()
    return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def initial(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's first value, by its name: ranks with a share of it get the same."""
    if "norm" in name:
        return torch.ones(parameter.shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = sum(ord(letter) * 131**at for at, letter in enumerate(name)) % (1 << 31)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(parameter.shape, device=device, generator=generator).mul_(0.02)


def begin() -> None:
    """Join the job, each rank with a GPU of its own where there are GPUs."""
    if torch.cuda.is_available():
        # The nodes of a lab share the GPUs of one machine.
        shared = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(int(os.environ["RANK" if shared else "LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")


def first_has(file: Path) -> bool:
    """Whether rank 0 sees it: all ranks resume, or none. Nodes must share the folder."""
    found = [file.is_file()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, help="of a step")
    parser.add_argument("--schedule", choices=sorted(pipeline.SCHEDULES), default="1F1B")
    parser.add_argument("--memory", help="of each rank, as 24GB")
    parser.add_argument("--every", type=int, default=30, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="checkpoints are written and looked for there")
    parser.add_argument("--timeline", type=Path, help="record the last step there")
    arguments = parser.parse_args()
    begin()
    first = dist.get_rank() == 0
    layers, width, heads, length, rows = SIZES[arguments.size]
    rows = arguments.rows or rows
    torch.set_default_dtype(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    with torch.device("meta"):
        model = GPT(layers, width, heads)
    torch.set_default_dtype(torch.float32)
    data = text()
    pipe = pipeline.auto(
        model, batch(data, 0, rows, length), schedule=arguments.schedule,
        memory=arguments.memory, weights=initial,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3 if arguments.size == "tiny" else 3e-4)
    start = 0
    if arguments.folder and first_has(arguments.folder / "evener.json"):
        start = int(pipe.load(arguments.folder, optimizer)["step"])
    if first:
        show(pipe.plan)
        if start:
            print(f"resumed at step {start}")
    done, since = 0, time.perf_counter()
    for step in range(start, arguments.steps):
        last = step + 1 == arguments.steps
        if last and arguments.timeline:
            pipe.record(arguments.timeline)
        loss = pipe.step(**batch(data, step, rows, length))
        optimizer.step()
        optimizer.zero_grad()
        done += rows * length
        if first and ((step + 1) % 10 == 0 or last):
            rate = done / (time.perf_counter() - since)
            left = (arguments.steps - step - 1) * rows * length / rate
            print(
                f"step {step + 1:5}/{arguments.steps}  loss {loss.item():.3f}  "
                f"{rate:,.0f} tokens/s  {left:,.0f} s left",
                flush=True,
            )
        if arguments.folder and ((step + 1) % arguments.every == 0 or last):
            pipe.save(arguments.folder, optimizer, {"step": step + 1})
            if first:
                print(f"checkpoint {arguments.folder}", flush=True)
    pipe.close()
    dist.destroy_process_group()


def show(plan: Any) -> None:
    print(f"{plan.parameters / 1e6:.1f} M parameters over {plan.ranks} ranks, {plan.schedule}, "
          f"{plan.microbatches} microbatches of {plan.rows} row(s)")  # fmt: skip
    for stage in plan.stages:
        print(f"  stage {stage.index}: {stage.blocks}, {stage.seconds * 1e3:.2f} ms")
    print(f"expected: {plan.step_seconds * 1e3:.1f} ms per step, bubble {plan.bubble:.0%}")


if __name__ == "__main__":
    main()
