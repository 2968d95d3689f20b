"""Pre-train a GPT with a mixture of experts, spread over ranks, on text that is on this machine.

    python examples/pretrain_moe.py                                               one process
    evener lab run --nodes 2 --slots 2 -- python examples/pretrain_moe.py         a minute on a CPU
    torchrun --nproc-per-node 2 examples/pretrain_moe.py --size 1b                on two GPUs
    ... --folder run1                            checkpoints there; run it again to resume

Bytes are the tokens, so nothing is downloaded. Start from here: `MoE` is the layer, `spread` puts a
part of the experts on each rank, and DistributedDataParallel averages the rest of the model. The
checkpoint is the plain model's, so another number of ranks resumes it, or none.
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
from torch.nn.parallel import DistributedDataParallel

from evener import moe

# Layers, width, heads, inner of an expert, experts, choices, tokens of a row, rows of a rank.
SIZES = {
    "tiny": (2, 64, 4, 64, 8, 2, 64, 4),
    "1b": (16, 1024, 16, 1408, 16, 2, 1024, 8),
    "7b": (24, 2048, 16, 2816, 16, 2, 2048, 4),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.moe = moe.MoE(width, inner, experts, top_k, shared=inner, score="sigmoid")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        out: torch.Tensor = x + self.moe(self.norm2(x))
        return out


class GPT(nn.Module):
    """Bytes in, the loss of the next byte out."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        layers, width, heads, inner, experts, top_k, length, _ = shape
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            Block(width, heads, inner, experts, top_k) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def text() -> torch.Tensor:
    """The documentation of Python's topics: about a million bytes."""
    from pydoc_data import topics

    return torch.frombuffer(
        bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8
    )


def batch(data: torch.Tensor, step: int, rows: int, length: int, rank: int, size: int) -> Any:
    """This rank's rows of a step's batch; all ranks' rows together do not depend on their number
    as long as rows x ranks is the same."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length - 1, (rows * size,), generator=generator)
    mine = starts[rank * rows :][:rows].tolist()
    drawn = torch.stack([data[s : s + length + 1] for s in mine]).long()
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def begin() -> tuple[int, int, torch.device]:
    """Join the job, if this process is part of one: rank, ranks, device."""
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" in os.environ:
        if cuda:
            # The nodes of a lab share the GPUs of one machine.
            shared = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
            torch.cuda.set_device(int(os.environ["RANK" if shared else "LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        return dist.get_rank(), dist.get_world_size(), torch.device("cuda" if cuda else "cpu")
    return 0, 1, torch.device("cuda" if cuda else "cpu")


def first_has(file: Path) -> bool:
    """Whether rank 0 sees it: all ranks resume, or none. Nodes must share the folder."""
    found = [file.is_file()]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def save(folder: Path, model: nn.Module, optimizer: Any, step: int, first: bool) -> None:
    """All ranks gather, the first one writes; visible once it is whole."""
    state = {
        "model": model.state_dict(),
        "optimizer": moe.optimizer_state(model, optimizer),
        "step": step,
    }
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "checkpoint.part")
        (folder / "checkpoint.part").rename(folder / "checkpoint.pt")
        print(f"checkpoint {folder}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, help="of a rank and step")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; default: all")
    parser.add_argument("--dispatch", choices=["exact", "int8", "fp8"], default="exact")
    parser.add_argument("--rebalance", type=int, default=0, help="move experts every N steps")
    parser.add_argument("--every", type=int, default=30, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="checkpoints are written and looked for there")
    arguments = parser.parse_args()
    rank, size, device = begin()
    first, shape = rank == 0, SIZES[arguments.size]
    rows, length = arguments.rows or shape[-1], shape[-2]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.device(device):
        model = GPT(shape)
    torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in model.parameters())
    if size > 1:
        moe.spread(model, arguments.ep or size, dispatch=arguments.dispatch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if arguments.size == "tiny" else 3e-4)
    start = 0
    if arguments.folder and first_has(file := arguments.folder / "checkpoint.pt"):
        state = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        moe.load_optimizer_state(model, optimizer, state["optimizer"])
        start = state["step"]
    if first:
        here = sum(p.numel() for p in model.parameters())
        resumed = f", from step {start}" if start else ""
        print(
            f"{count / 1e6:.1f} M parameters, {here / 1e6:.1f} M on each of {size} rank(s){resumed}"
        )
    trained = DistributedDataParallel(model) if size > 1 else model
    data = text()
    done, since = 0, time.perf_counter()
    for step in range(start, arguments.steps):
        last = step + 1 == arguments.steps
        tokens, labels = (t.to(device) for t in batch(data, step, rows, length, rank, size))
        loss = trained(tokens, labels)
        loss.backward()
        moe.average_gradients(model)
        moe.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        moe.balance(model)
        if arguments.rebalance and size > 1 and (step + 1) % arguments.rebalance == 0:
            moe.rebalance(model, optimizer)
        done += rows * length * size
        if (step + 1) % 10 == 0 or last:
            total = loss.detach().float()
            if size > 1:
                dist.all_reduce(total)
            if first:
                rate = done / (time.perf_counter() - since)
                left = (arguments.steps - step - 1) * rows * length * size / rate
                print(f"step {step + 1:5}/{arguments.steps}  loss {total.item() / size:.3f}  "
                      f"{rate:,.0f} tokens/s  {left:,.0f} s left", flush=True)  # fmt: skip
        if arguments.folder and ((step + 1) % arguments.every == 0 or last):
            save(arguments.folder, model, optimizer, step + 1, first)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
