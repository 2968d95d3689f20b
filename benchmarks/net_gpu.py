"""All-reduce through torch and the real NCCL over simulated networks: NCCL's sockets and Evener.

    python benchmarks/net_gpu.py --quick          # one hash seed, about four minutes on 4 GPUs
    python benchmarks/net_gpu.py                  # five hash seeds, all networks
    python benchmarks/net_gpu.py --networks four-paths --variants sockets,evener
    python benchmarks/net_gpu.py --slots 1        # on 2 GPUs: nodes of one
    python benchmarks/net_gpu.py --variants evener,other --plugin other=/path/libnccl-net-evener.so
    python benchmarks/net_gpu.py --variants evener,few --plugin few=,EVENER_NET_WORKERS=2
    python benchmarks/net_gpu.py --quick --repeats 3   # all of it three times, in turn

Needs 4 GPUs (2 with --slots 1; four-nodes always 4; with fewer nodes share them, which needs
NVIDIA's MPS to say anything: docs/guide/lab.md), the rights that `evener lab` needs, and the
plug-in (`make setup`). Each cell is a job of its own in a lab of its own; one table at the end, all
samples in --json. A cell that fails says why and the rest goes on. Two jobs of one kind can differ
by a fifth, so --repeats runs all of them again; the table then has the median job and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path

from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME
from evener.tools.lab import Lab, Spec

NETWORKS = {
    "one-path": "2x2@25gbit",
    "slow-path": "2x2@10gbit",
    "fast-path": "2x2@50gbit",
    "three-paths": "2x2@24gbit,paths=3",
    "four-paths": "2x2@25gbit,paths=4",
    "eight-paths": "2x2@25gbit,paths=8",
    "flow-cap": "2x2@25gbit,cap=5gbit",
    "two-nics": "2x2@12.5gbit,nics=2",
    "unshaped": "2x2",
    "four-nodes": "4x1@10gbit",
}
SEEDED = {"three-paths", "four-paths", "eight-paths"}

SOCKETS = {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
VARIANTS = {
    "sockets": SOCKETS,
    "sockets-4x4": {**SOCKETS, "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    "evener": {"NCCL_NET": NCCL_NAME, "NCCL_NET_PLUGIN_REF_COUNT": "1"},
    # Its public source, built by whoever has it: --fastsocket PATH.
    "fastsocket-4x4": {
        "NCCL_NET": "FastSocket",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
}
DEFAULT_VARIANTS = "sockets,sockets-4x4,evener"

# Bytes and timed steps of each size.
SIZES = {1 << 20: 200, 64 << 20: 15, 256 << 20: 8}

WORKER = """
import json, os, resource, sys, time
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
for size, steps in json.loads(sys.argv[1]):
    data = torch.full((size // 4,), float(rank + 1), device="cuda")
    dist.all_reduce(data)
    want = world * (world + 1) / 2
    assert bool((data == want).all()), f"{size}: a sum is wrong"
    data.fill_(0.0)
    began = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    # All ranks take the same number of steps: rank 0's trial decides.
    each = torch.tensor([(time.perf_counter() - began) / 3], device="cuda")
    dist.broadcast(each, 0)
    steps = max(3, min(steps, int(4.0 / float(each))))
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    samples = []
    for _ in range(steps):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(data)
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    record = {"rank": rank, "size": size, "samples": samples, "cpu_seconds": seconds}
    print("RESULT " + json.dumps(record), flush=True)
dist.destroy_process_group()
"""

CHOICE = re.compile(
    r"AllReduce: (\d+) Bytes -> Algo (\S+) proto (\S+) channel\{Lo\.\.Hi\}=\{([^}]*)\}"
)
USING = re.compile(r"Using network (\S+)")
TOOK = re.compile(r"auto: (\S+ to .*)")


def measure(spec: str, variant: dict[str, str], sizes: list[int], timeout: float) -> dict:
    """One job in one lab: per size the samples (the slowest rank's), what NCCL chose, CPU."""
    found: dict = {"network": None, "choices": {}, "ranks": [], "errors": [], "took": []}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        del node
        if line.startswith("RESULT "):
            found["ranks"].append(json.loads(line.removeprefix("RESULT ")))
        elif match := CHOICE.search(line):
            found["choices"][int(match[1])] = f"{match[2]} {match[3]} {match[4]}"
        elif match := USING.search(line):
            found["network"] = match[1]
        elif match := TOOK.search(line):
            found["took"].append(f"rank {rank}: {match[1].strip()[:200]}")
        elif (stream == "stderr" and "Error" in line) or "WARN" in line:
            found["errors"].append(f"rank {rank}: {line.strip()[:300]}")

    env = {
        **variant,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
    }
    steps = json.dumps([[size, SIZES[size]] for size in sizes])
    with Lab(Spec.parse(spec)) as lab:
        argv = [sys.executable, "-c", WORKER, steps]
        result = lab.launch(argv, env=env, timeout=timeout, on_line=on_line)
    found["status"] = result.status
    rows = {}
    for size in sizes:
        ranks = [one for one in found["ranks"] if one["size"] == size]
        if not ranks or len(ranks) != Spec.parse(spec).world_size:
            continue
        slowest = [max(step) for step in zip(*(one["samples"] for one in ranks), strict=True)]
        median = statistics.median(slowest)
        moved = size * len(slowest) / 1e9
        rows[str(size)] = {
            "median_s": median,
            "algbw_GBps": size / median / 1e9,
            "samples_s": slowest,
            "cpu_s_per_GB": sum(one["cpu_seconds"] for one in ranks) / moved,
            "choice": found["choices"].get(size),
        }
    del found["ranks"], found["choices"]
    return {**found, "sizes": rows}


def machine() -> dict:
    """What this ran on."""
    import torch

    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
    }


def jobs(cells: list[dict]) -> list[list[dict]]:
    """The cells by network, seed and variant, in the order of the first of each kind."""
    kinds: dict[tuple[str, str], list[dict]] = {}
    for cell in cells:
        kinds.setdefault((cell["spec"], cell["variant"]), []).append(cell)
    return list(kinds.values())


def spread(values: list[float]) -> str:
    """The median; of several the range too."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.2f}-{max(values):.2f}]"


def table(cells: list[dict], sizes: list[int]) -> str:
    """Markdown: a row a network and variant, a column a size."""
    heads = [f"{size >> 20} MiB" for size in sizes]
    lines = [
        "| network | transport | "
        + " | ".join(f"{head} GB/s (ms) | chosen" for head in heads)
        + " | CPU s/GB |",
        "|---" * (2 + 2 * len(sizes) + 1) + "|",
    ]
    for same in jobs(cells):
        cell = same[0]
        row = [cell["spec"], cell["variant"]]
        for size in sizes:
            done = [one["sizes"][str(size)] for one in same if str(size) in one["sizes"]]
            if len(done) < len(same):
                bad = next(one for one in same if str(size) not in one["sizes"])
                why = (bad["errors"] or [f"status {bad['status']}"])[0][:60]
                row += [f"{len(same) - len(done)} of {len(same)} failed", why]
            else:
                milliseconds = statistics.median(one["median_s"] for one in done) * 1e3
                row.append(f"{spread([one['algbw_GBps'] for one in done])} ({milliseconds:.2f})")
                row.append(done[0]["choice"] or "?")
        last = [one["sizes"].get(str(sizes[-1])) for one in same]
        row.append(spread([one["cpu_s_per_GB"] for one in last if one]) if any(last) else "")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one hash seed, no 64 MiB")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help=", ".join(VARIANTS))
    parser.add_argument("--fastsocket", type=Path, help="libnccl-net.so of fastsocket")
    parser.add_argument("--seeds", type=int, default=5, help="1 to so many")
    parser.add_argument("--only-seed", type=int, help="this one alone")
    parser.add_argument("--repeats", type=int, default=1, help="jobs of each kind, in turn")
    parser.add_argument("--sizes", help="MiB, separated by commas: 1,64,256")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a job")
    parser.add_argument("--algo", help="fix NCCL_ALGO for all, for instance Ring")
    parser.add_argument("--slots", type=int, choices=(1, 2), default=2, help="GPUs a node")
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="NAME=FILE[,VARIABLE=VALUE...]",
        help="another build of the plug-in, or one with settings, as a variant NAME",
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/net-gpu.json"))
    options = parser.parse_args()
    sizes = [size for size in SIZES if not (options.quick and size == 64 << 20)]
    if options.sizes:
        sizes = [int(size) << 20 for size in options.sizes.split(",")]
    seeds = 1 if options.quick else options.seeds
    for one in options.plugin:
        name, _, rest = one.partition("=")
        build, *pairs = rest.split(",")
        own = {"NCCL_NET_PLUGIN": str(Path(build).resolve())} if build else {}
        VARIANTS[name] = {
            **VARIANTS["evener"],
            **own,
            **dict(pair.split("=", 1) for pair in pairs),
        }
    cells = []
    began = time.time()
    plan = [
        (network, seed)
        for _ in range(options.repeats)
        for network in options.networks.split(",")
        for seed in ([options.only_seed] if options.only_seed else range(1, seeds + 1))
        if seed == 1 or network in SEEDED or options.only_seed
    ]
    for network, seed in plan:
        spec = NETWORKS[network].replace("2x2", f"2x{options.slots}")
        spec += f",seed={seed}" if seed > 1 else ""
        for name in options.variants.split(","):
            variant = dict(VARIANTS[name])
            if variant["NCCL_NET"] == NCCL_NAME:
                variant.setdefault("NCCL_NET_PLUGIN", str(plugin_path()))
            if name.startswith("fastsocket"):
                variant["NCCL_NET_PLUGIN"] = str(options.fastsocket.resolve())
            if options.algo:
                variant["NCCL_ALGO"] = options.algo
            started = time.time()
            try:
                cell = measure(spec, variant, sizes, options.timeout)
            except Exception as error:  # noqa: BLE001 - one cell must not end the table
                cell = {"status": -1, "errors": [repr(error)], "network": None, "sizes": {}}
            cells.append({"name": network, "spec": spec, "variant": name, **cell})
            shown = {size: round(one["algbw_GBps"], 2) for size, one in cell["sizes"].items()}
            print(
                f"{time.time() - began:6.1f}s {spec} {name}: {shown} GB/s via "
                f"{cell['network']} ({time.time() - started:.1f} s) {cell['errors'][:2]}",
                flush=True,
            )
            record = {
                "command": " ".join(["python", "benchmarks/net_gpu.py", *sys.argv[1:]]),
                "machine": machine(),
                "cells": cells,
            }
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print()
    print(table(cells, sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
