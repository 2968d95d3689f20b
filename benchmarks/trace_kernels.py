"""How long the model's own kernels take in two traces of `evener bench train --trace`.

    python benchmarks/trace_kernels.py NCCL.json.gz STAGED.json.gz [--json FILE]

Kernels of the training stream (the one with the most of them), by name and grid; in milliseconds of
a traced step. Those whose time differs most come first: where a collective's kernel holds
multiprocessors, kernels with one block for each of them take two rounds.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

STEPS = 3  # that a trace holds


def kernels(path: Path) -> dict[str, list[float]]:
    """Milliseconds of each run of each kernel on the training stream."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    streams: dict[Any, dict[str, list[float]]] = collections.defaultdict(dict)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            grid = "x".join(map(str, event["args"].get("grid", ())))
            name = f"{event['name'][:70]} [{grid}]"
            of = streams[event["args"].get("stream")]
            of.setdefault(name, []).append(event["dur"] / 1e3)
    return max(streams.values(), key=lambda of: sum(map(len, of.values())))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    one, other = (kernels(path) for path in options.traces)
    totals = [sum(map(sum, of.values())) / STEPS for of in (one, other)]
    rows: list[dict[str, Any]] = [
        {
            "kernel": name,
            "median_ms": [statistics.median(one[name]), statistics.median(other[name])],
            "step_ms": [sum(one[name]) / STEPS, sum(other[name]) / STEPS],
        }
        for name in one
        if name in other and len(one[name]) == len(other[name])
    ]
    rows.sort(key=lambda row: row["step_ms"][1] - row["step_ms"][0])
    print(f"all kernels of a step: {totals[0]:.1f} ms, {totals[1]:.1f} ms")
    for row in rows[:8]:
        before, after = row["median_ms"]
        print(f"{before:8.3f} {after:8.3f} ms  {row['kernel']}")
    if options.json:
        found = {"traces": [path.name for path in options.traces], "step_ms": totals, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
