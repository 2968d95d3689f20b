"""NCCL's reader on a processor: lines that were torn when their flag had come.

Two simulated nodes with four paths of unequal rates, each of which loses packets. The reader polls
posted buffers while they fill, as NCCL's LL and LL128 do (crates/engine/examples/lines.rs).

    cargo build --release -p evener-engine --example lines
    python benchmarks/net_lines.py --json benchmarks/results/net-lines.json
    python benchmarks/net_lines.py --fault any-order    # a mistake that must be found
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

READER = Path("target/release/examples/lines")
PORT = 7129
LINE = 128
# Bytes of a line, and the longest messages: NCCL's are up to 64 KiB of LL, and longer of LL128.
FORMS = {"ll": (16, 64 << 10), "ll128": (LINE, 512 << 10)}


def measure(lab: Lab, engine: str, form: str, lines: int, fault: str, limit: float) -> Any:
    """One run: what the reader saw."""
    size, most = FORMS[form]
    told = f"faults {fault}\njob {form} {most} {lines * size // LINE} {time.time_ns() % 10**9}\n"
    env = {"EVENER_NET_ENGINE": engine, "EVENER_NET_TIMEOUT": "60"}
    address = f"{lab.nodes[1].addresses[0]}:{PORT}"
    ends = []
    for node, role, at in ((1, "receive", f"0.0.0.0:{PORT}"), (0, "send", address)):
        argv = [str(READER.resolve()), role, at]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        end = lab.nodes[node].popen(argv, env=env, text=True, **pipes)
        end.stdin.write(told)
        end.stdin.flush()
        ends.append(end)
    try:
        out, error = ends[0].communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {limit:g} s"}
    finally:
        for end in ends:
            end.kill()
    return json.loads(out) if out else {"error": error[-300:]}


def main() -> int:
    """Exit status: 0 where no line was torn and all came, or where a fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", default="tcp,udp,xdp")
    parser.add_argument("--forms", default="ll,ll128")
    parser.add_argument("--lines", type=int, default=10_000_000, help="of each row")
    parser.add_argument("--rate", type=float, default=1000, help="Mb/s of a link")
    parser.add_argument("--loss", default="1%", help="of every path")
    parser.add_argument("--fault", default="", help="any-cut, any-order or by-kernel")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a row")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not READER.exists():
        fix = "cargo build --release -p evener-engine --example lines"
        sys.exit(f"error: no {READER}\n  fix: {fix}")
    rows = []
    for engine in given.engines.split(","):
        for form in given.forms.split(","):
            with Lab(Spec.parse(f"2x1@{given.rate:g}mbit,paths=4")) as lab:
                for path, share in enumerate((1.0, 0.8, 0.4, 0.2)):
                    lab.fault(f"path{path}", f"rate {given.rate / 4 * share:g}mbit")
                    lab.fault(f"path{path}", f"loss {given.loss}")
                seen = measure(lab, engine, form, given.lines, given.fault, given.limit)
            rows.append({"engine": engine, "form": form, **seen})
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        record = {
            "command": " ".join(["python", "benchmarks/net_lines.py", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors",
            "kernel": platform.release(),
            "network": f"four paths of {given.rate / 4:g} Mb/s times 1, 0.8, 0.4, 0.2; "
            f"{given.loss} lost on each",
            "fault": given.fault,
            "rows": rows,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.fault:
        return 0 if any(row.get("torn") for row in rows) else 1
    return 0 if all(row.get("torn") == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
