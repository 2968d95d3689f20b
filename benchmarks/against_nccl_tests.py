"""`evener bench` beside nccl-tests' own binaries, on the same GPUs, one after the other.

    python benchmarks/against_nccl_tests.py --nccl-tests DIR --layout "-g 4" [--out results.json]

DIR holds nccl-tests, from its public repository: its source, which is built here first (nvcc, and
the NCCL that torch loads, so that both programs use one library), or binaries built before.

A run is one sweep of sizes from 8 bytes to 1 GiB, --cycles times (-N of both programs). In each
repeat both programs run every collective, nccl-tests as a process each, `evener bench` as one
process for all (importing torch once); who begins alternates. Both run on the processors next to
the first GPU. Compared are medians over repeats and cycles: time up to 32 KiB (to be within 10%),
bus bandwidth from 1 MiB (within 3%); between them it is only told.

`spread` is how far the medians of nccl-tests' own runs lie apart, as a part of their median (it
needs two repeats). A row is `beyond` where it lies beyond the limit and further than this spread;
beyond the limit alone is counted too. Rows of no bytes (shares below 16 bytes) are not judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from evener.tools.analyze import collect, picture

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv")
# Sizes whose time and whose bandwidth is compared.
SMALL, LARGE = 32 << 10, 1 << 20
TARGETS = {"time_us": 0.10, "busbw": 0.03}
# (size, side) to (time us, bus bandwidth GB/s) of each cycle.
Rows = dict[tuple[int, str], list[tuple[float, float]]]


class Given(argparse.Namespace):
    """The command line, and what follows from the machine."""

    nccl_tests: Path
    build: Path
    build_only: bool
    architecture: str
    layout: str
    largest: str
    iterations: int
    cycles: int
    repeats: int
    limit: float
    seconds: float
    only: list[str]
    out: Path
    pin: list[int]
    """Processors that both programs may use."""


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


def neighbours() -> list[int]:
    """The processors next to the first GPU, of those that may be used; all where it is not said."""
    import torch

    own = os.sched_getaffinity(0)
    gpu: Any = torch.cuda.get_device_properties(0)
    bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    near: set[int] = set()
    try:
        listed = Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text().strip()
        for part in filter(None, listed.split(",")):
            first, _, last = part.partition("-")
            near |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        pass
    return sorted(near & own or own)


def run(command: list[str], limit: float, processors: list[int]) -> str:
    """What a program printed. Raises RuntimeError where it failed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment(),
        preexec_fn=lambda: os.sched_setaffinity(0, processors),
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1500:]}"
            f"{done.stderr[-1500:]}"
        )
    return done.stdout


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


# `evener bench NAME` for each name of the first argument, in one process.
EVENER = """
import sys
from evener.tools.bench.collectives import command
for name in sys.argv[1].split(","):
    try:
        getattr(command, name).main(sys.argv[2:], standalone_mode=False)
    except SystemExit as end:
        if end.code:
            raise
"""


def theirs(names: list[str], folder: Path, options: list[str], given: Given) -> dict[str, Rows]:
    """A run of nccl-tests' programs."""
    return {
        name: parse(run([str(folder / f"{name}_perf"), *options], given.limit, given.pin), name)
        for name in names
    }


def ours(names: list[str], _: Path, options: list[str], given: Given) -> dict[str, Rows]:
    """A run of `evener bench`."""
    command = [sys.executable, "-c", EVENER, ",".join(names), *options]
    text = run(command, given.limit, given.pin)
    tables = re.split(r"(?m)^(?=# evener )", text)[1:]
    if len(tables) != len(names):
        raise RuntimeError(f"evener bench printed {len(tables)} tables for {', '.join(names)}")
    return {name: parse(one, name) for name, one in zip(names, tables, strict=True)}


PROGRAMS = {"nccl_tests": theirs, "evener": ours}


