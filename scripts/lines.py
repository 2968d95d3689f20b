"""Which cache lines do two instances of the packet engine share? `make lines`.

    python scripts/lines.py [--instances 2] [--comms 4] [--json FILE]

The engine and a program that keeps it busy (crates/engine/examples/instance_lines.rs) are compiled
with the instrumentation of ThreadSanitizer, and linked with a runtime of our own instead of
ThreadSanitizer's (crates/engine/lines/runtime.c). That counts the loads and stores of each thread
to each cache line, all of them, so it finds what `perf c2c` samples, on machines without its events
too. A lock that two instances take is a cache line that both write.

It fails where two instances touch a cache line, one of them writes it, and the second of them in
the order of touches does so more often than once for four messages of 64 KiB. What instances do ten
times per second for statistics, or when a path is opened, is less. It needs nightly Rust with
rust-src, and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "target" / "lines"
AFTER_S, FOR_S, ALL_S = 2.0, 2.0, 5.0
LIMIT = 0.25  # touches per message


@dataclass
class Line:
    """A cache line. touches: of each instance, by its place among the threads; code: of each."""

    address: str
    touches: dict[int, tuple[int, int]]  # loads, stores
    code: dict[int, str] = field(default_factory=dict)

    @property
    def second(self) -> int:
        """How often the second of the instances touched it."""
        return sorted(sum(both) for both in self.touches.values())[-2]


def build(host: str) -> Path:
    """The program, instrumented. Raises CalledProcessError."""
    TARGET.mkdir(parents=True, exist_ok=True)
    runtime = TARGET / "runtime.o"
    source = ROOT / "crates" / "engine" / "lines" / "runtime.c"
    subprocess.run(["cc", "-O2", "-c", "-w", source, "-o", runtime], check=True)
    flags = f"-Zsanitizer=thread -Zexternal-clangrt -Cdebuginfo=1 -Clink-arg={runtime}"
    command = ["cargo", "+nightly", "build", "--quiet", "--locked", "--release", "-Zbuild-std"]
    command += ["--target", host, "--target-dir", str(TARGET), "-p", "evener-engine"]
    command += ["--example", "instance_lines"]
    subprocess.run(command, env={**os.environ, "RUSTFLAGS": flags}, check=True, cwd=ROOT)
    return TARGET / host / "release" / "examples" / "instance_lines"


def measure(program: Path, instances: int, comms: int) -> tuple[dict[str, Any], list[Line], float]:
    """What the runtime says of itself, the lines of two instances, messages while it counted."""
    out = TARGET / "lines.json"
    env = {
        **os.environ,
        "EVENER_NET_ENGINE": "udp",
        "EVENER_NET_WORKERS": str(instances),
        "EVENER_NET_IFNAME": "lo",
        "LINES_AFTER": str(AFTER_S),
        "LINES_FOR": str(FOR_S),
        "LINES_OUT": str(out),
    }
    command = [program, str(ALL_S), str(comms)]
    run = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120)
    messages = json.loads(run.stdout)["received"] * FOR_S / ALL_S
    head, *rows = (json.loads(row) for row in out.read_text(encoding="utf-8").splitlines())
    mine = {at for at, name in enumerate(head["threads"]) if name.startswith("evener-udp")}
    lines = []
    for row in rows:
        touches, code = {}, {}
        for at in mine:
            loads, stores = (row[kind].get(str(at), [0, "0"]) for kind in ("loads", "stores"))
            if loads[0] or stores[0]:
                touches[at] = loads[0], stores[0]
                code[at] = stores[1] if stores[0] else loads[1]
        if len(touches) > 1 and any(stores for _, stores in touches.values()):
            lines.append(Line(row["line"], touches, code))
    return head, sorted(lines, key=lambda line: -line.second), messages


def symbol(program: Path, base: str, address: str) -> str:
    """The function at an address, where binutils can tell."""
    if shutil.which("addr2line") is None:
        return f"0x{address}"
    offset = hex(int(address, 16) - int(base, 16) - 1)
    command = ["addr2line", "-fCe", str(program), offset]
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]


def main() -> int:
    """The table; 1 where instances share a line on the way of a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=2, help="of each of two engines (2)")
    parser.add_argument("--comms", type=int, default=4, help="between the engines (4)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    nightly = ["cargo", "+nightly", "--version"]
    if subprocess.run(nightly, capture_output=True).returncode or shutil.which("cc") is None:
        print("skipped: cargo +nightly or cc does not run here")
        print("  fix: rustup toolchain install nightly --component rust-src; install a C compiler")
        return 0
    about = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = next(line.split()[1] for line in about.splitlines() if line.startswith("host:"))
    program = build(host)
    head, lines, messages = measure(program, args.instances, args.comms)
    rows = []
    for line in lines:
        code = {symbol(program, head["base"], one) for one in line.code.values()}
        rows.append(
            {
                "line": line.address,
                "per_message": round(line.second / max(messages, 1), 3),
                "touches": [list(both) for both in line.touches.values()],
                "code": sorted(code),
            }
        )
    bad = [row for row in rows if row["per_message"] > LIMIT]
    print(f"{messages:.0f} messages of 64 KiB, {len(rows)} cache lines that two instances touch")
    print("per message (second instance) | loads and stores of each | code")
    for row in rows[:20]:
        print(f"{row['per_message']:.3f} | {row['touches']} | {', '.join(row['code'])[:120]}")
    if head["lost"]:
        print(f"warning: {head['lost']} touches were not counted: too many threads or lines")
    print(f"{len(bad)} of them more often than {LIMIT} times per message")
    if args.json:
        machine = {"processors": os.cpu_count(), "host": host, "python": platform.python_version()}
        figures = {
            "command": "python scripts/lines.py " + " ".join(sys.argv[1:]),
            "machine": machine,
            "instances": args.instances,
            "comms": args.comms,
            "messages": messages,
            "limit": LIMIT,
            "lines": rows,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if bad or messages < 100 or head["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
