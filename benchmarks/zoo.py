"""Twenty models beside DDP, torch's hooks and PowerSGD: is Evener's planner ever slower?

    python benchmarks/zoo.py                              # 25, 10 and 1 Gb/s, all models
    python benchmarks/zoo.py --rates 25 --budget-s 540    # what fits into nine minutes, then again:
    python benchmarks/zoo.py --rates 25 --budget-s 540    # goes on where it stopped
    python benchmarks/zoo.py --models gpt2,swin_b --rates 10 --columns ddp,fp16,int8
    python benchmarks/zoo.py --tiny --device cpu --rates 0.1

Two simulated nodes of one GPU each (`evener lab`), links of given Gb/s. One process per rank and
rate trains all models, a model after another; all columns of a model live side by side and take
their steps in turn, so that a slow minute of the machine falls on every column. A step's time is
from its start to the next one's start, so that what a step leaves for the next forward counts; the
median over all rounds, of the slower rank. Evener's columns first take the steps in which the
planner measures and tries (`settle_steps` in the file).

At the end of a column the parameters of both ranks are compared bit for bit: one that has not
reduced its gradients fails. Results are written after each model; models that are in the file
already are left out (--again measures them again).

Needs 2 GPUs (or --device cpu), the rights that `evener lab` needs, torchvision, timm, transformers.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import harness

COLUMNS = ("ddp", "fp16", "bf16", "powersgd", "int8", "topk", "lowrank")
TITLES = {
    "ddp": "DDP",
    "fp16": "fp16 hook",
    "bf16": "bf16 hook",
    "powersgd": "PowerSGD",
    "int8": "Evener, floor INT8",
    "topk": "floor top-k",
    "lowrank": "floor low-rank",
}
FLOORS = {"int8": "int8", "topk": "topk", "lowrank": "lowrank1"}
# What each of Evener's floors is held against.
BESIDE = {
    "int8": ("ddp", "fp16", "bf16"),
    "topk": ("ddp", "fp16", "bf16", "powersgd"),
    "lowrank": ("ddp", "fp16", "bf16", "powersgd"),
}
_MOST_SETTLING, _MOST_STEPS = 700, 15  # the second: in a column and round
_ERROR = 0.007  # of a median, as a share


# --- in the nodes ---


def worker(settings: argparse.Namespace) -> None:
    """One rank: all models, one after another; rank 0 prints a line of JSON for each."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    os.environ.setdefault("EVENER_GUARD_STEPS", "0")  # one check in so few steps would count
    gpu = settings.device == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
    control = dist.new_group(backend="gloo")

    if rank == 0:
        import evener.base.log  # noqa: F401 - the planner's lines
    for name in settings.models:
        go = [time.time() < settings.until]
        dist.broadcast_object_list(go, src=0, group=control)
        if not go[0]:
            break
        if rank == 0:
            harness.say(begins=name)
        row = Measurement(name, settings, control).run()
        if rank == 0:
            harness.say(row=row)
    harness.settle()
    dist.barrier(group=control)
    sys.stdout.flush()
    os._exit(0)  # groups of NCCL's take seconds to end, and nothing is left to say


class Column:
    """One way to combine a model's gradients, in training."""

    def __init__(
        self, name: str, module: Any, batch: Any, entry: Any, settings: argparse.Namespace
    ) -> None:
        import torch

        self.name, self.batch, self.entry = name, batch, entry
        self.device = settings.device
        self.module = module = copy.deepcopy(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        kind = getattr(torch.optim, entry.optimizer)
        self.optimizer = kind(self.parameters, lr=1e-3 if entry.optimizer == "AdamW" else 0.01)
        self.model = self._wrapped()
        self.steps: list[float] = []
        self.settle_steps = 0

    def _wrapped(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        import evener.ddp

        wrapped = DistributedDataParallel(self.module)
        if self.name in ("fp16", "bf16"):
            wrapped.register_comm_hook(None, getattr(default_hooks, f"{self.name}_compress_hook"))
        elif self.name == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
        elif self.name != "ddp":
            return evener.ddp.accelerate(
                wrapped, self.optimizer, mode="auto", floor=FLOORS[self.name]
            )
        return wrapped

    def step(self) -> None:
        """One of training."""
        import torch

        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.entry.amp):
            loss = self.model(*self.batch)
        loss.backward()
        if self.entry.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.entry.clip)
        self.optimizer.step()

    def finish(self) -> None:
        """Bring in what a step has left for the next forward."""
        if (left := getattr(self.model, "evener_steps", None)) is not None:
            left.finish("")

    @property
    def planner(self) -> Any:
        """Evener's, or None."""
        return getattr(getattr(self.model, "evener_steps", None), "planner", None)

    @property
    def settled(self) -> bool:
        """Whether what is measured from here on is what training goes on with."""
        return self.planner is None or self.planner.kept is not None

    @property
    def error(self) -> float:
        """The standard error of the median step, as a share of it."""
        middle = statistics.median(self.steps)
        scatter = 1.4826 * statistics.median(abs(ms / middle - 1) for ms in self.steps)
        return 1.2533 * scatter / math.sqrt(len(self.steps))

    def checksum(self) -> str:
        """Checksum of all parameters."""
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for parameter in self.parameters:
            raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(raw.cpu().numpy().data)
        return digest.hexdigest()

    def close(self) -> None:
        """Give everything back."""
        if (reducer := getattr(self.model, "evener", None)) is not None:
            if self.model.evener_steps.overlap is not None:
                self.model.evener_steps.overlap.detach()
            reducer.close()


