"""What the plug-in does under the real NCCL beside speed, on 2 GPUs as two nodes.

    python benchmarks/net_gpu_checks.py versions   # NCCL takes each interface that it knows
                    # (another NCCL than torch's: LD_PRELOAD=.../libnccl.so.2)
    python benchmarks/net_gpu_checks.py comms      # 50 communicators made and destroyed
    python benchmarks/net_gpu_checks.py protocols  # LL, LL128, Simple, NCCL's choice, word for word

Every sum is compared with what it must be.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import harness
import net_protocols
from harness.records import RESULTS
from net_elf import hide
from net_gpu import USING, VARIANTS, environment

from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME
from evener.tools.doctor.nccl import loaded

VERSIONS = range(6, 13)
LOADED = re.compile(r"Loaded net plugin (\S+) \((v\d+)\)")


def rank_main(what: str, count: int) -> None:
    """A rank of `versions` or `comms`."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    def right(elements: int, group: Any = None) -> bool:
        data = torch.full((elements,), float(rank + 1), device="cuda")
        dist.all_reduce(data, group=group)
        torch.cuda.synchronize()
        return bool((data == world * (world + 1) / 2).all())

    if what == "versions":
        harness.say(
            rank=rank,
            right=right(2) and right(1 << 22),
            nccl=".".join(map(str, loaded())),
        )
    else:
        seen = []
        for number in range(count):
            group = dist.new_group(list(range(world)), backend="nccl")
            assert right(1 << 16, group)
            dist.destroy_process_group(group)
            if number % 5 == 4:
                seen.append(counts())
        harness.say(rank=rank, seen=seen)
    dist.destroy_process_group()


def counts() -> dict[str, int]:
    """What this process has: descriptors by kind, threads, memory."""
    status = Path("/proc/self/status").read_text()
    found = {
        name: int(status.partition(f"{field}:")[2].split()[0])
        for name, field in (("threads", "Threads"), ("rss_kb", "VmRSS"))
    }
    for link in Path("/proc/self/fd").iterdir():
        found["fds"] = found.get("fds", 0) + 1
        try:  # socket:[1], anon_inode:[eventfd], /dev/shm/nccl-x, /dev/nvidia0, pipe:[2], a file
            name = str(link.readlink())
        except OSError:
            name = "gone"
        starts = ("socket:", "pipe:", "/dev/shm", "/dev/nvidia", "/memfd:", "/dev/")
        kind = next((start for start in starts if name.startswith(start)), "file")
        kind = "fd " + (name if name.startswith("anon_inode:") else kind)
        found[kind] = found.get(kind, 0) + 1
    return found


def run(what: str, env: dict[str, str], *, count: int = 0, timeout: float = 60) -> dict[str, Any]:
    """One job in one lab: what its ranks said, what NCCL loaded, what went wrong."""
    found: dict[str, Any] = {"spec": "2x1", "loaded": None, "network": None}

    def hear(_lab: object, _rank: int, line: str) -> None:
        if match := LOADED.search(line):
            found["loaded"] = match[2]
        elif match := USING.search(line):
            found["network"] = match[1]

    argv = [sys.executable, __file__, what, "--rank", "--count", str(count)]
    job = harness.in_lab("2x1", argv, env=environment(env), limit=timeout, hear=hear)
    return {**found, "results": job.said, "errors": job.errors[:5], "status": job.status}


def versions() -> dict[str, Any]:
    """NCCL must take the newest interface that both know."""
    rows = {}
    # Not below /tmp: every node has a /tmp of its own.
    folder = plugin_path().parent
    for version in VERSIONS:
        copy = folder / f"libnccl-net-evener-v{version}.so"
        newer = [f"ncclNetPlugin_v{one}" for one in VERSIONS if one > version]
        try:
            hidden = hide(plugin_path(), copy, newer)
            env = {**VARIANTS["evener"], "NCCL_NET_PLUGIN": str(copy)}
            one = run("versions", env, timeout=40)
        finally:
            copy.unlink(missing_ok=True)
        right = [result["right"] for result in one["results"]]
        ok = right == [True, True] and one["network"] == NCCL_NAME
        # Before 2.30 NCCL does not know v12: of a library that has it, it takes v11.
        names = {result["nccl"] for result in one["results"]}
        newest = 12 if all(int(name.split(".")[1]) >= 30 for name in names) else 11
        ok = ok and one["loaded"] == f"v{min(version, newest)}"
        rows[f"v{version}"] = {**one, "hidden": hidden, "ok": ok}
        print(f"v{version}: loaded {one['loaded']} {'ok' if ok else 'FAILED'} {one['errors'][:1]}")
    return rows


def grown(seen: list[dict[str, int]]) -> dict[str, int]:
    """What there is more of after the last communicators than after the first ten."""
    second, last = seen[1], seen[-1]
    more = {name: last.get(name, 0) - second.get(name, 0) for name in {**second, **last}}
    return {name: by for name, by in more.items() if by}


def comms(count: int) -> dict[str, Any]:
    """Nothing may grow more than it does with NCCL's own sockets, which keep some descriptors."""
    rows = {}
    most: dict[str, int] = {}
    slack = {"fds": 4, "threads": 2, "rss_kb": 8192}
    for name in ("sockets", "evener"):
        one = run("comms", VARIANTS[name], count=count, timeout=120)
        ok = len(one["results"]) == 2
        for result in one["results"]:
            more = grown(result["seen"])
            print(f"{name} rank {result['rank']}: grown over {count - 10} communicators by {more}")
            for what, by in slack.items():
                if name == "sockets":
                    most[what] = max(most.get(what, 0), more.get(what, 0))
                else:
                    ok = ok and more.get(what, 0) <= most.get(what, 0) + by
        rows[name] = {**one, "ok": ok}
        print(f"{name}: {'ok' if ok else 'FAILED'} via {one['network']} {one['errors'][:1]}",
              flush=True)  # fmt: skip
    return rows


def main() -> None:
    """Parse, run one of them."""
    parser = harness.arguments(__doc__)
    parser.add_argument("what", choices=("versions", "comms", "protocols"))
    parser.add_argument("--count", type=int, default=50, help="communicators")
    parser.add_argument("--engines", help=", ".join(net_protocols.ENGINES))
    parser.add_argument("--networks", help=", ".join(net_protocols.NETWORKS))
    parser.add_argument("--seconds", type=float, default=0.45, help="a protocol and size")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        if given.what == "protocols":
            net_protocols.rank_main(given.seconds)
        else:
            rank_main(given.what, given.count)
        return
    given.json = given.json or RESULTS / f"net-gpu-{given.what}.json"
    began = time.time()
    match given.what:
        case "versions":
            found = versions()
        case "comms":
            found = comms(given.count)
        case _:
            found = net_protocols.protocols(given)
    harness.keep(given, seconds=time.time() - began, found=found)
    sys.exit(not found.get("right", True))


if __name__ == "__main__":
    main()
