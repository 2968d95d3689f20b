"""Runs of each pre-training example: how each ended, and threads left.

    python benchmarks/zero_exits.py [--runs 50] [--jobs 8] [--steps 3] [--only gpt] [--json FILE]
                                    [--seconds 150]

`--jobs N`: N at a time, each with its part of the cores. `--seconds S`: no run begins after that;
given again with the same file it goes on, until all runs are there.

A run is bad if its status is not 0, if it was ended by a signal, if C++ said "terminate called", or
if a thread of Evener is alive when Python's own exit functions are through. Idle threads of the
kernels' pool (evener-cpu) do not count: they hold nothing of torch's, and wait for work until the
process ends. Each run writes a checkpoint in its last step, so that one is on its way then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT = 300
"""Seconds of a run."""
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RUNS = {
    "gpt": ["pretrain_gpt.py"],
    "masked": ["pretrain_text.py", "--objective", "masked"],
    "spans": ["pretrain_text.py", "--objective", "spans"],
}
# Registered before anything else is imported, so called after everything else.
WATCH = """
import atexit, pathlib, runpy, sys, threading

def left():
    mine = [t.name for t in threading.enumerate() if t.name.startswith("evener")]
    for task in pathlib.Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("evener") and not name.startswith("evener-cpu"):
            mine.append(name)
    print("LEFT", len(mine), *mine, flush=True)

atexit.register(left)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def parts(jobs: int) -> list[list[int]]:
    """The cores of each job; all of them where there are fewer cores than jobs."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // jobs
    return [cores[n * each : (n + 1) * each] or cores for n in range(jobs)]


def once(name: str, steps: int, cores: Sequence[int]) -> str:
    """Why a run was bad; empty where it was not."""
    listed = ",".join(map(str, cores))
    script, *rest = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "taskset",
            "-c",
            listed,
            sys.executable,
            "-c",
            WATCH,
            str(EXAMPLES / script),
            *rest,
        ]
        command += ["--steps", str(steps), "--rows", "2", "--every", str(steps)]
        try:
            run = subprocess.run(
                [*command, "--folder", folder],
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it had not ended after {LIMIT} s"
    said = run.stdout + run.stderr
    if "terminate called" in said:
        return "terminate called"
    if run.returncode:
        return f"status {run.returncode}: {said.strip().splitlines()[-1:]}"
    found = [line for line in run.stdout.splitlines() if line.startswith("LEFT ")]
    if not found:
        return "it did not reach its end"
    return "" if found[-1] == "LEFT 0" else found[-1]


def runs(name: str, count: int, steps: int, jobs: int, end: float) -> list[str]:
    """How each of at most `count` runs ended, empty where well: of those begun before `end`."""
    free = parts(jobs)

    def one(_: int) -> str | None:
        if time.monotonic() > end:
            return None
        cores = free.pop()
        try:
            return once(name, steps, cores)
        finally:
            free.append(cores)

    with ThreadPoolExecutor(jobs) as pool:
        return [why for why in pool.map(one, range(count)) if why is not None]


def main() -> int:
    """Exit status 1 where a run was bad."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=list(RUNS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins later")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    rows: dict[str, Any] = {}
    if given.json and given.json.is_file():
        rows = json.loads(given.json.read_text(encoding="utf-8"))
    for name in [given.only] if given.only else list(RUNS):
        before = rows.get(name, {"runs": 0, "bad": [], "seconds": 0.0})
        begun = time.perf_counter()
        ended = runs(name, given.runs - before["runs"], given.steps, given.jobs, end)
        took = time.perf_counter() - begun + before["seconds"] * before["runs"]
        count = before["runs"] + len(ended)
        bad = [*before["bad"], *filter(None, ended)]
        each = took / max(1, count)
        rows[name] = {"runs": count, "jobs": given.jobs, "bad": bad, "seconds": each}
        print(f"{name:8} {count} runs, {len(bad)} bad {bad[:3]}, {each:.1f} s each", flush=True)
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["bad"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
