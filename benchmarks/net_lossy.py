"""Networks that lose packets, or that several share: packet and TCP engines, one TCP stream.

`udp` is the packet engine over UDP sockets, `xdp` the same past the kernel (AF_XDP on veth).
Simulated nodes, MTU 1500, queues of 2 ms x rate. Where packets are lost each is lost by itself
(trains of the kernel's segmentation are cut first). Every row runs all carriers one after the
other. The bench is crates/engine/examples/engine_bench.rs: bulk in messages of 256 KiB, eight in
flight, and beside it 64 KiB every 20 ms.

    cargo build --release -p evener-engine --example engine_bench
    python benchmarks/net_lossy.py --json benchmarks/results/net-lossy.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evener.tools.lab import Lab, Spec

BENCH = Path("target/release/examples/engine_bench")
CARRIERS = ("udp", "xdp", "tcp", "stream")
PORT = 7117
Record = dict[str, Any]


def start(lab: Lab, node: int, role: str, at: str, number: float, carrier: str) -> Any:
    """A process of the bench in a node."""
    argv = [str(BENCH.resolve()), role, at, f"{number:g}"]
    argv += ["tcp"] if carrier == "stream" else []
    env = {
        "EVENER_NET_ENGINE": "tcp" if carrier == "stream" else carrier,
        "EVENER_NET_WORKERS": "1",
        # A sender that ends while messages are on their way can be missed for so long.
        "EVENER_NET_TIMEOUT": "20",
    }
    return lab.nodes[node].popen(
        argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def answer(process: Any, limit: float) -> Record:
    """The one line of a process."""
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        out, error = process.communicate()
        raise SystemExit(f"no end after {limit:g} s: {error[-500:]}") from None
    if process.returncode:
        raise SystemExit(f"ended with {process.returncode}: {error[-500:]}")
    record: Record = json.loads(out.splitlines()[-1])
    return record


def pairs(
    lab: Lab, seconds: float, flows: list[tuple[int, int, str, float]]
) -> tuple[list[Record], list[Record]]:
    """Runs (from, to, carrier, delay) at once; what senders and receivers said."""
    receivers: dict[tuple[int, str], Any] = {}
    wanted: dict[tuple[int, str], int] = {}
    for _, to, carrier, _ in flows:
        wanted[to, carrier] = wanted.get((to, carrier), 0) + 1
    ports = {key: PORT + place for place, key in enumerate(wanted)}
    for key, count in wanted.items():
        receivers[key] = start(lab, key[0], "receive", f"0.0.0.0:{ports[key]}", count, key[1])
    senders = []
    begun = time.monotonic()
    for source, to, carrier, delay in sorted(flows, key=lambda flow: flow[3]):
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        at = f"{lab.nodes[to].addresses[0]}:{ports[to, carrier]}"
        # All end at about the same time.
        senders.append(start(lab, source, "send", at, seconds - delay, carrier))
    limit = seconds + 30
    said = [answer(process, limit) for process in senders]
    return said, [answer(process, limit) for process in receivers.values()]


def one(lab: Lab, seconds: float, carrier: str) -> Record:
    """One sender, one receiver."""
    (said,), _ = pairs(lab, seconds, [(0, 1, carrier, 0.0)])
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=200, help="Mb/s of a link")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run")
    parser.add_argument(
        "--only", default="", help="rows whose name has this in it; `trains` are run by name alone"
    )
    parser.add_argument(
        "--carriers", default=",".join(CARRIERS), help="some of udp,xdp,tcp,stream, in this order"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    carriers = given.carriers.split(",")
    engines = [carrier for carrier in carriers if carrier != "stream"]
    if not BENCH.exists():
        sys.exit(
            f"error: no {BENCH}\n"
            "  fix: cargo build --release -p evener-engine --example engine_bench"
        )
    rate, seconds = given.rate, given.seconds
    rows: list[Record] = []

    def row(name: str, carrier: str, **figures: Any) -> None:
        rows.append({"row": name, "carrier": carrier, **figures})
        text = " ".join(f"{key}={value}" for key, value in figures.items())
        print(f"{name:24} {carrier:8} {text}", flush=True)

    def wanted(name: str) -> bool:
        return given.only in name

    for name, fault in (("clean", ""), ("loss 0.1%", "loss 0.1%"), ("loss 1%", "loss 1%")):
        if not wanted(name):
            continue
        with Lab(Spec.parse(f"2x1@{rate}mbit")) as lab:
            # Both directions of the one path; without loss the same cut of trains.
            lab.fault("path0", fault or "loss 0%")
            for carrier in carriers:
                said = one(lab, seconds, carrier)
                share = round(said["gbit_s"] * 1e3 / rate, 3)
                row(name, carrier, share=share, p50_ms=said["p50_ms"], p99_ms=said["p99_ms"])
    # Of one packet each, and as the kernel's segmentation makes them: only sockets have any.
    for name, cut in (("trains cut", True), ("trains whole", False)):
        if wanted(name) and given.only:
            with Lab(Spec.parse(f"2x1@{rate}mbit")) as lab:
                if cut:
                    lab.fault("path0", "loss 0%")
                for carrier in carriers:
                    row(name, carrier, gbit_s=one(lab, seconds, carrier)["gbit_s"])
    for name, slow in (("four paths", False), ("one of four at a tenth", True)):
        if wanted(name):
            with Lab(Spec.parse(f"2x1@{rate}mbit,paths=4")) as lab:
                if slow:
                    lab.fault("path3", f"rate {rate / 40:g}mbit")
                carries = rate * (0.775 if slow else 1.0)
                for carrier in carriers:
                    said = one(lab, seconds, carrier)
                    share = round(said["gbit_s"] * 1e3 / carries, 3)
                    row(name, carrier, share=share, p99_ms=said["p99_ms"])
    if wanted("black hole"):
        for carrier in engines:
            with Lab(Spec.parse(f"2x1@{rate}mbit,paths=4")) as lab:
                lab.schedule(f"{seconds / 2:g}s:path1:blackhole")
                said = one(lab, seconds, carrier)
                row(
                    "black hole of 4 paths",
                    carrier,
                    stall_ms=said["stall_ms"],
                    p99_ms=said["p99_ms"],
                )
    if wanted("incast"):
        for carrier in carriers:
            with Lab(Spec.parse(f"9x1@{rate}mbit")) as lab:
                flows = [(node, 0, carrier, 0.0) for node in range(1, 9)]
                said, _ = pairs(lab, seconds, flows)
                total = sum(one["gbit_s"] for one in said) * 1e3 / rate
                parts = sorted(one["gbit_s"] for one in said)
                row(
                    "incast 8 to 1",
                    carrier,
                    share=round(total, 3),
                    least_of_most=round(parts[0] / parts[-1], 2),
                )
    if wanted("two jobs"):
        for carrier in carriers:
            with Lab(Spec.parse(f"3x1@{rate}mbit")) as lab:
                # The second one's time is the second half of the first one's.
                said, _ = pairs(lab, seconds, [(1, 0, carrier, 0.0), (2, 0, carrier, seconds / 2)])
                first = said[0]["late_gbit_s"] * 1e3 / rate
                second = said[1]["gbit_s"] * 1e3 / rate
                row("two jobs", carrier, first=round(first, 3), second=round(second, 3))
    if wanted("beside cubic"):
        for carrier in engines:
            with Lab(Spec.parse(f"3x1@{rate}mbit")) as lab:
                said, _ = pairs(lab, seconds, [(1, 0, carrier, 0.0), (2, 0, "stream", 0.0)])
                mine, other = (one["gbit_s"] * 1e3 / rate for one in said)
                row("beside cubic", carrier, share=round(mine, 3), left=round(other, 3))
    if given.json:
        command = ["python benchmarks/net_lossy.py", f"--rate {rate} --seconds {seconds:g}"]
        command += [f'--only "{given.only}"'] if given.only else []
        command += [f"--carriers {given.carriers}"] if given.carriers != ",".join(CARRIERS) else []
        record = {
            "command": " ".join(command),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors",
            "kernel": platform.release(),
            "rate_mbit": rate,
            "seconds": seconds,
            "note": "shares of the link's rate by payload; the limit at MTU 1500 is 0.942 for udp "
            "and 0.954 for TCP, Ethernet's header counted",
            "rows": rows,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
