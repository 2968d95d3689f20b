"""The published case at small scale, in a lab on this machine: measure, analyze, rewire, measure.

Two hosts with four cards of 1 Gb/s. Before: a leaf a server and four 1 Gb/s links between the
leaves, and all flows of the ring hash onto one of them (the lab's hash depends on headers only, so
source ports that meet can be looked for and are found again). After: card k of both hosts on one
switch. Each is measured, written down in the formats of NCCL and nccl-tests, and given to
`evener analyze` with its map. The channel lines are written here, the rates are measured.

    python examples/asterfusion/run.py [--out DIRECTORY] [--largest 25]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from evener.tools.analyze import collect, document, page, picture, run_checks, terminal
from evener.tools.bench.collectives.output import number
from evener.tools.fabric import parse_map
from evener.tools.lab import Lab, LabUnavailableError, Spec

HERE = Path(__file__).parent
CHANNELS = GPUS = 4
RANKS = 2 * GPUS
HOSTS = ("node0", "node1")
RATE = "1gbit"
# Bytes that each host sends for a size: what a ring of RANKS sends over one edge.
SHARE = 2 * (RANKS - 1) / RANKS
SMALLEST = 16  # powers of two of bytes


def fabric(rails: bool) -> str:
    """The map of either cabling."""
    lines = ["version: 1", "mtu: 1448", "hosts:"]
    for number_, host in enumerate(HOSTS):
        lines += [f"  {host}:", "    gpus: [nic0, nic1, nic2, nic3]", "    nics:"]
        for card in range(GPUS):
            leaf = card // 2 if rails else number_
            lines.append(f"      nic{card}: {{speed: 1G, switch: leaf{leaf}, rail: {card}}}")
    lines += ["switches: [leaf0, leaf1]", "links:"]
    lines.append("  - {between: [leaf0, leaf1], speed: 1G, count: 4}")
    return "\n".join(lines) + "\n"


def ring(channel: int) -> list[int]:
    """Leaves host 0 at GPU k for GPU k of host 1, comes back from and to GPU k + 1."""
    back = (channel + 1) % GPUS
    rest = [gpu for gpu in range(GPUS) if gpu not in (channel, back)]
    there = [GPUS + gpu for gpu in (channel, *rest, back)]
    return [back, *rest, channel, *there]


def measure(
    lab: Lab, ports: list[list[int]], sizes: list[tuple[int, int]]
) -> list[tuple[int, float]]:
    """(size, seconds) of each size."""
    config = json.dumps(
        {
            "addresses": [list(node.addresses) for node in lab.nodes],
            "ports": ports,
            "sizes": [(size, int(size * SHARE) // CHANNELS * CHANNELS, n) for size, n in sizes],
        }
    )
    script = str(HERE / "exchange.py")
    ranks = [
        node.popen([sys.executable, script, str(role), config], stdout=subprocess.PIPE, text=True)
        for role, node in enumerate(lab.nodes)
    ]
    try:
        text, _ = ranks[0].communicate(timeout=240)
        ranks[1].communicate(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
    if ranks[0].returncode or ranks[1].returncode:
        raise RuntimeError(f"exchange.py ended with {ranks[0].returncode}, {ranks[1].returncode}")
    rows = [json.loads(line) for line in text.splitlines()]
    return [(row["size"], row["seconds"]) for row in rows]


def meeting(lab: Lab) -> list[list[int]]:
    """For each host a source port a channel, such that all flows hash onto one of the links."""
    return [_meeting(lab, role) for role in range(2)]


def _meeting(lab: Lab, role: int) -> list[int]:
    chosen: list[int] = []
    wanted = ""
    for port in range(20000, 20400):
        before = lab.traffic()
        _one(lab, role, port, len(chosen))
        after = lab.traffic()
        path = max(after, key=lambda name: after[name] - before.get(name, 0))
        wanted = wanted or path
        if path == wanted:
            chosen.append(port)
        if len(chosen) == CHANNELS:
            return chosen
    raise RuntimeError("no source ports meet on one link")


def _one(lab: Lab, role: int, port: int, channel: int) -> None:
    """300 kB from a host's source port to the other host's data port of the flow's channel."""
    source, target = lab.nodes[role], lab.nodes[1 - role]
    data = str(5001 + channel)  # the hash takes both ports
    listen = (
        "import socket,sys; s=socket.create_server((sys.argv[1],int(sys.argv[2]))); "
        "print('up',flush=True); c=s.accept()[0]\nwhile c.recv(1<<20): pass"
    )
    send = (
        "import socket,sys; c=socket.socket(); c.setsockopt(1,2,1); "
        "c.bind((sys.argv[1],int(sys.argv[3]))); c.connect((sys.argv[2],int(sys.argv[4]))); "
        "c.sendall(bytes(300000)); c.close()"
    )
    with target.popen(
        [sys.executable, "-c", listen, target.addresses[0], data], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        source.run(
            [sys.executable, "-c", send, source.addresses[0], target.addresses[0], str(port), data],
            check=True,
            timeout=20,
        )


def log(rows: list[tuple[int, float]]) -> str:
    """Rings and figures in the formats of NCCL and nccl-tests."""
    lines = ["# Collective test starting: all_reduce_perf"]
    for rank in range(RANKS):
        host = HOSTS[rank // GPUS]
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {1000 + rank:6d} on {host:>10} device "
            f"{rank % GPUS:2d} [0000:0{rank % GPUS}:00] simulated"
        )
    for channel in range(CHANNELS):
        order = "".join(f" {rank:3d}" for rank in ring(channel))
        lines.append(f"node0:1000:1000 [0] NCCL INFO Channel {channel:02d}/{CHANNELS:02d} :{order}")
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    )
    total = 0.0
    for size, seconds in rows:
        algbw = size / seconds / 1e9
        total += algbw * SHARE
        lines.append(
            f"{size:12d}  {size // 4:12d}  {'float':>8}  {'sum':>6}  {-1:6d}  "
            f"{number(seconds * 1e6, 7)}  {algbw:.4f}  {algbw * SHARE:.4f}     N/A"
        )
    lines.append(f"# Avg bus bandwidth    : {total / len(rows):g}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("asterfusion-lab"))
    parser.add_argument("--largest", type=int, default=25, help="Power of two, 17 or more.")
    arguments = parser.parse_args()
    out = arguments.out
    powers = range(SMALLEST, max(arguments.largest, SMALLEST + 1) + 1)
    sizes = [(1 << power, 5 if power > 22 else 20) for power in powers]
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"machine": f"{platform.machine()}, Linux {platform.release()}"}
    try:
        for name, spec, rails in (
            ("before", Spec(nodes=2, link="4gbit", paths=4), False),
            ("after", Spec(nodes=2, link=RATE, nics=4, paths=1), True),
        ):
            with Lab(spec) as lab:
                ports = [[30000 + i for i in range(CHANNELS)]] * 2 if rails else meeting(lab)
                print(f"{name}: {spec}, source ports {ports}", flush=True)
                rows = measure(lab, ports, sizes)
            (out / f"{name}.log").write_text(log(rows))
            (out / f"{name}.yaml").write_text(fabric(rails))
            result = picture(collect([out / f"{name}.log"]), parse_map(fabric(rails), name))
            findings = run_checks(result)
            (out / f"{name}.html").write_text(page(result, findings))
            (out / f"{name}.json").write_text(json.dumps(document(result, findings), indent=1))
            click.echo(terminal(result, findings))
            assert result.bandwidth is not None
            summary[name] = {
                "spec": str(spec),
                "peak": result.bandwidth.peak,
                "mean": result.bandwidth.mean,
                "findings": [finding.id for finding in findings],
            }
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    gain = summary["after"]["peak"] / summary["before"]["peak"]
    (out / "summary.json").write_text(json.dumps({**summary, "gain": gain}, indent=1) + "\n")
    print(
        f"peak {summary['before']['peak']:.3f} GB/s before, {summary['after']['peak']:.3f} after: "
        f"{gain:.2f} times. Reports in {out}/"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
