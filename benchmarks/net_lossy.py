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

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

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


class Rows:
    """Runs rows, each with every carrier in turn."""

    def __init__(self, rate: int, seconds: float, only: str) -> None:
        self.rate, self.seconds, self.only = rate, seconds, only
        self.rows: list[Record] = []

    def add(self, name: str, carrier: str, **figures: Any) -> None:
        """A line of the table."""
        self.rows.append({"row": name, "carrier": carrier, **figures})
        text = " ".join(f"{key}={value}" for key, value in figures.items())
        print(f"{name:24} {carrier:8} {text}", flush=True)

    def share(self, *said: Record, of: float = 1.0) -> float:
        """The share `of` the link's rate."""
        total: float = sum(one["gbit_s"] for one in said)
        return round(total * 1e3 / (of * self.rate), 3)

    def one(self, lab: Lab, carrier: str) -> Record:
        """One sender, one receiver."""
        (said,), _ = pairs(lab, self.seconds, [(0, 1, carrier, 0.0)])
        return said

    def of_pair(
        self, name: str, spec: str, faults: list[tuple[str, str]], carriers: list[str], of: float
    ) -> None:
        """One sender, one receiver, for all carriers in one lab."""
        if self.only not in name:
            return
        with Lab(Spec.parse(f"2x1@{self.rate}mbit{spec}")) as lab:
            for fault in faults:
                lab.fault(*fault)
            for carrier in carriers:
                said = self.one(lab, carrier)
                figures = {key: said[key] for key in ("gbit_s", "p50_ms", "p99_ms")}
                self.add(name, carrier, share=self.share(said, of=of), **figures)

    def of_many(
        self, name: str, nodes: int, carriers: list[str],
        flows: Callable[[str], list[tuple[int, int, str, float]]],
        figures: Callable[[list[Record]], Record],
    ) -> None:  # fmt: skip
        """Several flows at once, a lab for each carrier."""
        for carrier in carriers if self.only in name else ():
            with Lab(Spec.parse(f"{nodes}x1@{self.rate}mbit")) as lab:
                said, _ = pairs(lab, self.seconds, flows(carrier))
            self.add(name, carrier, **figures(said))


def main() -> None:
    """All rows."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rate", type=int, default=200, help="Mb/s of a link")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--carriers", help="some of udp,xdp,tcp,stream, in this order")
    given = parser.parse_args()
    carriers = harness.choose(given.carriers, CARRIERS, "carrier")
    engines = [carrier for carrier in carriers if carrier != "stream"]
    if not BENCH.exists():
        sys.exit(
            f"error: no {BENCH}\n"
            "  fix: cargo build --release -p evener-engine --example engine_bench"
        )
    rate, seconds = given.rate, given.seconds
    rows = Rows(rate, seconds, given.only)
    # Both directions of the one path; without loss the same cut of trains.
    for name in ("clean", "loss 0.1%", "loss 1%"):
        rows.of_pair(name, "", [("path0", "loss 0%" if name == "clean" else name)], carriers, 1.0)
    rows.of_pair("four paths", ",paths=4", [], carriers, 1.0)
    slow = [("path3", f"rate {rate / 40:g}mbit")]
    rows.of_pair("one of four at a tenth", ",paths=4", slow, carriers, 0.775)
    for carrier in engines if given.only in "black hole of 4 paths" else ():
        with Lab(Spec.parse(f"2x1@{rate}mbit,paths=4")) as lab:
            lab.schedule(f"{seconds / 2:g}s:path1:blackhole")
            said = rows.one(lab, carrier)
            rows.add("black hole of 4 paths", carrier, stall_ms=said["stall_ms"],
                     p99_ms=said["p99_ms"])  # fmt: skip
    rows.of_many(
        "incast 8 to 1", 9, carriers,
        lambda carrier: [(node, 0, carrier, 0.0) for node in range(1, 9)],
        lambda said: {
            "share": rows.share(*said),
            "least_of_most": round(min(one["gbit_s"] for one in said)
                                   / max(one["gbit_s"] for one in said), 2),
        },
    )  # fmt: skip
    rows.of_many(  # the second one's time is the second half of the first one's
        "two jobs", 3, carriers,
        lambda carrier: [(1, 0, carrier, 0.0), (2, 0, carrier, seconds / 2)],
        lambda said: {"first": round(said[0]["late_gbit_s"] * 1e3 / rate, 3),
                      "second": rows.share(said[1])},
    )  # fmt: skip
    rows.of_many(
        "beside cubic", 3, engines,
        lambda carrier: [(1, 0, carrier, 0.0), (2, 0, "stream", 0.0)],
        lambda said: {"share": rows.share(said[0]), "left": rows.share(said[1])},
    )  # fmt: skip
    harness.keep(
        given, rate_mbit=rate, seconds=seconds, rows=rows.rows,
        note="shares of the link's rate by payload; the limit at MTU 1500 is 0.942 for udp and "
        "0.954 for TCP, Ethernet's header counted",
    )  # fmt: skip


if __name__ == "__main__":
    main()
