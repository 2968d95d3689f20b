"""One of the two processes of a measurement: `python -m evener.tools.bench.net.peer JSON`.

The argument is a `Job` as JSON; the answer is one line of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import sys

from evener import _native


def measure(job: dict[str, object], rank: int, address: str, port: int) -> list[dict[str, float]]:
    """Run this side; rows with size, messages, seconds, bandwidth (bytes/s in each direction),
    latency_us, cpu_seconds and stall (seconds); of a ring, all-reduces are the messages. A steady
    run has fairness besides: Jain's index of the comms' shares."""
    rows = _native.net_bench(
        rank,
        f"{address}:{port}",
        str(job["plugin"]),
        int(str(job["streams"])),
        str(job["pattern"]),
        int(str(job["comms"])),
        int(str(job["depth"])),
        [int(size) for size in str(job["sizes"]).split(",")],
        float(str(job["seconds"])),
        bool(job["verify"]),
        str(job["until"]),
    )
    names = ("size", "messages", "seconds", "bandwidth", "latency_us", "cpu_seconds", "stall")
    found = []
    for *figures, fairness in rows:
        row: dict[str, float] = dict(zip(names, figures, strict=True))
        if fairness is not None:
            row["fairness"] = fairness
        found.append(row)
    return found


def main() -> None:
    """Read the job and the launcher's variables, measure, print."""
    job = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    if job["engine"]:
        # Before the plug-in is loaded, which reads it once.
        os.environ["EVENER_NET_ENGINE"] = job["engine"]
    rows = measure(job, rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    sys.stdout.write(json.dumps({"rank": rank, "pattern": job["pattern"], "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