class Measurement:
    """All columns of one model at one rate."""

    def __init__(self, name: str, settings: argparse.Namespace, control: Any) -> None:
        self.name, self.settings, self.control = name, settings, control
        self.gpu = settings.device == "cuda"

    def run(self) -> dict[str, Any]:
        """The row. Collective; what fails on all ranks alike is in it."""
        import torch
        from zoo_models import ZOO

        began, settings = time.perf_counter(), self.settings
        entry = ZOO[self.name]
        row: dict[str, Any] = {"model": self.name, "rate": settings.rate, "cells": {}}
        torch.manual_seed(1)
        try:
            with torch.device(settings.device):
                module = entry.make(settings.tiny)
        except Exception as error:  # noqa: BLE001 - the other models go on
            return {**row, "error": f"{type(error).__name__}: {error}"[:500]}
        torch.manual_seed(100 + int(os.environ["RANK"]))
        size = 8 if settings.tiny else entry.batch
        batch = tuple(part.to(settings.device) for part in entry.data(settings.tiny, size))
        row["batch"] = size
        row["gradient_bytes"] = sum(
            p.numel() * p.element_size() for p in module.parameters() if p.requires_grad
        )
        row["parameters"] = sum(p.requires_grad for p in module.parameters())
        columns: list[Column] = []
        for name in settings.columns:
            make = partial(Column, name, module, batch, entry, settings)
            made = self._guarded(name, row, make)
            if made is not None:
                columns.append(made)
        del module, make
        row["built_s"] = round(time.perf_counter() - began, 2)
        columns = [c for c in columns if self._guarded(c.name, row, partial(self._settle, c))]
        # Collecting what many models hold takes longer than a step, now and then.
        gc.collect()
        gc.freeze()
        gc.disable()
        row["settled_s"] = round(time.perf_counter() - began, 2)
        counts = {c.name: self._count(c) for c in columns}
        for turn in range(settings.most_rounds):
            for column in columns if turn % 2 == 0 else columns[::-1]:
                column.steps += self._timed(column, counts[column.name])
            # All ranks have the same times.
            if turn + 1 >= settings.rounds and all(c.error <= _ERROR for c in columns):
                break
        gc.enable()
        gc.unfreeze()
        for column in columns:
            row["cells"][column.name] = self._cell(column)
        for column in columns:
            column.close()
        del columns
        gc.collect()  # models and their reducers hold each other
        if self.gpu:
            harness.settle()
            torch.cuda.empty_cache()
        row["took_s"] = round(time.perf_counter() - began, 2)
        return row

    def _guarded(self, name: str, row: dict[str, Any], call: Callable[[], Any]) -> Any:
        """What `call` gives; None where it failed on a rank, which is then in the row."""
        import torch.distributed as dist

        error, found = "", None
        try:
            found = call()
        except Exception as raised:  # noqa: BLE001 - the other columns go on
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"[:500]
        errors: list[Any] = [None, None]
        dist.all_gather_object(errors, error, group=self.control)
        if any(errors):
            row["cells"][name] = {"error": next(e for e in errors if e)}
            return None
        return found

    def _settle(self, column: Column) -> bool:
        """Warm up: caches, DDP's second layout of buckets, the planner's measuring and trying."""
        if column.planner is None:
            began = time.perf_counter()
            for done in range(1, 5):
                column.step()
                harness.settle()
                # A second each is slow: the host's clock differs, so rank 0's counts.
                if done >= 2 and self._agreed(time.perf_counter() - began) > done:
                    break
            column.settle_steps = done
            return True
        while not column.settled:  # nothing waits for the device here: the steps are being timed
            column.step()
            column.settle_steps += 1
            if column.settle_steps == _MOST_SETTLING:
                raise RuntimeError(f"nothing was decided in {_MOST_SETTLING} steps")
        return True

    def _count(self, column: Column) -> int:
        """How many steps fill the time that a round has; one that fills it alone is kept."""
        times = self._timed(column, 1)
        count = math.ceil(1e3 * self.settings.seconds / times[0])
        column.steps = times if count == 1 else []
        return min(_MOST_STEPS, count)

    def _timed(self, column: Column, steps: int) -> list[float]:
        """Milliseconds of `steps` steps after one that does not count; the slower rank's."""
        import torch
        import torch.distributed as dist

        harness.settle()
        dist.barrier(group=self.control)
        column.step()
        marks = []
        for _ in range(steps):
            marks.append(self._mark())
            column.step()
        marks.append(self._mark())
        column.finish()
        harness.settle()
        if self.gpu:
            times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        else:
            times = [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.control)
        return [round(ms, 4) for ms in slowest.tolist()]

    def _mark(self) -> Any:
        import torch

        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _agreed(self, value: float) -> float:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return float(box[0])

    def _cell(self, column: Column) -> dict[str, Any]:
        import torch.distributed as dist

        sums: list[Any] = [None, None]
        dist.all_gather_object(sums, column.checksum(), group=self.control)
        cell: dict[str, Any] = {
            "step_ms": round(statistics.median(column.steps), 3),
            "steps_ms": column.steps,
            "settle_steps": column.settle_steps,
        }
        if sums[0] != sums[1]:
            cell["error"] = "the ranks' parameters differ"
        if (planner := column.planner) is not None:
            made = planner.decision
            cell["plan"] = {
                "kept": planner.kept.name,
                "expected_ms": round(made.step_ms, 3),
                "compute_ms": round(made.compute_ms, 3),
                "hidden": made.hidden,
                "overlap": made.overlap,
                "forms": [f"{choice.algorithm} {choice.form}" for choice in made.choices],
                "looked_at": re.sub(r"/\S*site-packages/", "", planner.looked_at),
                "carrier": column.model.evener.communicators.route.carrier.to_json(),
                "tried": {
                    name: {"ms": round(ms, 3), "modelled_ms": round(way.decision.step_ms, 3)}
                    for name, (way, ms) in planner.tried.items()
                },
            }
        return cell


