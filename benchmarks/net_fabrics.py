"""Networks that the engines were not tuned for: small and large packets, lost ports, long ways.

Two simulated hosts, both ways at once, compared byte by byte, by the plug-in with each engine, or
by one plain stream per direction ("sockets", as NCCL's own transport has it). The first networks:
four hidden paths of 25 Mb/s with queues of 2 ms, unless a row says else, messages of 256 KiB, four
at a time. Those with a delay ("LONG"): 4 MiB at a time, as a channel of NCCL's, for twice as long;
the seed is a network's place in the list, and "share" that of what TCP's packets and a confirmation
for every second one leave of the rate.

    python benchmarks/net_fabrics.py [--engines udp,tcp,sockets] [--only TEXT] [--repeats 3]

Wants root, for the namespaces, and iptables.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
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
# Payload of the rate: of 1448 bytes, those with headers and half of a confirmation that goes back.
PAYLOAD = 1448 / (1514 + 33)
# Name: the lab, its faults, Mb/s in all. RT: round trip without queues.
LONG: dict[str, tuple[str, list[tuple[int | str, str]], float]] = {
    "LONG 1: 100 Mb/s, RT 10 ms": ("2x1@100mbit,queue=10ms,delay=5ms", [], 100),
    "LONG 2: 100 Mb/s, RT 43 ms": ("2x1@100mbit,queue=20ms,delay=21.5ms", [], 100),
    "LONG 3: 25 Mb/s, RT 100 ms": ("2x1@25mbit,queue=50ms,delay=50ms", [], 25),
    "LONG 4: 200 Mb/s, RT 20 ms": ("2x1@200mbit,queue=20ms,delay=10ms", [], 200),
    "LONG 5: 4 x 25 Mb/s, RT 0.4 to 12 ms": (
        "2x1@100mbit,paths=4,queue=20ms,delay=0.2ms",
        [("path1", "delay 1ms"), ("path2", "delay 3ms"), ("path3", "delay 6ms")],
        100,
    ),
    "LONG 6: 4 x 25 Mb/s, RT 43 ms": ("2x1@100mbit,paths=4,queue=20ms,delay=21.5ms", [], 100),
    "LONG 7: cards of 80 and 20 Mb/s, RT 2 and 20 ms": (
        "2x1@80mbit,nics=2,queue=20ms,delay=1ms",
        [(f"node{i}.eth1", what) for i in (0, 1) for what in ("rate 20mbit", "delay 5ms")],
        100,
    ),
    "LONG 8: 100 Mb/s, RT 10 ms, loss 0.5%": (
        "2x1@100mbit,queue=10ms,delay=5ms,loss=0.5%",
        [],
        100,
    ),
    "LONG 9: 100 Mb/s, RT 20 ms, 2% pass others": (
        "2x1@100mbit,queue=20ms,delay=10ms",
        [("path0", "reorder 2%")],
        100,
    ),
    "LONG 10: 100 Mb/s, RT 10 ms, queue 2 ms": ("2x1@100mbit,queue=2ms,delay=5ms", [], 100),
    "LONG 11: 100 Mb/s, RT 20 ms, queue 200 ms": ("2x1@100mbit,queue=200ms,delay=10ms", [], 100),
    # Half of the rate is fair to one flow.
    "LONG 12: 100 Mb/s, RT 10 ms, beside cubic": ("2x1@100mbit,queue=20ms,delay=5ms", [], 50),
}
_CUBIC = """
import socket, sys
if sys.argv[1] == "hear":
    server = socket.create_server(("", 5000))
    print("up", flush=True)
    peer = server.accept()[0]
    while peer.recv(1 << 20): pass
else:
    peer = socket.create_connection((sys.argv[1], 5000))
    while True: peer.sendall(bytes(1 << 16))
"""


def beside(lab: Lab) -> None:
    """A cubic flow from the first node to the second, until the lab ends."""
    hears = lab.nodes[1].popen([sys.executable, "-c", _CUBIC, "hear"], stdout=subprocess.PIPE)
    assert hears.stdout is not None
    hears.stdout.readline()
    lab.nodes[0].popen([sys.executable, "-c", _CUBIC, "node1"])


def measure(name: str, engine: str, limit: float) -> dict[str, Any]:
    """One run of 3 s. Megabits per second each way, the longest stall, ports that were replaced."""
    spec, setup, rate = LONG[name] if name in LONG else (*FABRICS[name], 0.0)
    if rate:
        spec += f",seed={1 + list(LONG).index(name)}"
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
        if name.endswith("beside cubic"):
            beside(lab)

    sockets = engine == "sockets"
    env = {
        "EVENER_NET_ENGINE": "tcp" if sockets else engine,
        "EVENER_NET_TRACE_DIR": str(trace.resolve()),
        "EVENER_NET_TIMEOUT": "6",
    }
    depth, size, seconds = (8, 1 << 19, 6.0) if rate else (4, 1 << 18, 3.0)
    plugin = "" if sockets else str(plugin_path())
    job = Job(plugin, comms=1, depth=depth, sizes=str(size), seconds=seconds, verify=True)
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
        if rate:
            row["share"] = round(row["mbit_s"] / (rate * PAYLOAD), 3)
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
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; medians are shown")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of a run")
    given = parser.parse_args()
    rows = []
    for _ in range(given.repeats):
        for name in (name for name in (*FABRICS, *LONG) if given.only in name):
            for engine in given.engines.split(","):
                rows.append(measure(name, engine, given.limit))
                print(rows[-1], flush=True)
    keys = ("network", "engine", "mbit_s", "share", "stall_ms", "replaced")
    heads = ["network", "engine", "Mb/s each way", "share", "longest stall, ms", "ports replaced"]
    print(harness.show(heads, ([row.get(key, "-") for key in keys] for row in medians(rows))))
    harness.keep(given, rows=rows)


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run with the median rate, for each network and engine. One that did not end counts as
    the slowest."""
    kinds = dict.fromkeys((row["network"], row["engine"]) for row in rows)
    found = []
    for network, engine in kinds:
        runs = [row for row in rows if (row["network"], row["engine"]) == (network, engine)]
        middle = statistics.median_low([row.get("mbit_s", 0.0) for row in runs])
        found.append(next(row for row in runs if row.get("mbit_s", 0.0) == middle))
    return found


if __name__ == "__main__":
    main()
