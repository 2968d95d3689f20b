"""Latency of `evener embedding serve` while deltas arrive, beside the same without.

    python benchmarks/embedding_serve.py --json benchmarks/results/embedding-serve.json

A server in a process of its own, clients on connections that stay open. Deltas are written before;
while they count, one arrives (is renamed into the folder) every `--every` seconds. Rounds with and
without deltas take turns. Every row of version v is v in all columns, so an answer that mixes two
versions of a row is seen.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from evener.embedding import Options, Sgd, Store, Zeros


def client(
    port: int, keys: list[np.ndarray], dim: int, end: float, took: list[float], mixed: list[int]
) -> None:
    """Asks until `end`."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    number = 0
    while time.perf_counter() < end:
        body = keys[number % len(keys)].tobytes()
        number += 1
        began = time.perf_counter()
        connection.request("POST", "/lookup", body)
        answer = connection.getresponse().read()
        took.append((time.perf_counter() - began) * 1e3)
        rows = np.frombuffer(answer, "<f4").reshape(-1, dim)
        if (rows != rows[:, :1]).any():
            mixed.append(number)
    connection.close()


def main() -> None:
    """Rounds with and without deltas."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--keys", type=int, default=256, help="per request")
    parser.add_argument("--changed", type=int, default=10_000, help="rows per delta")
    parser.add_argument("--every", type=float, default=0.1, help="seconds between deltas")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    root = Path(tempfile.mkdtemp(prefix="evener-serve-"))
    ready, folder = root / "ready", root / "rows"
    store = Store("serve", Options(given.dim, optimizer=Sgd(), init=Zeros()))
    every = np.arange(given.rows)
    for start in range(0, given.rows, 1 << 17):
        part = every[start : start + (1 << 17)]
        store.upsert(part, np.zeros((len(part), given.dim), np.float32), 0)
    store.snapshot(ready)
    shutil.copytree(ready, folder)
    for version in range(1, int(given.rounds * given.seconds / given.every) + 1):
        changed = draw.choice(given.rows, given.changed, replace=False)
        values = np.full((given.changed, given.dim), version, np.float32)
        store.upsert(changed, values, version)
        store.delta(ready)
    deltas = sorted(ready.glob("delta-*.evs"))
    command = [sys.executable, "-m", "evener", "embedding", "serve", str(folder)]
    server = subprocess.Popen(
        [*command, "--address", "127.0.0.1:0", "--every", "0.02"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        port = int(line.split("http://127.0.0.1:")[1].split()[0].split("/")[0].rstrip(".,"))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        keys = [draw.integers(0, given.rows, given.keys) for _ in range(64)]
        took: dict[str, list[float]] = {"without deltas": [], "with deltas": []}
        mixed: list[int] = []
        arrived = 0
        client(port, keys, given.dim, time.perf_counter() + 1.0, [], mixed)  # warms
        for _ in range(given.rounds):
            for name, latencies in took.items():
                end = time.perf_counter() + given.seconds
                clients = [
                    threading.Thread(target=client, args=(port, keys, given.dim, end, each, mixed))
                    for each in [latencies] * given.clients
                ]
                for one in clients:
                    one.start()
                while name == "with deltas" and time.perf_counter() < end - given.every:
                    if arrived < len(deltas):
                        deltas[arrived].rename(folder / deltas[arrived].name)
                        arrived += 1
                    time.sleep(given.every)
                for one in clients:
                    one.join()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/stats")
        served = json.loads(connection.getresponse().read())["served"]
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(root)
    found: dict[str, Any] = {
        name: {
            "requests": len(each),
            **{f"p{q}_ms": round(float(np.percentile(each, q)), 3) for q in (50, 99)},
        }
        for name, each in took.items()
    }
    ratio = found["with deltas"]["p99_ms"] / found["without deltas"]["p99_ms"]
    for name, one in found.items():
        print(f"{name:16} {one}")
    print(f"p99 with deltas: {ratio:.2f} x; {arrived} deltas came, {served['deltas']} were taken")
    print(f"answers that mix two versions of a row: {len(mixed)}")
    if given.json:
        result = {
            "arguments": {n: v for n, v in vars(given).items() if n != "json"},
            "machine": {"cpus": len(os.sched_getaffinity(0)), "arch": platform.machine()},
            "latency": found,
            "p99_ratio": round(ratio, 3),
            "deltas": served["deltas"],
            "mixed": len(mixed),
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
