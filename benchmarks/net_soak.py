"""Millions of small messages through the plug-in between two simulated nodes, a fault every second.

    make soak-net                                   # 3.6 million, results in benchmarks/results/
    python benchmarks/net_soak.py --messages 100000

Four hidden paths; every second another of them goes black or down for 0.6 s. Every byte is compared
with what its message must hold and messages are counted on both sides: one that is lost stops the
run, one that comes twice or out of turn differs. Needs the rights that `evener lab` needs.
"""

from __future__ import annotations

import time
from typing import Any

import harness

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, in_lab
from evener.tools.lab import Lab, Spec

SPEC = "2x1@400mbit,paths=4,queue=5ms"


def faults(seconds: int) -> list[str]:
    """One a second, from the third on."""
    events = []
    for at in range(3, seconds):
        path, action, back = at % 4, *(("blackhole", "heal") if at % 8 < 4 else ("down", "up"))
        events += [f"{at}s:path{path}:{action}", f"{at}.6s:path{path}:{back}"]
    return events


def main() -> None:
    """Parts, until enough messages came."""
    parser = harness.arguments(__doc__, json="net-soak.json")
    parser.add_argument("--messages", type=int, default=3_600_000)
    parser.add_argument("--size", type=int, default=512, help="bytes of a message")
    parser.add_argument("--part", type=int, default=60, help="seconds of a part")
    given = parser.parse_args()
    began = time.time()
    parts: list[dict[str, Any]] = []
    moved = 0
    while moved < given.messages:
        seconds = given.part if parts else 10
        job = Job(str(plugin_path()), 4, 32, str(given.size), float(seconds), verify=True)
        events = faults(seconds * 2)
        with Lab(Spec.parse(SPEC)) as lab:
            row = in_lab(lab, job, timeout=seconds * 4 + 60, faults=events)[0]
        # Both directions carry as many.
        moved += 2 * int(row["messages"])
        happened = sum(float(e.split("s:")[0]) < row["seconds"] for e in events) // 2
        parts.append({**row, "faults": happened})
        print(
            f"{time.time() - began:6.0f} s: {moved} messages, longest silence "
            f"{row['stall'] * 1e3:.0f} ms, {happened} faults in this part",
            flush=True,
        )
    harness.keep(given, spec=SPEC, messages=moved, seconds=time.time() - began, parts=parts)


if __name__ == "__main__":
    main()
