"""All-reduce through torch and the real NCCL over simulated networks: NCCL's sockets and Evener.

    python benchmarks/net_gpu.py                  # five hash seeds, all networks
    python benchmarks/net_gpu.py --networks four-paths --variants sockets,evener
    python benchmarks/net_gpu.py --slots 1        # on 2 GPUs: nodes of one
    python benchmarks/net_gpu.py --variants evener,other --plugin other=/path/libnccl-net-evener.so
    python benchmarks/net_gpu.py --variants evener,few --plugin few=,EVENER_NET_WORKERS=2
    python benchmarks/net_gpu.py --repeats 3      # all of it three times, in turn

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
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME
from evener.tools.lab import Spec

NETWORKS = {
    "one-path": "2x2@25gbit",
    "slow-path": "2x2@10gbit",
    "fast-path": "2x2@50gbit",
    "three-paths": "2x2@24gbit,paths=3",
    "four-paths": "2x2@25gbit,paths=4",
    "eight-paths": "2x2@25gbit,paths=8",
    "flow-cap": "2x2@25gbit,cap=5gbit",
    "two-nics": "2x2@12.5gbit,nics=2",
    "fastest-path": "2x2@100gbit",
    "uneven-paths": "2x2@120gbit,paths=3",
    "unshaped": "2x2",
    "four-nodes": "4x1@10gbit",
}
FAULTS = {"uneven-paths": [("path2", "rate 1gbit")]}
"""Two paths of 40 Gb/s and one of 1."""
SEEDED = {"three-paths", "four-paths", "eight-paths"}

SOCKETS = {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
THREADS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
VARIANTS = {
    "sockets": SOCKETS,
    "sockets-4x4": {**SOCKETS, **THREADS},
    "evener": {"NCCL_NET": NCCL_NAME, "NCCL_NET_PLUGIN_REF_COUNT": "1"},
    # Its public source, built by whoever has it: --plugin fastsocket-4x4=PATH.
    "fastsocket-4x4": {"NCCL_NET": "FastSocket", **THREADS},
}
SIZES = {1 << 20: 200, 64 << 20: 15, 256 << 20: 8}
"""Bytes and timed steps of each size."""
CHOICE = re.compile(
    r"AllReduce: (\d+) Bytes -> Algo (\S+) proto (\S+) channel\{Lo\.\.Hi\}=\{([^}]*)\}"
)
USING = re.compile(r"Using network (\S+)")
TOOK = re.compile(r"auto: (\S+ to .*)")


def environment(variant: dict[str, str], subsystems: str = "INIT,NET") -> dict[str, str]:
    """What a rank of the real NCCL is told; `variant` names the network, and the plug-in's file
    where it is another build."""
    plugin = {"NCCL_NET_PLUGIN": str(plugin_path())} if variant["NCCL_NET"] == NCCL_NAME else {}
    return {
        **plugin,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": subsystems,
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        **variant,
    }


def rank_main(sizes: list[int]) -> None:
    """A rank: for each size the seconds of each step."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in sizes:
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
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        samples = []
        for _ in range(max(3, min(SIZES.get(size, 8), int(4.0 / float(each))))):
            dist.barrier(device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        harness.say(rank=rank, size=size, samples=samples, cpu_seconds=seconds)
    dist.destroy_process_group()


def measure(
    network: str, spec: str, variant: dict[str, str], sizes: list[int], timeout: float
) -> dict[str, Any]:
    """One job in one lab: per size the samples (the slowest rank's), what NCCL chose, CPU."""
    found: dict[str, Any] = {"network": None, "took": []}
    choices: dict[int, str] = {}

    def hear(_lab: object, rank: int, line: str) -> None:
        if match := CHOICE.search(line):
            choices[int(match[1])] = f"{match[2]} {match[3]} {match[4]}"
        elif match := USING.search(line):
            found["network"] = match[1]
        elif match := TOOK.search(line):
            found["took"].append(f"rank {rank}: {match[1].strip()[:200]}")

    argv = [sys.executable, __file__, "--rank", json.dumps(sizes)]
    env = environment(variant, "INIT,NET,TUNING")
    faults = FAULTS.get(network, [])
    job = harness.in_lab(spec, argv, env=env, limit=timeout, faults=faults, hear=hear)
    rows = {}
    for size in sizes:
        ranks = [one for one in job.said if one["size"] == size]
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
            "choice": choices.get(size),
        }
    return {**found, "status": job.status, "errors": job.errors, "sizes": rows}


