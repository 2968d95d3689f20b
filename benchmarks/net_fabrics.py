"""Networks that the engines were not tuned for: small and large packets, lost ports, uneven ways.

Two simulated hosts, messages of 256 KiB, four at a time, both ways, compared byte by byte, by the
plug-in with each engine. Four hidden paths of 25 Mb/s with queues of 2 ms, unless a row says else.

    python benchmarks/net_fabrics.py [--engines udp,tcp] [--only TEXT] [--json FILE]

Wants root, for the namespaces, and iptables.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from evener.net import plugin_path
from evener.net.trace import files, read, summed_up
from evener.net.trace.summary import as_json
from evener.tools.bench.net.drive import Job, command, merge
from evener.tools.lab import Lab

PATHS = "2x1@100mbit,paths=4,queue=2ms"
DROP = "iptables -A INPUT -p udp {} -j DROP"
SLOW = "tc qdisc add dev eth0 root tbf rate {} burst 15000 latency 20ms"
LARGE = DROP.format("-m length --length 1300:65535")
# Name: the lab, and commands in a node; instead of a node's number, a fault of the lab.
FABRICS: dict[str, tuple[str, list[tuple[int | str, str]]]] = {
    "nothing else": (PATHS, []),
    "MTU 1280": (PATHS + ",mtu=1280", []),
    "MTU 9000, queues of 5 ms": ("2x1@100mbit,paths=4,queue=5ms,mtu=9000", []),
    "packets above 1300 bytes vanish": (PATHS, [(0, LARGE), (1, LARGE)]),
    "a third of source ports is dropped": (PATHS, [(1, DROP.format("--sport 32768:42000"))]),
    "one way of 20 Mb/s": (PATHS, [(1, SLOW.format("20mbit"))]),
    "one way of 5 Mb/s": (PATHS, [(1, SLOW.format("5mbit"))]),
    "two cards of 50 and 5 Mb/s": (
        "2x1@50mbit,nics=2,queue=2ms",
        [("node0.eth1", "rate 5mbit"), ("node1.eth1", "rate 5mbit")],
    ),
    "all UDP is dropped": (PATHS, [(1, DROP.format(""))]),
}


def measure(name: str, engine: str, limit: float) -> dict[str, Any]:
    """One run of 3 s. Megabits per second each way, the longest stall, ports that were replaced."""
    spec, setup = FABRICS[name]
    # Not below /tmp: each node of a lab has its own.
    trace = Path(tempfile.mkdtemp(prefix=".net-fabrics-", dir="."))
    row: dict[str, Any] = {"network": name, "engine": engine}
    said: list[str] = []

    def prepare(lab: Lab) -> None:
        for where, text in setup:
            if isinstance(where, str):
                lab.fault(where, text)
            elif (done := lab.nodes[where].run(text.split())).returncode:
                sys.exit(f"error: {text}: {done.stderr}")

    env = {
        "EVENER_NET_ENGINE": engine,
        "EVENER_NET_TRACE_DIR": str(trace.resolve()),
        "EVENER_NET_TIMEOUT": "6",
    }
    job = Job(str(plugin_path()), comms=1, depth=4, sizes="262144", seconds=3.0, verify=True)
    try:
        done = harness.in_lab(
            spec, command(job), env=env, limit=limit, prepare=prepare,
            hear=lambda _lab, _rank, line: said.append(line),
        )  # fmt: skip
        if done.status:
            return row | {"ended": False, "error": done.failed or said[-1][-150:]}
        found = merge(said)[0]
        row |= {
            "ended": True,
            "mbit_s": round(found["bandwidth"] * 8e-6, 1),
            "stall_ms": round(found["stall"] * 1e3),
        }
        if list(trace.glob("*.pcapng")):
            first = as_json(summed_up([read(path) for path in files([trace])]))["connections"]
            row["replaced"] = len(first[0]["replaced"]) if first else 0
        return row
    finally:
        shutil.rmtree(trace, ignore_errors=True)


def main() -> None:
    """Run the rows, print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--engines", default="udp,tcp")
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of a run")
    given = parser.parse_args()
    rows = []
    for name in FABRICS:
        for engine in given.engines.split(",") if given.only in name else ():
            rows.append(measure(name, engine, given.limit))
            print(rows[-1], flush=True)
    keys = ("network", "engine", "mbit_s", "stall_ms", "replaced")
    heads = ["network", "engine", "Mb/s each way", "longest stall, ms", "ports replaced"]
    print(harness.show(heads, ([row.get(key, "-") for key in keys] for row in rows)))
    harness.keep(given, rows=rows)


if __name__ == "__main__":
    main()