# --- outside of them ---


def named(model: str, rate: float) -> str:
    """A row's name in the file."""
    return f"{model} at {rate:g} Gb/s"


def at_rate(settings: argparse.Namespace, kept: harness.Kept, timeout: float) -> list[str]:
    """Train `settings.models` in one lab; returns the models of which no row came."""
    left, begun = list(settings.models), [""]

    def hear(_lab: Any, rank: int, line: str) -> None:
        if "plan:" in line or "rror" in line:
            print(f"    [{rank}] {line.rstrip()[:400]}", flush=True)

    def heard(told: dict[str, Any]) -> None:
        begun[0] = told.get("begins", "")
        if row := told.get("row"):
            left.remove(row["model"])
            kept.add(named(row["model"], settings.rate), row)
            cells = {name: cell.get("error", cell.get("step_ms"))
                     for name, cell in row["cells"].items()}  # fmt: skip
            print(f"  {row['model']}, ms: {row.get('error', cells)}", flush=True)

    rate = f"{settings.rate:g}gbit" if settings.rate >= 1 else f"{1000 * settings.rate:g}mbit"
    env = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"), "EVENER_LOG": "info"}
    argv = [sys.executable, __file__, "--worker", json.dumps(vars(settings))]
    job = harness.in_lab(f"2x1@{rate}", argv, env=env, limit=timeout, hear=hear, heard=heard)
    if job.status and begun[0]:
        left.remove(begun[0])
        error = f"the job ended with {job.failed}"
        row = {"model": begun[0], "rate": settings.rate, "cells": {}, "error": error}
        kept.add(named(begun[0], settings.rate), row)
        print(f"  {begun[0]}: {error}", flush=True)
    return left


def step(row: dict[str, Any], column: str) -> float | None:
    """Milliseconds; None where it failed or was not measured."""
    cell = row["cells"].get(column, {})
    return None if "error" in cell else cell.get("step_ms")