def spread(values: list[float]) -> str:
    """The median; of several the range too."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.2f}-{max(values):.2f}]"


def table(cells: list[dict[str, Any]], sizes: list[int]) -> str:
    """A row a network, seed and variant, in the order of the first of each kind."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        kinds.setdefault((cell["spec"], cell["variant"]), []).append(cell)
    rows = []
    for (spec, variant), same in kinds.items():
        row = [spec, variant]
        for size in map(str, sizes):
            done = [one["sizes"][size] for one in same if size in one["sizes"]]
            if len(done) < len(same):
                bad = next(one for one in same if size not in one["sizes"])
                why = (bad["errors"] or [f"status {bad['status']}"])[0][:60]
                row += [f"{len(same) - len(done)} of {len(same)} failed", why]
            else:
                ms = statistics.median(one["median_s"] for one in done) * 1e3
                row += [f"{spread([one['algbw_GBps'] for one in done])} ({ms:.2f})"]
                row += [done[0]["choice"] or "?"]
        last = [one["sizes"].get(str(sizes[-1])) for one in same]
        rows.append([*row, spread([one["cpu_s_per_GB"] for one in last if one]) if any(last)
                     else ""])  # fmt: skip
    heads = ["network", "transport"]
    for bytes_ in sizes:
        heads += [f"{bytes_ >> 20} MiB GB/s (ms)", "chosen"]
    return harness.show([*heads, "CPU s/GB"], rows)


def plan(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(network, lab) of all jobs of a variant, in turn."""
    for _ in range(given.repeats):
        for network in given.networks.split(","):
            for seed in range(1, given.seeds + 1):
                if seed == 1 or network in SEEDED:
                    spec = NETWORKS[network].replace("2x2", f"2x{given.slots}")
                    yield network, spec + (f",seed={seed}" if seed > 1 else "")


def main() -> None:
    """All cells, a table."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(json.loads(sys.argv[2]))
        return
    parser = harness.arguments(__doc__, json="net-gpu.json")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument(
        "--variants", default="sockets,sockets-4x4,evener", help=", ".join(VARIANTS)
    )
    parser.add_argument("--seeds", type=int, default=5, help="1 to so many")
    parser.add_argument("--repeats", type=int, default=1, help="jobs of each kind, in turn")
    parser.add_argument("--sizes", default="1,64,256", help="MiB, separated by commas")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a job")
    parser.add_argument("--algo", help="fix NCCL_ALGO for all, for instance Ring")
    parser.add_argument("--slots", type=int, choices=(1, 2), default=2, help="GPUs a node")
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="NAME=FILE[,VARIABLE=VALUE...]",
        help="another build of the plug-in, or one with settings, as a variant NAME",
    )  # fmt: skip
    given = parser.parse_args()
    sizes = [int(size) << 20 for size in given.sizes.split(",")]
    for one in given.plugin:
        name, _, rest = one.partition("=")
        build, *pairs = rest.split(",")
        VARIANTS[name] = {
            **VARIANTS.get(name, VARIANTS["evener"]),
            **({"NCCL_NET_PLUGIN": str(Path(build).resolve())} if build else {}),
            **dict(pair.split("=", 1) for pair in pairs),
        }
    algorithm = {"NCCL_ALGO": given.algo} if given.algo else {}
    cells: list[dict[str, Any]] = []
    for network, spec in plan(given):
        for name in given.variants.split(","):
            began = time.time()
            try:
                cell = measure(network, spec, {**VARIANTS[name], **algorithm}, sizes, given.timeout)
            except Exception as error:  # noqa: BLE001 - one cell must not end the table
                cell = {"status": -1, "errors": [repr(error)], "network": None, "sizes": {}}
            cells.append({"name": network, "spec": spec, "variant": name, **cell})
            shown = {size: round(one["algbw_GBps"], 2) for size, one in cell["sizes"].items()}
            print(f"{spec} {name}: {shown} GB/s via {cell['network']} "
                  f"({time.time() - began:.1f} s) {cell['errors'][:2]}", flush=True)  # fmt: skip
            harness.keep(given, cells=cells)
    print("\n" + table(cells, sizes))


if __name__ == "__main__":
    main()
