"""All-reduces of integers by each protocol of NCCL, compared word for word.

NCCL's LL and LL128 read a buffer while it fills: a line that comes in two parts, or whose flag is
visible before its data, is a wrong sum in silence. So every word of every call is compared. No two
calls have the same numbers, and no two words of a call, so what is left over from before is seen.

A job has one engine and one network, and makes a communicator for each protocol: NCCL reads
NCCL_PROTO whenever it makes one. What it chooses by itself, where the protocol is `auto`, is in the
record (`chosen`). Every call counts, those of the trial that says how many fit into the time too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evener.tools.lab import Lab, Spec

PROTOCOLS = ("LL", "LL128", "Simple", "auto")
ENGINES = ("tcp", "udp", "xdp", "sockets")
# The lab, and what is done to it.
NETWORKS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "one path": ("2x1@25gbit", []),
    "four paths": ("2x1@25gbit,paths=4", []),
    # Each has a queue of its own, so what goes by one overtakes what goes by another.
    "unequal paths": (
        "2x1@25gbit,paths=4",
        [("path1", "rate 3gbit"), ("path2", "rate 1gbit"), ("path3", "loss 0.1%")],
    ),
}
SIZES = "1024,8192,16384,32768,65536,131072,524288,2097152,8388608,33554432"

WORKER = """
import glob, json, os, re, sys, time
import torch
import torch.distributed as dist

protocols, sizes, seconds, least = json.loads(sys.argv[1])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
ALL = world * (world - 1) // 2 * 104729
CHOICE = re.compile(
    r"AllReduce: (\\d+) Bytes -> Algo (\\S+) proto (\\S+) channel\\{Lo\\.\\.Hi\\}=\\{([^}]*)\\}"
)
read = {}

def news():
    "What NCCL has written to its file since the last look."
    text = ""
    for name in glob.glob(os.environ["NCCL_DEBUG_FILE"].replace("%p", "*")):
        with open(name, errors="replace") as file:
            file.seek(read.get(name, 0))
            text += file.read()
            read[name] = file.tell()
    return text

def say(**record):
    print("RESULT " + json.dumps({"rank": rank, **record}), flush=True)

