"""Models that nobody here wrote under the memory engine: within their budgets, and beside peers.

    python benchmarks/zero_zoo.py                  # plan and time, a row after another
    python benchmarks/zero_zoo.py peers --gpu 24   # beside DeepSpeed and FSDP2

Models are transformers' own with drawn weights, checkpointing "auto", clipping at 1.0, the loss
their own; nothing is tuned. `budgets`: 14 models x 3 budgets x 2 batches; each row has what the
plan said of memory and time, and what was measured (peak of torch's allocator with the context, of
the driver for the whole GPU, of the process on the host). A row that is refused must be refused at
1.15 x its budget too. `peers`: four models, 8 rows a batch, under Evener with `--gpu` GB, and under
DeepSpeed ZeRO-3 offload and FSDP2 CPU offload, which may take the whole GPU.

Each row is a process of its own. Rows that the file already has are not run again, so the command
may be given again until all are there. --tiny: the same code on a CPU with small models, which
measures nothing. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import sys
import time
import traceback
from typing import Any

import harness
import torch
import zero_peers as peers
import zero_shapes as shapes
from harness.records import RESULTS
from zero_models import (
    GB,
    HYPER,
    Driver,
    forget_peaks,
    host_peak,
    memory,
    place,
    planned,
    timed,
    value_of,
)  # fmt: skip

from evener import zero
from evener.base.budget import resident_now
from evener.zero.probe import LIBRARIES

PEERS = ("llama 2.7B", "qwen3 4B", "mixtral 2.2B", "t5 3B")
SYSTEMS = ("Evener", "DeepSpeed", "FSDP2")
ROWS = 8


def config_of(budget: dict[str, int], device: str) -> dict[str, Any]:
    """As a user has it: nothing is tuned."""
    return {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "evener": {"checkpointing": "auto", "device": device, "budget": budget},
    }


def _step(engine: zero.Engine, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def measure(
    model_name: str, budget: float, rows: int, machine: zero.Machine, given: argparse.Namespace
) -> dict[str, Any]:
    """One row of `budgets`."""
    tiny, cuda = given.tiny, torch.cuda.is_available() and not given.tiny
    model = shapes.model_of(model_name, tiny)
    batch = shapes.batch_of(model_name, rows, model, "cuda" if cuda else "cpu", tiny)
    limit = int(budget * (4e6 if tiny else GB))
    config = config_of(
        {"gpu": limit, "host": int(given.host * GB)}, "cuda" if cuda else "simulated"
    )
    config["evener"]["rehearse"] = True
    begun = time.perf_counter()
    forget_peaks()
    machine = dataclasses.replace(machine, host_reserve=resident_now() + (LIBRARIES if cuda else 0))
    try:
        engine, *_ = zero.initialize(
            model=model, config=config, machine=machine, example=batch, weights=value_of
        )
    except zero.NoFitError as error:
        return {
            "refused": str(error),
            "nearest": error.nearest,
            "needs": error.plan.gpu_bytes / (1e6 if tiny else GB),
            "needs over budget": error.plan.gpu_bytes / limit,
        }
    prepared = time.perf_counter() - begun
    forget_peaks()
    tokens = shapes.MODELS[model_name][2] * rows
    with Driver() as driver:
        found = timed(functools.partial(_step, engine, batch), tokens, 4, engine.drain, warmup=5)
    used, seconds = engine.memory(), found["seconds"]
    found |= planned(engine) | {
        "prepared_s": prepared,
        "expected_seconds": engine.expected_seconds,
        "speed_over_expected": engine.expected_seconds / seconds,
        "searched": engine.device.searched(),
        "budget": limit,
        "gpu_peak": used["gpu peak"],
        "gpu_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "gpu_driver": driver.peak,
        "host_peak": host_peak(),
        "again": used["passes run again"],
        "made_room": engine.room.said,
    }
    found["speed_over_plan"] = found["planned_seconds"] / seconds
    engine.close()
    return found


def beside(name: str, system: str, given: argparse.Namespace) -> dict[str, Any]:
    """One row of `peers`."""
    tiny = given.tiny
    tokens = ROWS * (32 if tiny else shapes.MODELS[name][2])
    model = shapes.model_of(name, tiny)
    batch = shapes.batch_of(name, ROWS, model, place(), tiny)

    def recompute(module: Any) -> None:
        module.config.use_cache = False
        checkpoints = {"use_reentrant": False}
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)

    task = peers.Task(
        lambda: model, lambda: shapes.drawn(name, tiny), value_of,
        lambda system: system(**batch).loss, tokens, ROWS, recompute,
    )  # fmt: skip
    with Driver() as driver:
        if system == "DeepSpeed":
            found = peers.deepspeed(task, 4)
        elif system == "FSDP2":
            found = peers.fsdp(task, 4, prefetch=True)
        else:
            config = config_of({"gpu": int(given.gpu * GB)}, place())
            engine, *_ = zero.initialize(
                model=model, config=config, example=batch, weights=value_of
            )
            found = timed(functools.partial(_step, engine, batch), tokens, 4, engine.drain)
            found |= planned(engine)
            engine.close()
        return {**found, **memory(driver, found)}


def run_one(given: argparse.Namespace) -> None:
    """A row, in this process."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("evener.zero").setLevel(logging.INFO)
    if given.one == "compile":
        peers.compile_adam()
        harness.say(compiled=True)
        return
    try:
        if given.what == "peers":
            model, system = given.one.rsplit(", ", 1)
            harness.say(**beside(model, system, given))
            return
        machine = zero.probe(torch.device("cpu" if given.tiny else place())).machine
        model, budget, rows = named()[given.one]
        found = measure(model, budget, rows, machine, given)
        harness.say(**found, probe=dataclasses.asdict(machine))
    except Exception as error:  # noqa: BLE001 - it is the row's result
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        harness.say(failed=f"{type(error).__name__}: {said[0][:300]}")


