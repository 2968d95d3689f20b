"""Memory of all 72 rows of zero_zoo.py: several rows share one GPU, so their times mean nothing.

    python benchmarks/zero_zoo_memory.py [--budget-s 550] [--only PREFIX;...] [--json FILE]

12 models x 3 budgets x 2 batches. A row is a process of its own; rows run side by side as far as
the GPU's and the host's memory allow. All rows are planned with the probe that zero_zoo.py wrote
(benchmarks/results/zero_zoo.json), because a probe beside other rows would be wrong. Each row: the
plan's memory and the peaks of the process on GPU and host, what was refused, what ended in an
error, and what had to make room. Rows that the file already has are not run again. --tiny: small
models on a CPU, which measures nothing. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zero_zoo as zoo

from evener import zero

GB = zoo.GB
WARMUP, STEPS = 3, 1
GPU, HOST = 132, 116
"""GB that all rows of a moment may take together, by estimate."""
PARAMETERS = {
    "llama 2.7B": 2.7, "qwen3 4B": 4.0, "mixtral 2.2B": 2.2, "t5 3B": 2.9, "gpt2 xl": 1.6,
    "bert 2.5B": 2.5, "gemma 2.5B": 2.5, "qwen3 moe 2.6B": 2.6, "whisper 1.5B": 1.6,
    "vit 1B": 1.0, "llama3 shape 2.8B": 2.8, "qwen3 4B lora": 1.9,
}  # fmt: skip
"""Billions, for `host_of`; of LoRA, what counts as much."""
TIMES = (
    "seconds", "tokens_per_second", "planned_seconds", "speed_over_plan", "expected_seconds",
    "speed_over_expected", "times", "each_s", "gpu_driver", "why", "bound",
)  # fmt: skip
"""Fields of a row that mean nothing beside other rows."""


@dataclass
class Running:
    """A row that runs."""

    name: str
    process: subprocess.Popen[str]
    gpu: float
    host: float
    begun: float


def host_of(model: str, budget: float) -> float:
    """GB of host memory that a row takes at most: 14 bytes per parameter that is not on the GPU."""
    return max(10.0, 14 * PARAMETERS[model] + 6 - 0.6 * budget)


def work(model: str, budget: float, rows: int, tiny: bool) -> None:
    """The process of one row."""
    # Also where its figures are not used: a user's process has loaded what the probe loads.
    machine = zero.probe(torch.device("cpu" if tiny else "cuda")).machine
    if not tiny:
        results = Path(__file__).parent / "results" / "zero_zoo.json"
        measured = json.loads(results.read_text(encoding="utf-8"))["machine"]
        cores = torch.cuda.get_device_properties(0).multi_processor_count
        machine = zero.Machine(**{**measured, "cores": cores})
    zoo.WARMUP, zoo.STEPS = WARMUP, STEPS
    begun = time.perf_counter()
    try:
        row = zoo.measure(model, budget, rows, machine, tiny, 100 * GB)
    except Exception as error:  # it is the row's result
        logging.getLogger("evener.zero").exception("the row failed")
        said = str(error).strip().splitlines() or [""]
        row = {"failed": f"{type(error).__name__}: {said[0][:300]}"}
    for field in TIMES:
        row.pop(field, None)
    row["row_s"] = time.perf_counter() - begun
    print("RESULT " + json.dumps(row, default=str), flush=True)


def show(name: str, row: dict[str, Any], unit: float) -> None:
    """A line of the table."""
    if "failed" in row:
        print(f"{name:36} FAILED {row['failed'][:160]}", flush=True)
    elif "refused" in row:
        print(f"{name:36} refused: needs {row['needs']:.2f}", flush=True)
    else:
        print(
            f"{name:36} GPU {row['gpu_peak'] / unit:6.2f}"
            f"{'' if row['gpu_peak'] <= row['budget'] else ' OVER'}, plan "
            f"{row['gpu_planned'] / row['gpu_peak']:.3f} x; host {row['host_peak'] / unit:6.2f}, "
            f"plan {row['host_planned'] / row['host_peak']:.3f} x; {row['checkpointing']} "
            f"{row['recomputed']}, resident {row['resident']}, again {row['again']}, "
            f"{row['row_s']:.0f} s{', made room' * bool(row['made_room'])}",
            flush=True,
        )


def summary(rows: dict[str, dict[str, Any]]) -> None:
    """What all rows show against what they must."""
    done = [row for row in rows.values() if "gpu_peak" in row]
    gpu = [row["gpu_planned"] / row["gpu_peak"] for row in done]
    host = [row["host_planned"] / row["host_peak"] for row in done]
    refused = [row for row in rows.values() if "refused" in row]
    print(
        f"{len(rows)} rows: {len(done)} trained, {len(refused)} refused, failed: "
        f"{[name for name, row in rows.items() if 'failed' in row]}\n"
        f"GPU peak <= budget {sum(row['gpu_peak'] <= row['budget'] for row in done)}, plan within "
        f"5% of it {sum(abs(x - 1) <= 0.05 for x in gpu)} ({min(gpu, default=0):.3f} to "
        f"{max(gpu, default=0):.3f}); host within 3% {sum(abs(x - 1) <= 0.03 for x in host)} "
        f"({min(host, default=0):.3f} to {max(host, default=0):.3f}); made room "
        f"{sum(bool(row['made_room']) for row in done)}; refused at 1.15 x the budget too "
        f"{sum(row['needs over budget'] > 1.15 for row in refused)} of {len(refused)}"
    )


def run(
    todo: list[tuple[str, float, int]], record: dict[str, Any], given: argparse.Namespace
) -> None:
    """Rows side by side until all are through; none begins when the time is over."""
    watch = selectors.DefaultSelector()
    running: list[Running] = []
    begun = time.monotonic()

    def end(row: Running, why: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(row.process.pid, signal.SIGKILL)
        row.process.wait()
        if why:
            keep(row.name, {"failed": why})

    def keep(name: str, found: dict[str, Any]) -> None:
        record["rows"][name] = found
        show(name, found, 1e6 if given.tiny else GB)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def start() -> bool:
        """Starts the first row for which there is room."""
        gpu, host = sum(x.gpu for x in running), sum(x.host for x in running)
        for index, (model, budget, rows) in enumerate(todo):
            wants = host_of(model, budget)
            if len(running) < given.jobs and gpu + budget <= GPU and host + wants <= HOST:
                del todo[index]
                one = json.dumps([model, budget, rows])
                command = [sys.executable, __file__, "--one", one, *(["--tiny"] * given.tiny)]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, start_new_session=True
                )
                name = zoo.name_of(model, budget, rows)
                row = Running(name, process, budget, wants, time.monotonic())
                assert process.stdout is not None
                watch.register(process.stdout, selectors.EVENT_READ, row)
                running.append(row)
                return True
        return False

    try:
        while running or todo:
            late = time.monotonic() - begun > given.budget_s
            while not late and start():
                pass
            if late and not running:
                break
            for key, _ in watch.select(timeout=1.0):
                row: Running = key.data
                assert row.process.stdout is not None
                line = row.process.stdout.readline()
                if line.startswith("RESULT "):
                    keep(row.name, json.loads(line[7:]))
                    continue
                if line:
                    continue
                watch.unregister(row.process.stdout)
                running.remove(row)
                said = row.name in record["rows"]
                status = row.process.wait()
                end(row, "" if said else f"the process ended with {status}")
            for row in [x for x in running if time.monotonic() - x.begun > given.limit]:
                assert row.process.stdout is not None
                watch.unregister(row.process.stdout)
                running.remove(row)
                end(row, f"ran past {given.limit:.0f} s")
    finally:
        for row in running:
            end(row, "")


def main() -> None:
    """Run what is missing, until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budget-s", type=float, default=550, help="seconds in which rows begin")
    parser.add_argument("--only", default="", help="rows whose names begin so, separated by ;")
    parser.add_argument("--jobs", type=int, default=5, help="rows at once at most")
    parser.add_argument("--limit", type=float, default=200, help="seconds for a row")
    parser.add_argument("--again", action="store_true", help="run failed rows again")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU: a dry run")
    default = Path("benchmarks/results/zero_zoo_memory.json")
    parser.add_argument("--json", type=Path, default=default)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        model, budget, rows = json.loads(given.one)
        work(model, budget, rows, given.tiny)
        return
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one (--tiny: a dry run)")
    record: dict[str, Any] = {"rows": {}}
    if given.json.is_file():
        record = json.loads(given.json.read_text(encoding="utf-8"))
    record |= {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cpus": len(os.sched_getaffinity(0)),
    }
    todo = []
    for _, model, budget, rows in zoo.rows_in_order():
        name = zoo.name_of(model, budget, rows)
        old = record["rows"].get(name)
        if (old is None or (given.again and "failed" in old)) and name.startswith(
            tuple(given.only.split(";"))
        ):
            todo.append((model, budget, rows))
    run(todo, record, given)
    summary(record["rows"])


if __name__ == "__main__":
    main()
