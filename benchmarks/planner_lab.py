"""Another network or another model changes what the planner chooses: three labs, in turn.

    python benchmarks/planner_lab.py --json benchmarks/results/planner-lab.json

Each is `evener bench train` with column auto-int8 on two simulated nodes: the probe measures the
lab's own link, the profile the model's own step. Kept: what was chosen for each bucket, from which
costs, and the steps predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = (("vgg-tiny", "100mbit"), ("vgg-tiny", "10gbit"), ("cnn-small", "100mbit"))


def run(model: str, rate: str) -> dict[str, Any]:
    """One lab: the decision and the steps after it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "evener", "bench", "train", "--model", model]
        command += ["--batch-size", "16", "--lab", f"2x1@{rate}", "--columns", "auto-int8"]
        command += ["--rows", "all", "--steps", "10", "--warmup", "5", "--repeats", "1"]
        done = subprocess.run(
            [*command, "--json", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        rank = json.loads(path.read_text(encoding="utf-8"))["runs"][0]["ranks"][0]
    plan = rank["plan"]
    return {
        "model": model,
        "network": rate,
        "gradient_bytes": rank["gradient_bytes"],
        "forms": [choice["form"] for choice in plan["choices"]],
        "predicted_ms": plan["step_ms"],
        "measured_ms": statistics.median(rank["step_ms"]),
        "compute_ms": plan["compute_ms"],
        "exact_ms": plan["exact_ms"],
        "choices": plan["choices"],
        "costs": plan["costs"],
    }


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="PATH")
    given = parser.parse_args()
    found = []
    for model, rate in CASES:
        found.append(run(model, rate))
        row = found[-1]
        print(
            f"{model:10} {rate:8} {' '.join(row['forms']):24} predicted {row['predicted_ms']:7.1f}"
            f" ms, measured {row['measured_ms']:7.1f} ms, all exact {row['exact_ms']:7.1f} ms",
            flush=True,
        )
    if given.json:
        record = {
            "schema": "evener.planner-lab/1",
            "command": "python " + " ".join(sys.argv),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "cases": found,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
