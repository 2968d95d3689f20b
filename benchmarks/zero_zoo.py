"""Models that nobody here wrote under the memory engine: within their budgets, and beside peers.

    python benchmarks/zero_zoo.py [budgets] [--rounds 1,2]  # plan and time, a row after another
    python benchmarks/zero_zoo.py peers --gpu 24            # beside DeepSpeed and FSDP2

Models are transformers' own with drawn weights, checkpointing "auto", clipping at 1.0, the loss
their own; nothing is tuned. `budgets`: 12 models x 3 budgets x 2 batches; each row has what the
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
from zero_models import GB, HYPER, Driver, forget_peaks, host_peak, memory, place, timed, value_of

from evener import zero
from evener.base.budget import resident_now
from evener.zero.probe import LIBRARIES

PEERS = ("llama 2.7B", "qwen3 4B", "mixtral 2.2B", "t5 3B")
SYSTEMS = ("Evener", "DeepSpeed", "FSDP2")
ROWS = 8


def config_of(budget: dict[str, int], device: str, **own: Any) -> dict[str, Any]:
    """As a user has it: nothing is tuned."""
    return {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "evener": {"checkpointing": "auto", "device": device, "budget": budget, **own},
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
    warmup, steps = 5, 4
    model = shapes.model_of(model_name, tiny)
    batch = shapes.batch_of(model_name, rows, model, "cuda" if cuda else "cpu", tiny)
    limit = int(budget * (4e6 if tiny else GB))
    config = config_of(
        {"gpu": limit, "host": int(given.host * GB)}, "cuda" if cuda else "simulated",
        rehearse=given.rehearse,
    )  # fmt: skip
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
    plan = engine.plan
    assert plan is not None
    forget_peaks()
    losses, each, room = [], list[float](), list[str]()

    def idle() -> float:
        engine.drain()
        harness.settle()
        return time.perf_counter()

    with Driver() as driver:
        for step in range(warmup + steps):
            if step == warmup:
                begun = idle()
            before = time.perf_counter()
            losses.append(_step(engine, batch))
            each.append(time.perf_counter() - before)
            room += [f"step {step}: {said}" for said in engine.room.said[len(room) :]]
        seconds = (idle() - begun) / steps
    used = engine.memory()
    found = {
        "parameters": sum(place.numel for place in plan.places),
        "prepared_s": prepared,
        "seconds": seconds,
        "tokens_per_second": shapes.MODELS[model_name][2] * rows / seconds,
        "planned_seconds": plan.step_seconds,
        "speed_over_plan": plan.step_seconds / seconds,
        "expected_seconds": engine.expected_seconds,
        "speed_over_expected": engine.expected_seconds / seconds,
        "searched": engine.device.searched(),
        "bound": plan.bound,
        "times": plan.times,
        "checkpointing": plan.checkpointing,
        "recomputed": len(plan.recomputed),
        "traced": plan.traced,
        "resident": f"{len(plan.resident)}/{len(plan.places)}",
        "streaming": plan.streaming,
        "budget": limit,
        "gpu_planned": plan.gpu_bytes,
        "gpu_peak": used["gpu peak"],
        "gpu_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "gpu_driver": driver.peak,
        "host_planned": plan.host_bytes,
        "host_peak": host_peak(),
        "again": used["passes run again"],
        "made_room": room,
        "each_s": each,
        "losses": [float(loss) for loss in losses],
    }
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
            plan = engine.plan
            assert plan is not None
            found = timed(functools.partial(_step, engine, batch), tokens, 4, engine.drain)
            found |= {
                "planned_seconds": plan.step_seconds,
                "bound": plan.bound,
                "gpu_planned": plan.gpu_bytes,
                "checkpointing": plan.checkpointing,
                "streaming": plan.streaming,
                "resident": f"{len(plan.resident)}/{len(plan.places)}",
            }
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


def named(rounds: str = "") -> dict[str, tuple[str, float, int]]:
    """The rows of `budgets`, in order."""
    wanted = {int(text) for text in rounds.split(",")} if rounds else set(range(1, 7))
    return {
        shapes.name_of(model, budget, rows): (model, budget, rows)
        for number, model, budget, rows in shapes.rows_in_order()
        if number in wanted
    }


def show(name: str, row: dict[str, Any], unit: float) -> None:
    """A line of the table."""
    if "failed" in row:
        text = f"FAILED {row['failed'][:200]}"
    elif "refused" in row:
        text = f"refused: needs {row['needs']:.2f}, {row['needs over budget']:.2f} x the budget"
    elif "gpu_peak" not in row:
        plan = f", plan x {row['planned_seconds'] / row['seconds']:.2f}" if "bound" in row else ""
        text = (
            f"{row['seconds']:.3f} s {row['tokens_per_second']:8,.0f} tokens/s{plan}; GPU "
            f"{row['gpu_allocated'] / unit:.2f}/{row['gpu_reserved'] / unit:.2f} GB, host "
            f"{row['host'] / unit:.2f} GB"
        )
    else:
        speed = ""
        if "tokens_per_second" in row:
            speed = f"{row['tokens_per_second']:8,.0f} tok/s, plan x {row['speed_over_plan']:.2f}; "
        text = (
            f"{speed}GPU {row['gpu_peak'] / unit:.2f}"
            f"{'' if row['gpu_peak'] <= row['budget'] else ' OVER'}, plan "
            f"{row['gpu_planned'] / row['gpu_peak']:.3f} x; host {row['host_peak'] / unit:.2f}, "
            f"plan {row['host_planned'] / row['host_peak']:.3f} x; {row['checkpointing']} "
            f"{row['recomputed']}, resident {row['resident']}, again {row['again']}"
            f"{''.join(f'; made room: {said}' for said in row['made_room'])}"
        )
    print(f"{name:36} {text}, {row['row_s']:.0f} s", flush=True)


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
    parser.add_argument("--rounds", default="", help="as 1,2: 1 is each model's tightest budget")
    parser.add_argument("--limit", type=float, default=200, help="seconds for a row")
    parser.add_argument("--host", type=float, default=100, help="GB of host memory for a row")
    parser.add_argument("--gpu", type=float, default=24, help="peers: GB of the GPU for Evener")
    parser.add_argument("--again", action="store_true", help="run failed rows again")
    parser.add_argument("--rehearse", action=argparse.BooleanOptionalAction, default=True,
                        help="units run before the plan")  # fmt: skip
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
    every = of_peers if given.what == "peers" else list(named(given.rounds))
    todo = kept.missing(every, given.only, given.again)
    words = [given.what, *harness.arguments_of(given, "host", "gpu", "tiny")]
    words += [] if given.rehearse else ["--no-rehearse"]
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
        show(name, row, 1e6 if given.tiny else GB)
    (summary_of_peers if given.what == "peers" else summary)(kept.rows)


if __name__ == "__main__":
    main()
