"""`evener bench` beside nccl-tests' own binaries, on the same GPUs, one after the other.

    python benchmarks/against_nccl_tests.py --nccl-tests DIR --layout "-g 4" [--out results.json]

DIR holds nccl-tests, from its public repository: its source, which is built here first (nvcc, and
the NCCL that torch loads, so that both programs use one library), or binaries built before.

A run is one sweep of sizes from 8 bytes to 1 GiB, --cycles times (-N of both programs). In each
repeat both programs run once for every collective, so that a limit of time takes repeats away and
not collectives; who begins alternates. Compared are medians over repeats and cycles: time up to
32 KiB (to be within 10%), bus bandwidth from 1 MiB (within 3%); between them it is only told.
`spread` is how far the medians of nccl-tests' own runs lie apart, as a part of their median: less
than that is not told apart here. It needs two repeats.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from evener.analyze import collect, picture

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv")
# Sizes whose time and whose bandwidth is compared.
SMALL, LARGE = 32 << 10, 1 << 20
TARGETS = {"time_us": 0.10, "busbw": 0.03}
# (size, side) to (time us, bus bandwidth GB/s) of each cycle.
Rows = dict[tuple[int, str], list[tuple[float, float]]]


def package(name: str) -> Path | None:
    """The folder of an installed package, None where it is not there."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(next(iter(found.submodule_search_locations or []))) if found else None


