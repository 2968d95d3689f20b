"""What the plug-in does under the real NCCL beside speed, on 2 GPUs as two nodes.

    python benchmarks/net_gpu_checks.py versions   # NCCL takes each interface that it knows
    python benchmarks/net_gpu_checks.py comms      # 50 communicators made and destroyed
    python benchmarks/net_gpu_checks.py faults     # black hole, flapping path, lost carrier

Every sum is compared with what it must be; `faults` also trains a small deterministic model with
and without faults and compares its parameters bit by bit. Results in --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from pathlib import Path

from net_elf import hide

from evener.lab import Lab, Spec
from evener.net import plugin_path
from evener.net.plugin import NCCL_NAME

VERSIONS = range(6, 13)
LOADED = re.compile(r"Loaded net plugin (\S+) \((v\d+)\)")
USING = re.compile(r"Using network (\S+)")

HEAD = """
import hashlib, json, os, sys, time
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
def counts():
    status = open("/proc/self/status").read()
    field = lambda name: int(status.split(name + ":")[1].split()[0])
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": field("Threads"),
            "rss_kb": field("VmRSS")}
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

FAULTS = (
    HEAD
    + """
seconds, megabytes = float(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
want = world * (world + 1) / 2
summed(1 << 20, 1)
torch.cuda.synchronize()
dist.barrier(device_ids=[torch.cuda.current_device()])
began = time.perf_counter()
ends, wrong, steps = [], 0, 0
data = torch.empty(megabytes << 18, device="cuda")
go = torch.ones(1, device="cuda")
while float(go):
    data.fill_(float(rank + 1 + steps))
    dist.all_reduce(data)
    wrong += int((data != want + world * steps).sum())
    ends.append(time.perf_counter() - began)
    steps += 1
    # Rank 0's clock decides for all.
    go.fill_(float(ends[-1] < seconds))
    dist.broadcast(go, 0)
say(ends=ends, wrong=wrong)

# A model whose every step depends on all before it: one bit that differs shows in the hash.
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64))
model = torch.nn.parallel.DistributedDataParallel(model.cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for _ in range(60):
    batch = torch.randn(64, 1024, generator=generator).cuda()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
say(model=hashlib.sha256(bits).hexdigest())
dist.destroy_process_group()
"""
)

# The all-reduces begin when torch is there, about 9 s after the lab; the model trains behind them.
# A path that flaps does so for all of the job.
FLAP = [f"{at}s:path1:{'down' if at % 2 else 'up'}" for at in range(9, 27)]
SCENARIOS: dict[str, tuple[str, list[str]]] = {
    "none": ("2x1@25gbit,paths=4", []),
    "black-hole": ("2x1@25gbit,paths=4", ["12s:path1:blackhole", "15s:path1:heal"]),
    "flapping": ("2x1@25gbit,paths=4", FLAP),
    "carrier-lost": ("2x1@25gbit,nics=2", ["12s:node0.eth1:down", "15s:node0.eth1:up"]),
}


def run(
    spec: str,
    code: str,
    arguments: list[str],
    *,
    plugin: Path | None = None,
    faults: list[str] | None = None,
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

    env = {
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
    with Lab(Spec.parse(spec)) as lab:
        if faults:
            lab.schedule(*faults)
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


def comms(count: int) -> dict:
    """Nothing may grow after the first ten."""
    one = run("2x1", COMMS, [str(count)], timeout=120)
    ok = len(one["results"]) == 2
    for result in one["results"]:
        second, last = result["seen"][1], result["seen"][-1]
        grown = {name: last[name] - second[name] for name in last}
        # NCCL and CUDA keep some memory a communicator; a leak of ours would be a descriptor.
        ok = ok and grown["fds"] <= 2 and grown["threads"] <= 2
        print(f"rank {result['rank']}: after {count} communicators {last}, grown by {grown}")
    return {**one, "ok": ok}


def faults(names: list[str], seconds: float) -> dict:
    """Sums and model as without faults; stalls as the longest step less the median of all."""
    rows = {}
    model = None
    for name in names:
        spec, events = SCENARIOS[name]
        one = run(spec, FAULTS, [str(seconds), "16"], faults=events, timeout=seconds + 45)
        ends = next((r["ends"] for r in one["results"] if r["rank"] == 0 and "ends" in r), [])
        steps = [b - a for a, b in itertools.pairwise(ends)] or [0.0]
        stall = max(steps) - statistics.median(steps)
        wrong = sum(result.get("wrong", 0) for result in one["results"])
        models = {result["model"] for result in one["results"] if "model" in result}
        if model is None and len(models) == 1:
            model = next(iter(models))
        ok = wrong == 0 and models == {model} and one["status"] in (0, None)
        rows[name] = {
            **one,
            "results": None,
            "faults": events,
            "steps": len(steps),
            "median_s": statistics.median(steps),
            "stall_s": stall,
            "last_second_s": statistics.median(steps[-max(1, len(steps) // 10) :]),
            "wrong": wrong,
            "models": sorted(models),
            "ok": ok,
        }
        print(
            f"{name}: {len(steps)} steps, median {statistics.median(steps) * 1e3:.1f} ms, stall "
            f"{stall * 1e3:.0f} ms, wrong {wrong}, {'ok' if ok else 'FAILED'} {one['errors'][:1]}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("versions", "comms", "faults"))
    parser.add_argument("--count", type=int, default=50, help="communicators")
    parser.add_argument("--seconds", type=float, default=10, help="of all-reduces a scenario")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    match options.what:
        case "versions":
            found = versions()
        case "comms":
            found = comms(options.count)
        case _:
            found = faults(options.scenarios.split(","), options.seconds)
    path = options.json or Path(f"benchmarks/results/net-gpu-{options.what}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"what": options.what, "seconds": time.time() - began, "found": found}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
