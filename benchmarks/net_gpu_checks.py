"""What the plug-in does under the real NCCL beside speed, on 2 GPUs as two nodes.

    python benchmarks/net_gpu_checks.py versions   # NCCL takes each interface that it knows
    python benchmarks/net_gpu_checks.py comms      # 50 communicators made and destroyed
    python benchmarks/net_gpu_checks.py faults     # black hole, flapping, resets, lost carrier
    python benchmarks/net_gpu_checks.py protocols  # LL, LL128, Simple, NCCL's choice, word for word
    python benchmarks/net_gpu_checks.py protocols --engines udp,sockets --networks "four paths"

Every sum is compared with what it must be. What `faults` and `protocols` do and measure,
net_faults.py and net_protocols.py say.
Results in --json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import net_faults
import net_protocols
from net_elf import hide
from net_gpu import machine

from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME
from evener.tools.lab import Lab, Spec

VERSIONS = range(6, 13)
LOADED = re.compile(r"Loaded net plugin (\S+) \((v\d+)\)")
USING = re.compile(r"Using network (\S+)")

HEAD = """
import json, os, sys
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
def say(**record):
    print("RESULT " + json.dumps({"rank": int(os.environ["RANK"]), **record}), flush=True)
def summed(elements, value):
    data = torch.full((elements,), float(value), device="cuda")
    dist.all_reduce(data)
    return data
"""

VERSION = (
    HEAD
    + """
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
right = all(bool((summed(n, rank + 1) == world * (world + 1) / 2).all()) for n in (2, 1 << 22))
say(right=right)
dist.destroy_process_group()
"""
)

COMMS = (
    HEAD
    + """
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
def kind(number):
    try:
        name = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return "gone"
    # socket:[1], anon_inode:[eventfd], /dev/shm/nccl-x, /dev/nvidia0, /memfd:x, pipe:[2], a file
    if name.startswith("anon_inode:"):
        return name
    for start in ("socket:", "pipe:", "/dev/shm", "/dev/nvidia", "/memfd:", "/dev/"):
        if name.startswith(start):
            return start
    return "file"
def counts():
    status = open("/proc/self/status").read()
    field = lambda name: int(status.split(name + ":")[1].split()[0])
    fds = os.listdir("/proc/self/fd")
    found = {"fds": len(fds), "threads": field("Threads"), "rss_kb": field("VmRSS")}
    for number in fds:
        found["fd " + kind(number)] = found.get("fd " + kind(number), 0) + 1
    return found
seen = []
for round in range(int(sys.argv[1])):
    group = dist.new_group(list(range(world)), backend="nccl")
    data = torch.full((1 << 16,), float(rank + 1), device="cuda")
    dist.all_reduce(data, group=group)
    torch.cuda.synchronize()
    assert bool((data == world * (world + 1) / 2).all())
    dist.destroy_process_group(group)
    if round % 5 == 4:
        seen.append(counts())