def build(source: Path, folder: Path, names: list[str], architecture: str) -> Path:
    """Build the programs of a source tree into `folder`; where they are."""
    wheels = package("nvidia")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise SystemExit("nvcc is not on the PATH: install the CUDA toolkit")
    cuda = Path(nvcc).resolve().parent.parent
    # What wheels install lacks the names that a linker looks for.
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    roots = [path for path in (wheels, cuda, Path("/usr")) if path]
    header = next((p for root in roots for p in root.rglob("nccl.h")), None)
    if header is None:
        raise SystemExit("nccl.h is nowhere: install nvidia-nccl-cu13 or libnccl-dev")
    _link(home / "include", header.parent)
    for library in ("libnccl.so", "libcudart.so"):
        found = next((p for root in roots for p in sorted(root.rglob(f"{library}*"))), None)
        if found is None:
            raise SystemExit(f"{library} is nowhere")
        _link(home / "lib" / library, found)
    command = [
        "make", "-C", str(source / "src"), f"-j{os.cpu_count()}", f"BUILDDIR={folder.resolve()}",
        f"NCCL_HOME={home.resolve()}", f"CUDA_HOME={cuda}", f"NVCC={nvcc}",
        f"NVCC_GENCODE=-gencode=arch=compute_{architecture},code=sm_{architecture}",
        *(str(folder.resolve() / f"{name}_perf") for name in names),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"make ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return folder


def _link(name: Path, target: Path) -> None:
    name.unlink(missing_ok=True)
    name.symlink_to(target.resolve())


def environment() -> dict[str, str]:
    """Both programs load the libraries that torch loads."""
    wheels = package("nvidia")
    folders = [str(p) for p in wheels.glob("*/lib")] if wheels else []
    path = os.pathsep.join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
    # Without the plug-in, which `import evener` names, here and in one of the two programs.
    own = {"NCCL_NET_PLUGIN": "none", "LD_LIBRARY_PATH": path}
    return {"NCCL_NVLS_ENABLE": "0", **os.environ, **own}


def run(command: list[str], limit: float) -> Rows:
    """What each side took at each size, a value a cycle."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment())
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1500:]}"
            f"{done.stderr[-1500:]}"
        )
    return parse(done.stdout, " ".join(command))


def parse(text: str, what: str) -> Rows:
    """The rows of a benchmark's table. Raises RuntimeError where there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        found = picture(collect([Path(file.name)])).bandwidth
    if found is None:
        raise RuntimeError(f"{what} printed no table")
    rows: Rows = {}
    for row, _ in found.table.rows:
        for side, one in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
            if one:
                rows.setdefault((row.size, side), []).append((one.time_us, one.busbw))
    return rows


def sample(name: str, number: int, folder: Path, given: argparse.Namespace) -> dict[str, Rows]:
    """A run of both programs, nccl-tests first where `number` is even."""
    options = [
        "-b", "8", "-e", given.largest, "-f", "2", *given.layout.split(),
        "-n", str(given.iterations), "-w", "5", "-c", "0", "-N", str(given.cycles),
    ]  # fmt: skip
    programs = [
        ("nccl_tests", [str(folder / f"{name}_perf"), *options]),
        ("evener", [sys.executable, "-m", "evener", "bench", name, *options]),
    ]
    return {
        program: run(command, given.limit)
        for program, command in programs[:: 1 if number % 2 == 0 else -1]
    }


def compare(name: str, runs: list[dict[str, Rows]], layout: str) -> list[dict[str, Any]]:
    """A row a size and side: each run's values by program, ratio of medians, nccl-tests' spread."""
    rows = []
    for size, side in runs[0]["nccl_tests"] if runs else ():
        index, what = (0, "time_us") if size <= SMALL else (1, "busbw")
        own = {
            program: [[one[index] for one in found[program][size, side]] for found in runs]
            for program in ("nccl_tests", "evener")
        }
        middle = {
            program: median([one for run in each for one in run]) for program, each in own.items()
        }
        base = middle["nccl_tests"]
        ratio = middle["evener"] / base if base else None
        theirs = [median(each) for each in own["nccl_tests"]]
        apart = (max(theirs) - min(theirs)) / base if base and len(theirs) > 1 else None
        compared = ratio is not None and (size <= SMALL or size >= LARGE)
        rows.append(
            {
                "collective": name,
                "layout": layout,
                "size": size,
                "side": side,
                "what": what,
                **own,
                "median": middle,
                "ratio": ratio,
                "spread": apart,
                "within": abs(ratio - 1) <= TARGETS[what] if ratio and compared else None,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row, then how many rows of each collective are within the targets."""
    lines = [f"{'collective':<16}{'size':>12} {'side':<13}{'what':<8}{'nccl-tests':>11}"
             f"{'evener':>11}{'ratio':>7}{'spread':>8}"]  # fmt: skip
    for row in rows:
        mark = {True: "", False: "  beyond", None: ""}[row["within"]]
        spread = "" if row["spread"] is None else f"{row['spread']:.3f}"
        lines.append(
            f"{row['collective']:<16}{row['size']:>12} {row['side']:<13}{row['what']:<8}"
            f"{row['median']['nccl_tests']:>11.2f}{row['median']['evener']:>11.2f}"
            f"{row['ratio'] or 0:>7.3f}{spread:>8}{mark}"
        )
    for name in dict.fromkeys(row["collective"] for row in rows):
        for what, limit in TARGETS.items():
            of = [r for r in rows if (r["collective"], r["what"]) == (name, what)]
            of = [r for r in of if r["within"] is not None]
            if not of:
                continue
            ratios = [r["ratio"] for r in of]
            spreads = [r["spread"] for r in of if r["spread"] is not None]
            lines.append(
                f"{name} {what}: {sum(r['within'] for r in of)} of {len(of)} within {limit:.0%}, "
                f"ratios {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}; "
                f"{len(of[0]['nccl_tests'])} runs"
                + (f", nccl-tests' own spread {max(spreads):.3f} at most" if spreads else "")
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nccl-tests", type=Path, required=True, help="source, or *_perf")
    parser.add_argument("--build", type=Path, default=Path("nccl-tests-build"), help="built there")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--architecture", default="90", help="of the GPUs: 80, 90, 100")
    parser.add_argument("--layout", default="-g 4", help="'-g 4': one thread; '-t 4': four")
    parser.add_argument("--largest", default="1G")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=3, help="sweeps of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds of one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after them")
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path("against-nccl-tests.json"))
    given = parser.parse_args()
    folder = given.nccl_tests
    if (folder / "src" / "common.mk").exists():
        began = time.monotonic()
        folder = build(folder, given.build, given.only, given.architecture)
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    if given.build_only:
        return
    import torch

    runs: dict[str, list[dict[str, Rows]]] = {name: [] for name in given.only}
    left_out: dict[str, str] = {}
    began = time.monotonic()
    for number, name in [(number, name) for number in range(given.repeats) for name in given.only]:
        what = f"{name}, repeat {number}"
        if time.monotonic() - began > given.seconds:
            left_out[what] = f"the {given.seconds:g} s were over"
            continue
        try:
            runs[name].append(sample(name, number, folder, given))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            left_out[what] = str(error)[-1000:]
            print(f"{what}: {left_out[what]}", file=sys.stderr, flush=True)
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)
        document = {
            "command": "python benchmarks/against_nccl_tests.py " + " ".join(sys.argv[1:]),
            "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, "
            f"{platform.machine()}, {os.cpu_count()} processors",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "rows": [row for name in given.only for row in compare(name, runs[name], given.layout)],
            "left_out": left_out,
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table([row for n in given.only for row in compare(n, runs[n], given.layout)]), flush=True)


if __name__ == "__main__":
    main()