def sample(number: int, folder: Path, given: Given) -> dict[str, dict[str, Rows]]:
    """A run of both programs, nccl-tests first where `number` is even: by collective, program."""
    options = [
        "-b", "8", "-e", given.largest, "-f", "2", *given.layout.split(),
        "-n", str(given.iterations), "-w", "5", "-c", "0", "-N", str(given.cycles),
    ]  # fmt: skip
    order = list(PROGRAMS)[:: 1 if number % 2 == 0 else -1]
    found = {one: PROGRAMS[one](given.only, folder, options, given) for one in order}
    return {name: {one: found[one][name] for one in PROGRAMS} for name in given.only}


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
        cycles = [one for run in own["nccl_tests"] for one in run]
        apart = (max(theirs) - min(theirs)) / base if base and len(theirs) > 1 else None
        # Shares below 16 bytes are rounded down to nothing: no call to compare.
        compared = ratio is not None and (0 < size <= SMALL or size >= LARGE)
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
                "cycles_spread": (max(cycles) - min(cycles)) / base if base else None,
                "within": abs(ratio - 1) <= TARGETS[what] if ratio and compared else None,
                "within_or_spread": abs(ratio - 1) <= max(TARGETS[what], apart or 0.0)
                if ratio and compared
                else None,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row, then how many rows of each collective are within the targets."""
    lines = [f"{'collective':<16}{'size':>12} {'side':<13}{'what':<8}{'nccl-tests':>11}"
             f"{'evener':>11}{'ratio':>7}{'spread':>8}"]  # fmt: skip
    for row in rows:
        mark = "  beyond" if row["within_or_spread"] is False else ""
        if not mark and row["within"] is False:
            mark = "  beyond the limit, within the spread"
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
                f"{sum(r['within_or_spread'] for r in of)} within that or nccl-tests' own spread; "
                f"ratios {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}; "
                f"{len(of[0]['nccl_tests'])} runs"
                + (f", spread {median(spreads):.3f}, {max(spreads):.3f} at most" if spreads else "")
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
    parser.add_argument("--cycles", type=int, default=1, help="sweeps of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds of one run")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no repeat that would end after them"
    )
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path("against-nccl-tests.json"))
    given = parser.parse_args(namespace=Given())
    folder = given.nccl_tests
    if (folder / "src" / "common.mk").exists():
        began = time.monotonic()
        folder = build(folder, given.build, given.only, given.architecture)
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    if given.build_only:
        return
    given.pin = neighbours()
    runs: list[dict[str, dict[str, Rows]]] = []
    left_out: dict[str, str] = {}
    began, longest = time.monotonic(), 0.0
    for number in range(given.repeats):
        start = time.monotonic()
        if start - began + longest > given.seconds:
            left_out[f"repeat {number}"] = f"it would not have ended within {given.seconds:g} s"
            continue
        try:
            runs.append(sample(number, folder, given))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            left_out[f"repeat {number}"] = str(error)[-1000:]
            print(f"repeat {number}: {str(error)[-1000:]}", file=sys.stderr, flush=True)
        longest = max(longest, time.monotonic() - start)
        print(f"repeat {number}: {time.monotonic() - began:.0f} s", flush=True)
        _write(runs, left_out, given)
    _write(runs, left_out, given)
    print(table(_rows(runs, given)), flush=True)


def _write(runs: list[dict[str, dict[str, Rows]]], left_out: dict[str, str], given: Given) -> None:
    """All that is known, into --out."""
    import torch

    document = {
        "command": "python benchmarks/against_nccl_tests.py "
        + " ".join(Path(one).name if one.startswith("/") else one for one in sys.argv[1:]),
        "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, "
        f"{platform.machine()}, {os.cpu_count()} processors, {len(given.pin)} of them used",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "rows": _rows(runs, given),
        "left_out": left_out,
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")


def _rows(runs: list[dict[str, dict[str, Rows]]], given: Given) -> list[dict[str, Any]]:
    return [row for n in given.only for row in compare(n, [one[n] for one in runs], given.layout)]


if __name__ == "__main__":
    main()
