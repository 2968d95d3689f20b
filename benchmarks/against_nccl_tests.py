"""`evener bench` beside nccl-tests' own binaries, on the same GPUs, one after the other.

    python benchmarks/against_nccl_tests.py --nccl-tests DIR -g 4 [--out results.json]

DIR holds nccl-tests, from its public repository: its source, which is built here first (nvcc, and
the NCCL that torch loads, so that both programs use one library), or binaries built before. Runs
are interleaved, --repeats of each, in one sweep of sizes from 8 bytes to 1 GiB. Compared are the
medians: time up to 64 KiB (to be within 10%), bus bandwidth from 1 MiB (within 3%).
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
SMALL, LARGE = 64 << 10, 1 << 20
TARGETS = {"time_us": 0.10, "busbw": 0.03}


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


def run(command: list[str], limit: float) -> dict[int, dict[str, tuple[float, float]]]:
    """Size to (time us, bus bandwidth GB/s) of each side."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment())
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1500:]}"
            f"{done.stderr[-1500:]}"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(done.stdout)
        file.flush()
        found = picture(collect([Path(file.name)])).bandwidth
    if found is None:
        raise RuntimeError(f"{' '.join(command)} printed no table")
    rows: dict[int, dict[str, tuple[float, float]]] = {}
    for row, _ in found.table.rows:
        for side, one in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
            if one:
                rows.setdefault(row.size, {})[side] = (one.time_us, one.busbw)
    return rows


def compare(name: str, folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One collective: a row a size and side, with both programs' samples and their ratio."""
    options = [
        "-b", given.smallest, "-e", given.largest, "-f", "4", *given.layout.split(),
        "-n", str(given.iterations), "-w", "5", "-c", "0",
    ]  # fmt: skip
    programs = {
        "nccl_tests": [str(folder / f"{name}_perf"), *options],
        "evener": [sys.executable, "-m", "evener", "bench", name, *options],
    }
    runs: dict[str, list[dict[int, dict[str, tuple[float, float]]]]] = {p: [] for p in programs}
    for number in range(given.repeats):
        # In turns, so that neither program always runs first.
        order = list(programs.items())[:: 1 if number % 2 == 0 else -1]
        for program, command in order:
            runs[program].append(run(command, given.limit))
    rows = []
    for size in sorted(set(runs["nccl_tests"][0]) & set(runs["evener"][0])):
        for side in ("out_of_place", "in_place"):
            if any(side not in found.get(size, {}) for each in runs.values() for found in each):
                continue
            index, what = (0, "time_us") if size <= SMALL else (1, "busbw")
            samples = {p: [found[size][side][index] for found in each] for p, each in runs.items()}
            middle = {p: median(values) for p, values in samples.items()}
            ratio = middle["evener"] / middle["nccl_tests"] if middle["nccl_tests"] else None
            compared = size <= SMALL or size >= LARGE
            rows.append(
                {
                    "collective": name,
                    "layout": given.layout,
                    "size": size,
                    "side": side,
                    "what": what,
                    **samples,
                    "ratio": ratio,
                    "within": abs(ratio - 1) <= TARGETS[what] if ratio and compared else None,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row."""
    lines = [f"{'collective':<16}{'size':>12} {'side':<13}{'what':<8}{'nccl-tests':>11}"
             f"{'evener':>11}{'ratio':>7}"]  # fmt: skip
    for row in rows:
        mark = {True: "", False: "  beyond", None: ""}[row["within"]]
        lines.append(
            f"{row['collective']:<16}{row['size']:>12} {row['side']:<13}{row['what']:<8}"
            f"{median(row['nccl_tests']):>11.2f}{median(row['evener']):>11.2f}"
            f"{row['ratio'] or 0:>7.3f}{mark}"
        )
    counted = [row for row in rows if row["within"] is not None]
    inside = sum(row["within"] for row in counted)
    lines.append(f"{inside} of {len(counted)} rows within 10% of time or 3% of bus bandwidth")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nccl-tests", type=Path, required=True, help="source, or *_perf")
    parser.add_argument("--build", type=Path, default=Path("nccl-tests-build"), help="built there")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--architecture", default="90", help="of the GPUs: 80, 90, 100")
    parser.add_argument("--layout", default="-g 4", help="'-g 4': one thread; '-t 4': four")
    parser.add_argument("--smallest", default="8")
    parser.add_argument("--largest", default="1G")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds of one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no collective after them")
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

    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    began = time.monotonic()
    for name in given.only:
        if time.monotonic() - began > given.seconds:
            left_out[name] = f"the {given.seconds:g} s were over"
            continue
        try:
            rows += compare(name, folder, given)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            left_out[name] = str(error)[-1000:]
            print(f"{name}: {left_out[name]}", file=sys.stderr, flush=True)
        document = {
            "command": "python benchmarks/against_nccl_tests.py " + " ".join(sys.argv[1:]),
            "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, "
            f"{platform.machine()}, {os.cpu_count()} processors",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "rows": rows,
            "left_out": left_out,
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
