"""The staged transport past the kernel: does a processor touch payload, and what does a byte cost?

Simulated nodes, one rank each, all-gathers and all-to-alls of one size by `evener.comm.staged`.
With AF_XDP the slots are frames of the card's memory: what the process's own processors copied is
counted, and must be 0 but where a card dies. In these namespaces the *kernel* copies each packet
(veth has no zero copy): that is in the processor seconds, and not in the count. Every byte that
arrives is compared. Ranks may share a GPU.

    python benchmarks/staged_xdp.py --json benchmarks/results/staged-xdp.json
    python benchmarks/staged_xdp.py --cpu

With --cpu a thread stands for the device, and its copies are in the processor seconds too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.tools.lab import Lab, Spec

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row: the network, what happens to it, and whether nothing at all may be copied."""

    name: str
    spec: str
    faults: tuple[str, ...] = ()
    strict: bool = False


CASES = (
    Case("clean", "2x1@{rate},queue=2ms", strict=True),
    Case("three", "3x1@{rate},queue=2ms", strict=True),
    Case("loss 1%", "2x1@{rate},queue=2ms", ("0s:path0:loss 1%",), strict=True),
    Case(
        "path dies",
        "2x1@{rate},paths=4,queue=2ms",
        ("1s:path1:blackhole", "3s:path1:heal"),
        strict=True,
    ),
    Case("card dies", "2x1@{rate},nics=2,queue=2ms", ("1s:node0.eth1:down", "3s:node0.eth1:up")),
)
CARRIERS = ("xdp", "udp", "tcp")


