"""Logs of real NCCL runs on this machine's GPUs, for reading by `evener analyze`.

    python benchmarks/nccl_runs.py --out DIR [--only sockets,evener]

Each run is a folder: NCCL's log of every process, the benchmark's table, topology and graph XML,
`nvidia-smi topo -m`, and the analysis of them (analysis.txt, analysis.json). The hosts are nodes of
a lab (`evener lab`), so names and addresses in the logs are the lab's; folders of this machine are
cut out of paths. tests/analyze/runs holds the ones that were kept.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME
from evener.tools.lab import Lab, Spec

SOCKETS = {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
EVENER = {"NCCL_NET": NCCL_NAME, "NCCL_NET_PLUGIN_REF_COUNT": "1"}
# name: (lab, variables, arguments; -g 4 means one process with all GPUs)
RUNS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "sockets": ("2x2@25gbit", SOCKETS, []),
    "evener": ("2x2@25gbit,paths=4", EVENER, []),
    "two-nics": ("2x2@12.5gbit,nics=2", {**SOCKETS, "NCCL_CROSS_NIC": "0"}, []),
    "one-host": ("1x4", SOCKETS, ["-g", "4"]),
}
DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV,TUNING",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
}
# A folder of this machine before a file's name: `/opt/x/libnccl.so` becomes `libnccl.so`.
_FOLDERS = re.compile(r"(?<![\w:.])/(?:[\w.+-]+/)+(?=[\w.+-])")


def scrub(text: str) -> str:
    """Without this machine's folders and the hash of its name; what the kernel has (/sys, /proc,
    /dev) is part of a log."""
    text = re.sub(r'host_hash="0x[0-9a-f]+"', 'host_hash="0x1"', text)
    return _FOLDERS.sub(
        lambda found: found[0] if found[0].startswith(("/sys/", "/proc/", "/dev/")) else "", text
    )


def make(name: str, out: Path, timeout: float) -> str:
    """One run and its analysis; a line on how it went."""
    spec, variables, arguments = RUNS[name]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        **DEBUG,
        **variables,
        "NCCL_DEBUG_FILE": str(folder.resolve() / "nccl.%h.%p.log"),
        "NCCL_TOPO_DUMP_FILE": str(folder.resolve() / "topo.xml"),
        "NCCL_GRAPH_DUMP_FILE": str(folder.resolve() / "graph.xml"),
    }
    if name == "evener":
        env["NCCL_NET_PLUGIN"] = str(plugin_path())
    size = ["-b", "1K", "-e", "64M", "-f", "16", "-n", "5"]
    command = [sys.executable, "-m", "evener", "bench", "all_reduce", *size, *arguments]
    table: list[str] = []
    errors: list[str] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        if stream == "stdout" and rank == 0:
            table.append(line.rstrip("\n"))
        elif stream == "stderr":
            errors.append(f"rank {rank}@{node}: {line.strip()}")

    with Lab(Spec.parse(spec), keep=[folder.resolve()]) as lab:
        if arguments:
            done = lab.nodes[0].run(command, env=env, timeout=timeout)
            status = done.returncode
            table, errors = done.stdout.splitlines(), done.stderr.splitlines()
        else:
            result = lab.launch(command, env=env, timeout=timeout, on_line=on_line)
            status = result.status
    (folder / "bench.txt").write_text("\n".join(table) + "\n")
    if shutil.which("nvidia-smi"):
        topo = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        (folder / "topo.txt").write_text(topo.stdout)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".log", ".txt", ".xml"))
    files = [path for path in files if not path.name.startswith("analysis")]
    for path in files:
        path.write_text(scrub(path.read_text(errors="replace")))
    told = f"status {status}" + (f"; {errors[-1][:300]}" if status and errors else "")
    analysis = subprocess.run(
        [sys.executable, "-m", "evener", "analyze", *map(str, files),
         "--json", str(folder / "analysis.json")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    text = scrub(analysis.stdout + analysis.stderr)
    (folder / "analysis.txt").write_text(text)
    if (folder / "analysis.json").exists():
        found = json.loads((folder / "analysis.json").read_text())
        (folder / "analysis.json").write_text(scrub(json.dumps(found, indent=1)) + "\n")
        lines = found["lines"]
        told += (
            f"; {len(files)} files, {lines['total']} lines, {lines['unknown']} unknown; "
            f"findings: {', '.join(one['id'] for one in found['findings']) or 'none'}"
        )
    return f"{told}; analyze ended with {analysis.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--timeout", type=float, default=40, help="seconds a run")
    given = parser.parse_args()
    good = True
    for name in given.only.split(","):
        began = time.monotonic()
        try:
            told = make(name, given.out, given.timeout)
        except Exception as error:  # noqa: BLE001 - one run must not end the others
            told = f"failed: {error!r}"
        good = good and told.startswith("status 0")
        print(f"{name}: {told} ({time.monotonic() - began:.1f} s)", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