def named() -> dict[str, tuple[str, float, int]]:
    """The rows of `budgets`, in order."""
    return {f"{model}, {budget:g} GB, batch {rows}": (model, budget, rows)
            for model, budget, rows in shapes.rows_in_order()}  # fmt: skip


SHOWN = ("failed", "refused", "needs over budget", "tokens_per_second", "speed_over_plan",
         "gpu_planned", "gpu_peak", "gpu_reserved", "host_planned", "host_peak", "host",
         "checkpointing", "resident", "again", "made_room", "row_s")  # fmt: skip


def summary(rows: dict[str, Any]) -> None:
    """What the rows show against what they must."""
    done = [row for row in rows.values() if "gpu_peak" in row]
    refused = [row for row in rows.values() if "refused" in row]

    def within(what: str, share: float) -> int:
        return sum(abs(row[f"{what}_planned"] / row[f"{what}_peak"] - 1) <= share for row in done)

    inside = sum(row["gpu_peak"] <= row["budget"] for row in done)
    fast = sum(row.get("speed_over_plan", 0) >= 0.9 for row in done)
    print(
        f"{len(rows)} rows: {len(done)} trained, {len(refused)} refused, failed: "
        f"{[name for name, row in rows.items() if 'failed' in row]}\n"
        f"GPU peak <= budget {inside}; plan within 5% of it {within('gpu', 0.05)}, of the host's "
        f"within 3% {within('host', 0.03)}; >= 0.9 of the plan's speed {fast}; no pass run again "
        f"{sum(row['again'] == 0 for row in done)}; refused at 1.15 x too "
        f"{sum(row['needs over budget'] > 1.15 for row in refused)} of {len(refused)}"
    )


def summary_of_peers(rows: dict[str, Any]) -> None:
    """Evener over the better peer, model by model."""
    for model in PEERS:
        speed = [rows.get(f"{model}, {s}", {}).get("tokens_per_second", 0.0) for s in SYSTEMS]
        if speed[0] and any(speed[1:]):
            print(f"{model:14} Evener is {speed[0] / max(speed[1:]):.2f} x the better peer")


def main() -> None:
    """Run what is missing, until the time is over."""
    parser = harness.arguments(__doc__)
    parser.add_argument("what", nargs="?", choices=("budgets", "peers"),
                        default="budgets")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=300, help="seconds in which rows begin")
    parser.add_argument("--only", default="", help="rows whose names begin so, separated by ;")
    parser.add_argument("--limit", type=float, default=200, help="seconds for a row")
    parser.add_argument("--host", type=float, default=100, help="GB of host memory for a row")
    parser.add_argument("--gpu", type=float, default=24, help="peers: GB of the GPU for Evener")
    parser.add_argument("--again", action="store_true", help="run failed rows again")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU: a dry run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given)
        return
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one (--tiny: a dry run)")
    name = "zero_zoo" if given.what == "budgets" else "zero_peers_zoo"
    given.json = given.json or RESULTS / f"{name}.json"
    kept = harness.Kept(given, ["transformers", "peft", "deepspeed"])
    of_peers = [f"{model}, {system}" for model in PEERS for system in SYSTEMS]
    every = of_peers if given.what == "peers" else list(named())
    todo = kept.missing(every, given.only, given.again)
    words = [given.what, *harness.arguments_of(given, "host", "gpu", "tiny")]
    if any(name.endswith("DeepSpeed") for name in todo):
        harness.again(*words, "--one", "compile", limit=given.limit)
    end = time.monotonic() + given.budget_s
    for name in todo:
        if time.monotonic() > end:
            break
        job = harness.again(*words, "--one", name, limit=given.limit)
        row = {**job.row, "row_s": job.seconds}
        probe = row.pop("probe", None)
        kept.add(name, row, **({"probe": probe} if probe else {}))
        print(name, {key: row[key] for key in SHOWN if key in row}, flush=True)
    (summary_of_peers if given.what == "peers" else summary)(kept.rows)


if __name__ == "__main__":
    main()