say(seen=seen)
dist.destroy_process_group()
"""
)

SOCKETS = {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}


def environment(
    plugin: Path | None = None, variables: dict[str, str] | None = None
) -> dict[str, str]:
    """What a rank is told."""
    return {
        "NCCL_NET": NCCL_NAME,
        "NCCL_NET_PLUGIN": str(plugin or plugin_path()),
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **(variables or {}),
    }


def run(
    spec: str,
    code: str,
    arguments: list[str],
    *,
    plugin: Path | None = None,
    timeout: float = 60,
    variables: dict[str, str] | None = None,
) -> dict:
    """One job in one lab: what its ranks said, what NCCL loaded, what went wrong."""
    found: dict = {"spec": spec, "loaded": None, "network": None, "results": [], "errors": []}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        del node
        if line.startswith("RESULT "):
            found["results"].append(json.loads(line.removeprefix("RESULT ")))
        elif match := LOADED.search(line):
            found["loaded"] = match[2]
        elif match := USING.search(line):
            found["network"] = match[1]
        elif (stream == "stderr" and "Error" in line) or "WARN" in line:
            found["errors"].append(f"rank {rank}: {line.strip()[:300]}")

    env = environment(plugin, variables)
    with Lab(Spec.parse(spec)) as lab:
        argv = [sys.executable, "-c", code, *arguments]
        result = lab.launch(argv, env=env, timeout=timeout, on_line=on_line)
    found["status"] = result.status
    found["errors"] = found["errors"][:5]
    return found


def versions() -> dict:
    """NCCL must take the newest interface that both know."""
    rows = {}
    # Not below /tmp: every node has a /tmp of its own.
    folder = plugin_path().parent
    for version in VERSIONS:
        copy = folder / f"libnccl-net-evener-v{version}.so"
        newer = [f"ncclNetPlugin_v{one}" for one in VERSIONS if one > version]
        try:
            hidden = hide(plugin_path(), copy, newer)
            one = run("2x1", VERSION, [], plugin=copy, timeout=40)
        finally:
            copy.unlink(missing_ok=True)
        right = [result["right"] for result in one["results"]]
        ok = right == [True, True] and one["network"] == NCCL_NAME
        # 2.28 does not know v12: of a library that has it, it takes v11.
        ok = ok and one["loaded"] == f"v{min(version, 11)}"
        rows[f"v{version}"] = {**one, "hidden": hidden, "ok": ok}
        print(f"v{version}: loaded {one['loaded']} {'ok' if ok else 'FAILED'} {one['errors'][:1]}")
    return rows


def grown(seen: list[dict[str, int]]) -> dict[str, int]:
    """What there is more of after the last communicators than after the first ten."""
    second, last = seen[1], seen[-1]
    return {name: last.get(name, 0) - second.get(name, 0) for name in {**second, **last}}


def comms(count: int) -> dict:
    """Nothing may grow more than it does with NCCL's own sockets, which keep some descriptors."""
    rows = {}
    most: dict[str, int] = {}
    for name, variables in (("sockets", SOCKETS), ("evener", {})):
        one = run("2x1", COMMS, [str(count)], timeout=120, variables=variables)
        ok = len(one["results"]) == 2
        for result in one["results"]:
            more = {what: by for what, by in grown(result["seen"]).items() if by}
            print(f"{name} rank {result['rank']}: grown over {count - 10} communicators by {more}")
            if name == "sockets":
                for what in ("fds", "threads", "rss_kb"):
                    most[what] = max(most.get(what, 0), more.get(what, 0))
            else:
                slack = {"fds": 4, "threads": 2, "rss_kb": 8192}
                ok = ok and all(more.get(w, 0) <= most.get(w, 0) + by for w, by in slack.items())
        rows[name] = {**one, "ok": ok}
        print(
            f"{name}: {'ok' if ok else 'FAILED'} via {one['network']} {one['errors'][:1]}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("versions", "comms", "faults", "protocols"))
    parser.add_argument("--count", type=int, default=50, help="communicators")
    parser.add_argument("--scenarios", help=", ".join(net_faults.SCENARIOS))
    parser.add_argument(
        "--times", default="1.5,3,3", help="faults: seconds before, during and after each"
    )
    parser.add_argument(
        "--stats", type=Path, default=Path("net-faults-stats"), help="what the engines write"
    )
    parser.add_argument(
        "--table", type=Path, metavar="JSON", help="show what faults or protocols has written"
    )
    limits = parser.add_argument_group("protocols")
    limits.add_argument("--engines", help=", ".join(net_protocols.ENGINES))
    limits.add_argument("--networks", help=", ".join(net_protocols.NETWORKS))
    limits.add_argument("--protocols", help=", ".join(net_protocols.PROTOCOLS))
    limits.add_argument("--sizes", default=net_protocols.SIZES, help="bytes of an all-reduce")
    limits.add_argument("--seconds", type=float, default=0.4, help="of a size")
    limits.add_argument("--calls", type=int, default=10, help="of a size, at least")
    limits.add_argument("--budget", type=float, default=450, help="seconds of all")
    limits.add_argument("--plugin", type=Path, help="another library, to compare with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.table:
        if options.what == "protocols":
            print(net_protocols.show(options.table))
        else:
            print(net_faults.table(json.loads(options.table.read_text())["found"]))
        return 0
    began = time.time()
    match options.what:
        case "versions":
            found = versions()
        case "comms":
            found = comms(options.count)
        case "protocols":
            choose = net_protocols.choose
            found = net_protocols.protocols(
                choose(options.engines, net_protocols.ENGINES, "engine"),
                choose(options.networks, tuple(net_protocols.NETWORKS), "network"),
                (
                    choose(options.protocols, net_protocols.PROTOCOLS, "protocol"),
                    [int(size) for size in options.sizes.split(",")],
                    options.seconds,
                    options.calls,
                ),
                lambda variables: environment(options.plugin, variables),
                SOCKETS,
                options.budget,
            )
        case _:
            names = (options.scenarios or ",".join(net_faults.SCENARIOS)).split(",")
            before, during, after = map(float, options.times.split(","))
            times = (before, during, after)
            found = net_faults.faults(names, environment(), options.stats, times=times)
    path = options.json or Path(f"benchmarks/results/net-gpu-{options.what}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python", "benchmarks/net_gpu_checks.py", *sys.argv[1:]]),
        "machine": machine(),
        "seconds": time.time() - began,
        "found": found,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if options.what != "protocols" or net_protocols.is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
