"""`evener bench` beside nccl-tests' own binaries, on the same GPUs, one after the other.

For each collective: interleaved pairs of runs (--repeats), and medians over them. Large sizes are
compared by bus bandwidth, small ones by time. Give the folder of binaries that you built
(`all_reduce_perf`, ...); nothing is downloaded or built here.

    python benchmarks/against_nccl_tests.py --nccl-tests DIR -g 4 [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from evener.analyze import collect, picture

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "sendrecv", "alltoall")
SWEEPS = {"small": ("8", "64K"), "large": ("1M", "1G")}


def run(command: list[str]) -> dict[int, tuple[float, float]]:
    """Size to (time us, bus bandwidth GB/s), out of place."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
                         f"{done.stderr[-2000:]}")  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(done.stdout)
        file.flush()
        found = picture(collect([Path(file.name)])).bandwidth
    if found is None:
        raise SystemExit(f"{' '.join(command)} printed no table")
    return {
        row.size: (row.out_of_place.time_us, row.out_of_place.busbw)
        for row, _ in found.table.rows
        if row.out_of_place
    }


def compare(name: str, folder: Path, gpus: int, repeats: int) -> list[dict[str, Any]]:
    """One collective: rows with both programs' medians and their ratio."""
    rows = []
    for sweep, (low, high) in SWEEPS.items():
        options = ["-b", low, "-e", high, "-f", "4", "-g", str(gpus), "-n", "50", "-w", "5",
                   "-c", "0"]  # fmt: skip
        programs = {
            "nccl_tests": [str(folder / f"{name}_perf"), *options],
            "evener": [sys.executable, "-m", "evener", "bench", name, *options],
        }
        runs: dict[str, list[dict[int, tuple[float, float]]]] = {p: [] for p in programs}
        for _ in range(repeats):
            for program, command in programs.items():
                runs[program].append(run(command))
        for size in sorted(runs["nccl_tests"][0]):
            index = 0 if sweep == "small" else 1
            values = {
                program: median(one[size][index] for one in found if size in one)
                for program, found in runs.items()
            }
            rows.append(
                {
                    "collective": name,
                    "sweep": sweep,
                    "size": size,
                    "what": "time_us" if sweep == "small" else "busbw",
                    **values,
                    "ratio": values["evener"] / values["nccl_tests"]
                    if values["nccl_tests"]
                    else None,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nccl-tests", type=Path, required=True, help="folder of *_perf")
    parser.add_argument("-g", "--gpus", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path("against-nccl-tests.json"))
    given = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    import torch

    rows = [
        row for name in given.only
        for row in compare(name, given.nccl_tests, given.gpus, given.repeats)
    ]  # fmt: skip
    document = {
        "command": " ".join(sys.argv[1:]),
        "machine": f"{given.gpus} x {torch.cuda.get_device_name(0)}, {platform.machine()}",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "rows": rows,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
