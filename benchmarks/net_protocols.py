"""All-reduces of integers by each protocol of NCCL, compared word for word.

    python benchmarks/net_gpu_checks.py protocols --engines tcp,udp --networks "four paths"

NCCL's LL and LL128 read a buffer while it fills: a line that comes in two parts, or whose flag is
visible before its data, is a wrong sum in silence. So every word of every call is compared. No two
calls have the same numbers, and no two words of a call, so what is left over from before is seen.

A job has one engine and one network, and makes a communicator for each protocol: NCCL reads
NCCL_PROTO whenever it makes one. The calls of the trial that says how many fit count too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import harness
from net_gpu import SOCKETS, USING, VARIANTS, environment

from evener.tools.doctor.nccl import loaded

PROTOCOLS = ("LL", "LL128", "Simple", "auto")
ENGINES = ("tcp", "udp", "sockets", "xdp")
# The lab, and what is done to it. Each unequal path has a queue of its own: one overtakes another.
NETWORKS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "one path": ("2x1@25gbit", []),
    "four paths": ("2x1@25gbit,paths=4", []),
    "unequal paths": (
        "2x1@25gbit,paths=4",
        [("path1", "rate 3gbit"), ("path2", "rate 1gbit"), ("path3", "loss 0.1%")],
    ),
}
SIZES = [1 << 10, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25]


def rank_main(seconds: float) -> None:
    """A rank: every protocol and size, about `seconds` each."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    every = world * (world - 1) // 2 * 104729

    def cell(group: Any, size: int) -> dict[str, Any]:
        words = torch.arange(size // 4, device="cuda", dtype=torch.int32) * 1640531527
        sums, data = words * world, torch.empty_like(words)
        wrong = torch.zeros(2, device="cuda", dtype=torch.long)
        number = 0

        def run(calls: int) -> float:
            nonlocal number
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(number + 1, number + 1 + calls):  # noqa: B020 - goes on counting
                shift = number * 7919
                torch.add(words, shift + rank * 104729, out=data)
                dist.all_reduce(data, group=group)
                data.sub_(world * shift + every)
                bad = (data != sums).sum()
                wrong.add_(torch.stack((bad > 0, bad)))
            torch.cuda.synchronize()
            return time.perf_counter() - began

        run(3)
        # All ranks make as many calls: rank 0 says how many.
        calls = torch.tensor([max(10, min(int(seconds / (run(3) / 3)), 100_000))], device="cuda")
        dist.broadcast(calls, 0)
        took = run(int(calls))
        calls_wrong, words_wrong = wrong.tolist()
        return {
            "calls": number, "wrong_calls": calls_wrong, "wrong_words": words_wrong,
            "MB_s": size * int(calls) / took / 1e6,
        }  # fmt: skip

    nccl = ".".join(map(str, loaded()))
    for name in PROTOCOLS:
        os.environ.pop("NCCL_PROTO", None)
        if name != "auto":
            os.environ["NCCL_PROTO"] = name
        group = dist.new_group(list(range(world)), backend="nccl")
        for size in SIZES:
            harness.say(rank=rank, nccl=nccl, protocol=name, size=size, **cell(group, size))
    dist.destroy_process_group()


def job(engine: str, network: str, seconds: float) -> dict[str, Any]:
    """All protocols and sizes of one engine on one network; of both ranks the worse."""
    own = SOCKETS if engine == "sockets" else {**VARIANTS["evener"], "EVENER_NET_ENGINE": engine}
    found: dict[str, Any] = {"engine": engine, "network": network}

    def hear(_lab: object, _rank: int, line: str) -> None:
        if match := USING.search(line):
            found["via"] = match[1]

    spec, faults = NETWORKS[network]
    argv = [sys.executable, sys.argv[0], "protocols", "--rank", "--seconds", str(seconds)]
    limit = 60 + 3 * seconds * len(SIZES) * len(PROTOCOLS)
    began = time.monotonic()
    done = harness.in_lab(spec, argv, env=environment(own), limit=limit, faults=faults, hear=hear)
    cells = []
    for name in PROTOCOLS:
        for size in SIZES:
            both = [one for one in done.said if (one["protocol"], one["size"]) == (name, size)]
            if len(both) == 2:
                cells.append(max(both, key=lambda one: one["wrong_words"]))
    complete = len(cells) == len(PROTOCOLS) * len(SIZES)
    wrong, calls = (sum(one[name] for one in cells) for name in ("wrong_calls", "calls"))
    print(f"{engine}, {network}: {wrong} of {calls} calls wrong, "
          f"{time.monotonic() - began:.0f} s, via {found.get('via')}"
          + ("" if complete else f", NOT COMPLETE: {done.failed}"), flush=True)  # fmt: skip
    return {**found, "cells": cells, "complete": complete, "failed": done.failed}


def table(jobs: list[dict[str, Any]]) -> str:
    """Wrong of all calls, by engine and protocol; megabytes per second, by job and size."""
    rows = []
    for engine in dict.fromkeys(one["engine"] for one in jobs):
        row = [engine]
        for name in PROTOCOLS:
            cells = [cell for one in jobs if one["engine"] == engine
                     for cell in one["cells"] if cell["protocol"] == name]  # fmt: skip
            wrong, calls = (sum(c[k] for c in cells) for k in ("wrong_calls", "calls"))
            row.append(f"{wrong} of {calls}")
        rows.append(row)
    rates = [
        [one["engine"], one["network"], name]
        + [f"{c['MB_s']:.4g}" for c in one["cells"] if c["protocol"] == name]
        for one in jobs
        for name in PROTOCOLS
    ]
    sizes = [f"{size >> 10} KiB" for size in SIZES]
    return "\n\n".join(
        (
            harness.show(["engine", *PROTOCOLS], rows),
            harness.show(["MB/s", "network", "protocol", *sizes], rates),
        )
    )


def protocols(given: argparse.Namespace) -> dict[str, Any]:
    """Every engine on every network; 1 as the exit status where one of Evener's was not right."""
    jobs: list[dict[str, Any]] = []
    for network in harness.choose(given.networks, list(NETWORKS), "network"):
        for engine in harness.choose(given.engines, ENGINES, "engine"):
            jobs.append(job(engine, network, given.seconds))
            harness.keep(given, found={"jobs": jobs})  # a run may be cut
    own = [one for one in jobs if one["engine"] != "sockets"]
    right = all(one["complete"] for one in own) and not any(
        cell["wrong_words"] for one in own for cell in one["cells"]
    )
    print(table(jobs))
    return {"jobs": jobs, "right": right}