def cell(group, size):
    words = torch.arange(size // 4, device="cuda", dtype=torch.int32) * 1640531527
    sums, data = words * world, torch.empty_like(words)
    wrong = torch.zeros(2, device="cuda", dtype=torch.long)
    number = 0
    def call():
        nonlocal number
        number += 1
        shift = number * 7919
        torch.add(words, shift + rank * 104729, out=data)
        dist.all_reduce(data, group=group)
        data.sub_(world * shift + ALL)
        bad = (data != sums).sum()
        wrong.add_(torch.stack((bad > 0, bad)))
    def run(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - began
    run(3)
    each = run(3) / 3
    # All ranks make as many calls: the first says how many.
    key = f"{name} {size}"
    if rank == 0:
        store.set(key, str(max(least, min(int(seconds / each), 100_000))))
    calls = int(store.get(key))
    took = run(calls)
    calls_wrong, words_wrong = wrong.tolist()
    return {
        "calls": number, "wrong_calls": calls_wrong, "wrong_words": words_wrong,
        "seconds": took, "us": took / calls * 1e6, "MB_s": size * calls / took / 1e6,
    }

for name in protocols:
    os.environ.pop("NCCL_PROTO", None)
    if name != "auto":
        os.environ["NCCL_PROTO"] = name
    group = dist.new_group(list(range(world)), backend="nccl")
    for size in sizes:
        found = cell(group, size)
        chosen = sorted({" ".join(m.groups()[1:3]) for m in CHOICE.finditer(news())})
        say(protocol=name, size=size, chosen=chosen, **found)
# The sums of the last buffers are read: nothing is under way.
notes = []
for file in glob.glob(os.environ["NCCL_DEBUG_FILE"].replace("%p", "*")):
    for line in open(file, errors="replace"):
        if "Using network" in line or " WARN " in line or "xdp" in line.lower():
            notes.append(line.strip()[:300])
say(notes=sorted(set(notes))[:12])
dist.destroy_process_group()
"""


def job(
    engine: str,
    network: str,
    given: tuple[list[str], list[int], float, int],
    env: dict[str, str],
    limit: float,
) -> dict[str, Any]:
    """All protocols and sizes of one engine on one network."""
    spec, faults = NETWORKS[network]
    found: dict[str, Any] = {"engine": engine, "network": network, "cells": [], "errors": []}
    worst: dict[tuple[str, int], dict[str, Any]] = {}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        del node
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            if "notes" in result:
                if result["rank"] == 0:
                    found["notes"] = result["notes"]
                return
            key = (result["protocol"], result["size"])
            before = worst.setdefault(key, {**result, "ranks": 0})
            before["ranks"] += 1
            for name in ("wrong_calls", "wrong_words", "seconds", "us"):
                before[name] = max(before[name], result[name])
            before["MB_s"] = min(before["MB_s"], result["MB_s"])
            before["chosen"] = sorted({*before["chosen"], *result["chosen"]})
        elif stream == "stderr" and "Error" in line:
            found["errors"].append(f"rank {rank}: {line.strip()[:300]}")

    began = time.monotonic()
    with Lab(Spec.parse(spec)) as lab:
        for target, action in faults:
            lab.fault(target, action)
        argv = [sys.executable, "-c", WORKER, json.dumps(given)]
        result = lab.launch(argv, env=env, timeout=limit, on_line=on_line)
    for cell in worst.values():
        cell.pop("rank")
        # One that a rank did not end is no result.
        if cell.pop("ranks") == 2:
            found["cells"].append(cell)
    found |= {"status": result.status, "seconds": time.monotonic() - began}
    found["complete"] = len(found["cells"]) == len(given[0]) * len(given[1])
    found["errors"] = found["errors"][:5]
    return found


def show_size(size: int) -> str:
    """As 64 KiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"


def table(jobs: list[dict[str, Any]]) -> str:
    """Wrong of all calls, and megabytes per second, with the comparison in the time."""
    sizes = sorted({cell["size"] for one in jobs for cell in one["cells"]})
    lines = [
        "wrong/calls MB/s",
        "| engine | network | protocol | " + " | ".join(map(show_size, sizes)) + " |",
        "|---|---|---|" + "---:|" * len(sizes),
    ]
    for one in jobs:
        for name in dict.fromkeys(cell["protocol"] for cell in one["cells"]):
            cells = {c["size"]: c for c in one["cells"] if c["protocol"] == name}
            shown = [
                f"{c['wrong_calls']}/{c['calls']} {c['MB_s']:.4g}" if (c := cells.get(size)) else ""
                for size in sizes
            ]
            row = [one["engine"], one["network"], name, *shown]
            lines.append("| " + " | ".join(row) + " |")
    lines += ["", "| engine | protocol | calls | wrong | wrong words |", "|---|---|---:|---:|---:|"]
    for engine, name in sums(jobs):
        calls, wrong, words = sums(jobs)[engine, name]
        lines.append(f"| {engine} | {name} | {calls} | {wrong} | {words} |")
    for one in jobs:
        if not one["complete"]:
            why = f"status {one['status']} {one['errors'][:1]}"
            lines.append(f"{one['engine']}, {one['network']}: not complete, {why}")
    return "\n".join(lines)


def sums(jobs: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Calls, wrong ones and wrong words by engine and protocol."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for one in jobs:
        for cell in one["cells"]:
            key = (one["engine"], cell["protocol"])
            before = found.get(key, (0, 0, 0))
            more = (cell["calls"], cell["wrong_calls"], cell["wrong_words"])
            found[key] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])
    return found


def protocols(
    engines: list[str],
    networks: list[str],
    given: tuple[list[str], list[int], float, int],
    environment: Callable[[dict[str, str]], dict[str, str]],
    sockets: dict[str, str],
    budget: float,
) -> dict[str, Any]:
    """Every engine on every network, as long as the time lasts; what is left out is named."""
    jobs: list[dict[str, Any]] = []
    left_out = []
    began, longest = time.monotonic(), 0.0
    for network in networks:
        for engine in engines:
            passed = time.monotonic() - began
            if passed + longest > budget:
                left_out.append(f"{engine}, {network}")
                continue
            own = sockets if engine == "sockets" else {"EVENER_NET_ENGINE": engine}
            env = environment(
                {
                    "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING",
                    "NCCL_DEBUG_FILE": "/tmp/nccl-%p.log",
                    **own,
                }
            )
            one = job(engine, network, given, env, limit=max(60.0, budget - passed))
            jobs.append(one)
            longest = max(longest, one["seconds"])
            calls = sum(cell["calls"] for cell in one["cells"])
            wrong = sum(cell["wrong_calls"] for cell in one["cells"])
            print(
                f"{engine}, {network}: {wrong} of {calls} calls wrong, {one['seconds']:.0f} s"
                + ("" if one["complete"] else f", NOT COMPLETE {one['errors'][:1]}"),
                flush=True,
            )
    print(table(jobs))
    if left_out:
        print(f"left out, no time (--budget): {'; '.join(left_out)}")
    return {"jobs": jobs, "left_out": left_out, "table": table(jobs)}


def is_right(found: dict[str, Any]) -> bool:
    """Whether all of Evener's calls were right, and all were made."""
    own = [one for one in found["jobs"] if one["engine"] != "sockets"]
    cells = [cell for one in own for cell in one["cells"]]
    return all(one["complete"] for one in own) and not any(c["wrong_words"] for c in cells)


def choose(text: str | None, known: tuple[str, ...], what: str) -> list[str]:
    """Those that are asked for, of those that there are."""
    asked = [one.strip() for one in text.split(",")] if text else list(known)
    for one in asked:
        if one not in known:
            sys.exit(f"error: no {what} {one!r}\n  fix: some of {', '.join(known)}")
    return asked


def show(path: Path) -> str:
    """The table of a record."""
    return str(json.loads(path.read_text())["found"]["table"])
