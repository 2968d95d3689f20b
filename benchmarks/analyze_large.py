"""Time and memory of `evener analyze` on a large log: 200 MB of hops, collectives and noise.

python benchmarks/analyze_large.py [--megabytes 200] [--json FILE]
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from evener.tools.analyze import collect, document, picture, run_checks

RANKS, CHANNELS = 1024, 16


def lines(rank: int) -> bytes:
    """What one rank of a large job logs, and what its program prints in between."""
    base = b"gpu-node-%04d:%d:%d [%d] NCCL INFO " % (
        rank // 8,
        10000 + rank,
        20000 + rank,
        rank % 8,
    )
    after = (rank + 1) % RANKS
    found = []
    for channel in range(CHANNELS):
        edge = b"Channel %02d/0 : %d[%d] -> %d[%d] " % (channel, rank, rank % 8, after, after % 8)
        if rank % 8 == 7:
            found.append(base + edge + b"[send] via NET/IB/%d/GDRDMA\n" % (channel % 8))
        else:
            found.append(base + edge + b"via P2P/CUMEM/read\n")
    call = b"AllReduce: opCount 1c sendbuff 0x7f00 recvbuff 0x7f00 count 1048576 datatype 7 op 0 "
    found += [base + call + b"root 0 comm 0x55 [nranks=1024] stream 0x55\n"] * 4
    found.append(b"Epoch 3 step 222 loss 0.332\n")
    return b"".join(found)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    given = parser.parse_args()
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        written = 0
        while written < given.megabytes * 1_000_000:
            written += sum(file.write(lines(rank)) for rank in range(RANKS))
        file.flush()
        wall, cpu = time.perf_counter(), time.process_time()
        run = collect([Path(file.name)])
        result = picture(run)
        json.dumps(document(result, run_checks(result)))
        figures: dict[str, Any] = {
            "megabytes": written / 1e6,
            "lines": run.lines,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    print(figures)
    harness.keep(given, **figures)


if __name__ == "__main__":
    main()