def against(row: dict[str, Any], column: str) -> float | None:
    """How many times as fast as the best of what it is held against."""
    own = step(row, column)
    others = [ms for name in BESIDE[column] if (ms := step(row, name)) is not None]
    return min(others) / own if own and others else None


def table(rows: list[dict[str, Any]]) -> str:
    """For each rate samples/s per rank, ratios, and what was expected."""
    lines = []
    for rate in sorted({row["rate"] for row in rows}, reverse=True):
        here = [row for row in rows if row["rate"] == rate and not row.get("error")]
        floors = [name for name in BESIDE if any(name in row["cells"] for row in here)]
        columns = [name for name in COLUMNS if any(name in row["cells"] for row in here)]
        shown = []
        for row in here:
            times = {name: step(row, name) for name in columns}
            plans = {name: row["cells"].get(name, {}).get("plan") for name in floors}
            shown.append([
                row["model"],
                f"{row['gradient_bytes'] / 1e6:.0f}",
                *("failed" if name in row["cells"] and not ms else ms and 1e3 * row["batch"] / ms
                  for name, ms in times.items()),
                *(against(row, name) for name in floors),
                "; ".join(plan["kept"] for plan in plans.values() if plan),
                "; ".join(f"{plan['expected_ms'] / ms:.2f}" for name, plan in plans.items()
                          if plan and (ms := times[name])),
            ])  # fmt: skip
        heads = [f"{rate:g} Gb/s, samples/s a rank", "MB", *(TITLES[name] for name in columns),
                 *(f"{name} / best" for name in floors), "kept", "expected / measured"]  # fmt: skip
        lines += [harness.show(heads, shown), ""]
        for name in floors:
            ratios = [ratio for row in here if (ratio := against(row, name))]
            held = [
                abs(plan["expected_ms"] / ms - 1) <= 0.1
                for row in here
                if (ms := step(row, name)) and (plan := row["cells"][name].get("plan"))
            ]
            mean = statistics.geometric_mean(ratios) if ratios else math.nan
            lines.append(
                f"{TITLES[name]}: {sum(r >= 0.98 for r in ratios)} of {len(ratios)} rows at least "
                f"0.98 of the best of {', '.join(BESIDE[name])}; geometric mean {mean:.3f}; "
                f"expected within 10% in {sum(held)} of {len(held)}"
            )
        lines += [f"{row['model']} failed: {row['error'][:80]}" for row in rows
                  if row["rate"] == rate and row.get("error")]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """All rates, as far as the budget goes."""
    parser = harness.arguments(__doc__, json="zoo.json")
    parser.add_argument("--models", help="separated by commas; default: all twenty")
    parser.add_argument("--rates", default="25,10,1", help="Gb/s of a node's link")
    parser.add_argument("--columns", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small stand-ins, for CPUs")
    parser.add_argument("--seconds", type=float, default=0.4, help="of steps, a column and round")
    parser.add_argument("--rounds", type=int, default=4, help="of all columns, in turn")
    parser.add_argument("--most-rounds", type=int, default=12, help="where steps scatter")
    parser.add_argument("--budget-s", type=float, default=0, help="begin no model after so long")
    parser.add_argument("--again", action="store_true", help="also what is in the file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(argparse.Namespace(**json.loads(given.worker)))
        return 0
    kept = harness.Kept(given, ["timm", "transformers"])
    from zoo_models import ZOO

    models = harness.choose(given.models, list(ZOO), "model")
    columns = harness.choose(given.columns, COLUMNS, "column")
    if given.device == "cpu":  # the hook mixes up its collectives over Gloo with several buckets
        columns = [name for name in columns if name != "powersgd"]
    began = time.time()
    until = began + (given.budget_s or 1e9)
    for rate in map(float, given.rates.split(",")):
        left = []
        for model in models:
            cells = kept.rows.get(named(model, rate), {}).get("cells", {})
            if given.again or not set(columns) <= set(cells):
                left.append(model)
        for _ in range(3):  # a model that ends the job is noted, and the others go on
            if not left or time.time() >= until:
                break
            print(f"{rate:g} Gb/s: {', '.join(left)}", flush=True)
            told = {name: value for name, value in vars(given).items() if name != "json"}
            told |= {"models": left, "columns": columns, "rate": rate, "until": until}
            timeout = max(60.0, until - time.time() + 45) if given.budget_s else 7200.0
            left = at_rate(argparse.Namespace(**told), kept, timeout)
    print(f"\n{table(list(kept.rows.values()))}\n{time.time() - began:.0f} s; {kept.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