# ---- in a rank ----


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def worker(size: int, seconds: float, on_cpu: bool) -> None:
    """Collectives for so long; one line of JSON."""
    import torch
    import torch.distributed as dist

    from evener.comm import staged

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    if on_cpu:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    made = staged.connect(rank, world, group, device, 60.0)
    numbers = torch.arange(size // 4, dtype=torch.int32, device=device)
    payload = torch.empty_like(numbers)
    parts = torch.empty(world * numbers.numel(), dtype=torch.int32, device=device)
    got = torch.empty(world * numbers.numel(), dtype=torch.int32, device=device)

    def settle() -> None:
        if not on_cpu:
            torch.cuda.synchronize()

    def turn(number: int) -> tuple[float, float]:
        """Both in turn; seconds by the clock, and of processors."""
        torch.mul(numbers, 2 * number + 2 * rank + 1, out=payload)
        if number % 2:
            for to, part in enumerate(parts.chunk(world)):
                torch.add(payload, to, out=part)
        settle()
        at, used = time.perf_counter(), _used()
        if number % 2:
            made.all_to_all(got, parts)
        else:
            made.all_gather(got, payload)
        settle()
        return time.perf_counter() - at, _used() - used

    def wrong_of(number: int) -> int:
        wrong, add = 0, rank * (number % 2)
        for place, part in enumerate(got.chunk(world)):
            wrong += int((part != numbers * (2 * number + 2 * place + 1) + add).sum())
        return wrong

    wrong = 0
    for number in range(4):
        turn(number)
        wrong += wrong_of(number)
    dist.barrier()
    # From here on faults come.
    print("READY", flush=True)
    began, turns = time.perf_counter(), 0
    longest, spent, transfer = 0.0, 0.0, 0.0
    going = True
    while going:
        took, used = turn(turns)
        transfer, spent = transfer + took, spent + used
        longest = max(longest, took)
        wrong += wrong_of(turns)
        turns += 1
        goes = torch.tensor([float(time.perf_counter() - began < seconds)])
        dist.broadcast(goes, 0)
        going = bool(goes.item())
    made.check()
    gathered = made.gathered()
    made.close()
    time.sleep(0.3)  # what instances counted is brought ten times per second
    (sent, received), copied = staged.moved()
    dist.barrier()
    result = {
        "rank": rank,
        "turns": turns,
        "bytes": turns * size * (world - 1),
        "wrong": wrong,
        "seconds": transfer,
        "cpu_seconds": spent,
        "longest_ms": 1e3 * longest,
        "frames": gathered is not None,
        "sent": sent,
        "received": received,
        "copied": list(copied),
        "pieces": gathered and gathered[0],
        "copies": gathered and gathered[1],
    }
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


# ---- outside ----


def measure(case: Case, carrier: str, args: argparse.Namespace) -> Record:
    """One job in one lab."""
    ranks: list[Record] = []
    said: list[str] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        if line == "READY" and rank == 0 and case.faults:
            lab.schedule(*case.faults)
        elif line.startswith("RESULT "):
            ranks.append(json.loads(line.removeprefix("RESULT ")))
        elif stream == "stderr":
            said.append(f"{rank}@{node}: {line.strip()}"[:300])

    argv = [sys.executable, __file__, "--worker", str(args.size), str(args.seconds)]
    argv += ["--cpu"] if args.cpu else []
    env = {"EVENER_NET_ENGINE": carrier, "OMP_NUM_THREADS": "1"}
    with Lab(Spec.parse(case.spec.format(rate=args.rate))) as lab:
        result = lab.launch(argv, env=env, timeout=args.seconds + 120, on_line=on_line)
    row: Record = {
        "case": case.name,
        "carrier": carrier,
        "ok": result.ok and len(ranks) == lab.spec.nodes,
    }
    row["said"] = said[-20:]
    if not row["ok"]:
        return row
    gigabytes = sum(rank["bytes"] for rank in ranks) / 1e9
    slowest = max(rank["seconds"] for rank in ranks)
    row |= {
        "wrong": sum(rank["wrong"] for rank in ranks),
        "gb_per_s": min(rank["bytes"] for rank in ranks) / 1e9 / slowest,
        "cpu_s_per_gb": sum(rank["cpu_seconds"] for rank in ranks) / gigabytes,
        "longest_ms": max(rank["longest_ms"] for rank in ranks),
        "frames": all(rank["frames"] for rank in ranks),
        "not_copied": [sum(rank[key] for rank in ranks) for key in ("sent", "received")],
        "copied": [sum(rank["copied"][side] for rank in ranks) for side in (0, 1)],
    }
    if row["frames"]:
        row["copies_per_piece"] = sum(rank["copies"] for rank in ranks) / sum(
            rank["pieces"] for rank in ranks
        )
    if carrier == "xdp" and not row["frames"]:
        row["ok"] = False
    if carrier == "xdp" and case.strict and any(row["copied"]):
        row["ok"] = False
    row["ok"] &= row["wrong"] == 0
    return row


def show(row: Record) -> str:
    name = f"{row['case']:>10} {row['carrier']:>4}"
    if "gb_per_s" not in row:
        return f"{name}: failed: {row['said']}"
    text = (
        f"{name}: {row['gb_per_s']:.3f} GB/s each way, "
        f"{row['cpu_s_per_gb']:.2f} processor s per GB, "
        f"longest {row['longest_ms']:.0f} ms, bytes {'equal' if not row['wrong'] else 'WRONG'}"
    )
    if row["frames"]:
        out, back = row["copied"]
        text += (
            f"; payload copied: {out} bytes out, {back} in, of {row['not_copied'][0]:.2e}; "
            f"{row['copies_per_piece']:.1f} copies per piece"
        )
    return text + ("" if row["ok"] else "  <- not as it should be: " + "; ".join(row["said"]))


def machine(on_cpu: bool) -> Record:
    found: Record = {"kernel": platform.release(), "processors": os.cpu_count()}
    if not on_cpu:
        import torch

        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="tensors of the host")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rate", default="10gbit", help="of a card")
    parser.add_argument("--size", type=int, default=32 << 20, help="bytes of a rank's payload")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--case", action="append", help="these alone")
    parser.add_argument("--carrier", action="append", choices=CARRIERS, help="these alone")
    args = parser.parse_args()
    rows = []
    for case in CASES:
        for carrier in CARRIERS:
            wanted = (not args.case or case.name in args.case) and (
                not args.carrier or carrier in args.carrier
            )
            if wanted:
                rows.append(measure(case, carrier, args))
                print(show(rows[-1]), flush=True)
    if args.json:
        record: Record = {"machine": machine(args.cpu), "device": "cpu" if args.cpu else "gpu"}
        record |= {"rate": args.rate, "size": args.size, "seconds": args.seconds, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), float(sys.argv[3]), "--cpu" in sys.argv)
    else:
        sys.exit(main())
