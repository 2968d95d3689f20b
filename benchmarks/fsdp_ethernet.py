"""FSDP2 over all ranks on Ethernet: NVLink, NCCL's sockets, and Evener's forms, in one run.

    python benchmarks/fsdp_ethernet.py --json benchmarks/results/fsdp-ethernet.json
    python benchmarks/fsdp_ethernet.py --size tiny --link 1gbit --profile ""    # on a CPU

Two ranks train the GPT of hsdp.py: over NVLink as one host, then as two simulated nodes, plain over
NCCL's sockets and under Evener in each column (a form, with its mirror's place behind a colon:
`int8:gpu`), each in processes of its own; `--ways zero3,zero++` are DeepSpeed's (fsdp_peers.py).
Steps of one micro-batch, and of several of which the last one alone reduces its gradients
(`set_requires_gradient_sync`), as Accelerate does it. `--profile`: the column whose step is laid
open, by stream: busy time, its longest kernels, and where the computing stream waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import fsdp_peers
import harness
import hsdp
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SOCKETS = {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
ONE_HOST = {"NCCL_HOSTID": "one"}
COLUMNS = "exact,int8,int8:gpu,int4"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--size", choices=hsdp.SIZES, default="0.7b")
    parser.add_argument("--link", default="25gbit")
    parser.add_argument("--columns", default=COLUMNS)
    parser.add_argument("--passes", default="1,4", help="micro-batches of a step")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--profile", default="int8")
    parser.add_argument("--spec", default="2x1", help="nodes x ranks")
    parser.add_argument("--ways", default="nvlink,sockets,evener")
    parser.add_argument("--limit", type=float, default=140)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args)
        return
    rows: dict[str, Any] = {}
    laid_open: list[str] = []

    def heard(found: dict[str, Any]) -> None:
        if found["rank"] == 0:
            rows[found["name"]] = found
            laid_open.extend(found.pop("profile"))
            print(found["name"], json.dumps(found["passes"]), flush=True)

    words = harness.arguments_of(args, "size", "passes", "warmup", "steps", "profile")
    node, count = f"{args.spec}@{args.link}", len(args.ways)
    began, nodes = time.monotonic(), [int(part) for part in args.spec.split("x")]
    jobs = [
        (way, job)
        for way in args.ways.split(",")
        for job in (args.columns.split(",") if way == "evener" else [way])
    ]
    for way, name in jobs:
        argv = [*words, "--job", name]
        left = max(1.0, args.limit - (time.monotonic() - began))
        if way == "nvlink":
            count = nodes[0] * nodes[1]
            done = harness.ranks(*argv, count=count, env=ONE_HOST, limit=left, heard=heard)
        else:
            script = [sys.executable, str(Path(__file__).resolve()), *argv]
            env = {} if way == "evener" else SOCKETS
            done = harness.in_lab(node, script, env=env, limit=left, heard=heard, hear=_hear)
        if done.status:
            print(f"{name}: {done.failed or done.errors[-3:]}", flush=True)
        print(f"({name}: {time.monotonic() - began:.0f} s gone)", flush=True)
    show(args, rows)
    print("\n".join(laid_open))
    harness.keep(args, rows=rows, profile=laid_open)


def _hear(_lab: Any, rank: int, line: str) -> None:
    if rank == 0:
        print(line.rstrip(), flush=True)


def show(args: argparse.Namespace, rows: dict[str, Any]) -> None:
    """Tokens per second and rank, their share of NVLink's, bytes of a node's card."""
    for passes in args.passes.split(","):
        table, base = [], rows.get("nvlink", {"passes": {}})["passes"].get(passes)
        for name, row in rows.items():
            if (one := row["passes"].get(passes)) is None:
                continue
            share = one["tokens_per_second"] / base["tokens_per_second"] if base else 0.0
            table.append(
                (name, one["median_ms"], one["tokens_per_second"], share, one["node_sent_mb"],
                 one["loss"], one["peak_gb"])
            )  # fmt: skip
        heads = ["", "step ms", "tokens/s per rank", "x NVLink", "MB sent", "loss", "peak GB"]
        print(f"{passes} micro-batches per step")
        print(harness.show(heads, table))


# --- one job's ranks ---


def job(args: argparse.Namespace) -> None:
    """Train a column, and say what its steps took."""
    device, name = harness.join(), args.job
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    peer = name in fsdp_peers.WAYS
    plain = name in ("nvlink", "sockets")
    form, _, mirror = name.partition(":")
    how = argparse.Namespace(size=args.size, sharded=True, mirror=mirror or "host", passes=1)
    column: hsdp.Column
    if peer:
        column = fsdp_peers.DeepSpeedColumn(name, how, device)
    else:
        column = hsdp.Column("fsdp2" if plain else form, how, mesh, device)
    found: dict[str, Any] = {}
    for passes in "1" if peer else args.passes.split(","):
        column.passes, column.late = int(passes), int(passes) > 1
        found[passes] = measure(column, args)
    text = lay_open(column, name) if name == args.profile and device.type == "cuda" else []
    harness.say(rank=dist.get_rank(), name=name, passes=found, profile=text)
    if not (plain or peer):
        hsdp.evener.fsdp.release(column.model)
    dist.destroy_process_group()


def measure(column: hsdp.Column, args: argparse.Namespace) -> dict[str, Any]:
    """Median step of `--steps`, each timed alone."""
    on_gpu = column.device.type == "cuda"
    for _ in range(args.warmup):
        column.step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    column.took, column.sent = [], []
    for _ in range(args.steps):
        column.timed(1)
    median = statistics.median(column.took)
    tokens = column.passes * column.rows * column.length
    return {
        "step_ms": column.took,
        "median_ms": median,
        "tokens_per_second": tokens / median * 1e3,
        "node_sent_mb": statistics.median(column.sent),
        "loss": column.loss,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }


def lay_open(column: hsdp.Column, name: str) -> list[str]:
    """Where one step of one micro-batch spends its time, by stream of this rank's GPU."""
    column.passes, column.late = 1, False
    for _ in range(2):
        column.step()
    harness.settle()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        column.step()
        harness.settle()
        took = 1e3 * (time.perf_counter() - began)
    spans: dict[int, list[tuple[float, float, str]]] = {}
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            span = (event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name()[:60])
            spans.setdefault(event.device_resource_id(), []).append(span)
    if not spans:
        return [f"{name}: the profiler saw nothing on the GPU"]
    start = min(span[0] for each in spans.values() for span in each)
    lines = [f"{name}: a step of {took:.0f} ms under the profiler, rank {dist.get_rank()}"]
    for stream, each in sorted(spans.items(), key=lambda item: -sum(s[1] for s in item[1])):
        each.sort()
        by_name: dict[str, list[float]] = {}
        for _, ms, kernel in each:
            by_name.setdefault(kernel, []).append(ms)
        busy, first = sum(s[1] for s in each), each[0][0] - start
        lines.append(
            f" stream {stream}: busy {busy:.1f} ms, {len(each)} kernels, from {first:.1f} to "
            f"{each[-1][0] + each[-1][1] - start:.1f} ms"
        )
        for kernel, all_ms in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:8]:
            lines.append(f"   {sum(all_ms):8.1f} ms  {len(all_ms):4d} x  {kernel}")
    computing = max(spans.values(), key=len)
    gaps = []
    for (at, ms, _), (after, _, kernel) in itertools.pairwise(computing):
        gaps.append((after - at - ms, after - start, kernel))
    lines.append(
        f" the computing stream stands still for {sum(max(0, g[0]) for g in gaps):.1f} ms:"
    )
    for gap, at, kernel in sorted(gaps, reverse=True)[:24]:
        lines.append(f"   {gap:8.2f} ms until {at:8.1f} ms, then {kernel}")
    return lines


if __name__ == "__main__":
    main()
