"""The compressors' kernels against the memory they must move; JSON and a table.

    python benchmarks/compress_kernels.py [--elements 64M] [--repeats 20] [--device cuda]
        [--json FILE] [--only REGEX]

Each kernel's time is set against the least number of bytes that it must read and write, at the
bandwidth that a plain copy of the same arrays reaches on this device in the same run; torch.topk of
the same length stands beside top-k. Gradients change from step to step, as a training's do, and
residuals grow as in its first steps. Medians over the repeats. On a GPU that is the device's time:
all calls are enqueued behind a pause, so that the device never waits for the host; what the host
takes to enqueue one call stands beside it.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from evener.base.units import parse_size
from evener.comm import wires
from evener.comm.codecs import casts, chunks, int4, int8, topk
from evener.comm.codecs.payload import Payload
from evener.comm.options import Options
from evener.comm.state import Matrix, ShardState

RATIO = 0.01
PEERS = 2


def timed(
    call: Callable[[int], object], repeats: int, device: torch.device
) -> tuple[list[float], float]:
    """Seconds of each of `repeats` calls, after three that warm up, and the host's, median."""
    for i in range(3):
        call(i)
    found = []
    if device.type != "cuda":
        for i in range(repeats):
            # Processor time, so that a busy machine changes little.
            began = time.process_time()
            call(i)
            found.append(time.process_time() - began)
        return found, statistics.median(found)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call(0)
    each = time.perf_counter() - began
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    # Clock cycles, for at least as long as the host needs for all calls.
    torch.cuda._sleep(int((0.005 + 2 * repeats * each) * 2e9))
    events[0].record()
    for i in range(repeats):
        began = time.perf_counter()
        call(i)
        found.append(time.perf_counter() - began)
        events[i + 1].record()
    waited = not events[0].query()  # the pause was long enough
    torch.cuda.synchronize(device)
    if not waited:
        print("the host was slower than the pause: the next row's time is partly the host's")
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return seconds, statistics.median(found)


def kernels(n: int, device: torch.device) -> Iterator[tuple[str, Callable[[int], object], int]]:
    """Name, one call, and the least bytes that it must move."""
    gradients = [torch.randn(n, device=device) for _ in range(3)]
    out = torch.empty(n, device=device)
    yield "copy", lambda i: out.copy_(gradients[i % 3]), 8 * n

    k = topk.entries(n, RATIO)
    residual = torch.zeros(n, device=device)
    for name, dtype in (("top-k", torch.float32), ("top-k, FP16 values", torch.float16)):
        values = torch.empty(k, dtype=dtype, device=device)
        indices = torch.empty(k, dtype=torch.int32, device=device)
        yield (
            name,
            lambda i, v=values, at=indices: topk.select(gradients[i % 3], residual, v, at),
            12 * n + k * (4 + dtype.itemsize),
        )
    yield "add top-k entries", lambda _: topk.add_entries(out, values, indices, 0.5), 14 * k
    yield "torch.topk", lambda i: torch.topk(gradients[i % 3].abs(), k), 4 * n + 12 * k

    per_chunk = chunks.entries(RATIO)
    size = -(-Payload.size(n, per_chunk) // 16) * 16
    received = torch.empty(PEERS, size, dtype=torch.uint8, device=device)
    payload = Payload.of(received[0], n, per_chunk)
    residual = torch.zeros(n, device=device)
    yield (
        "top-k in chunks",
        lambda i: chunks.select(gradients[i % 3], residual, payload),
        12 * n + size,
    )
    received[1] = received[0]
    yield (
        f"add {PEERS} ranks' chunks",
        lambda _: chunks.add_in_order(received, per_chunk, 0.5, out),
        4 * n + PEERS * size,
    )

    m = int8.room(n)
    codes = torch.empty(PEERS, m, dtype=torch.int8, device=device)
    scales = torch.empty(PEERS, m // int8.BLOCK, device=device)
    moved = n + 4 * (m // int8.BLOCK)
    yield (
        "INT8 quantise, error feedback",
        lambda i: int8.quantize(gradients[i % 3], residual, codes[0], scales[0], i),
        12 * n + moved,
    )
    yield (
        "INT8 quantise",
        lambda i: int8.quantize(gradients[i % 3], None, codes[0], scales[0], i),
        4 * n + moved,
    )
    codes[1], scales[1] = codes[0], scales[0]
    yield (
        f"INT8 add {PEERS} ranks",
        lambda _: int8.dequantize_sum(codes, scales, 0.5, out),
        4 * n + PEERS * moved,
    )

    m = int4.room(n)
    packed = torch.empty(PEERS, m // 2, dtype=torch.uint8, device=device)
    steps = torch.empty(PEERS, m // int4.BLOCK, device=device)
    moved = m // 2 + 4 * (m // int4.BLOCK)
    yield (
        "INT4 quantise, error feedback",
        lambda i: int4.quantize(gradients[i % 3], residual, packed[0], steps[0]),
        12 * n + moved,
    )
    packed[1], steps[1] = packed[0], steps[0]
    yield (
        f"INT4 add {PEERS} ranks",
        lambda _: int4.dequantize_sum(packed, steps, 0.5, out),
        4 * n + PEERS * moved,
    )

    # All of a form but the network: of one square matrix, and of 64 of different shapes.
    alone = types.SimpleNamespace(size=PEERS, rank=0, all_reduce=lambda *_: None)
    scaling = types.SimpleNamespace(outer=0.5)
    route: Any = types.SimpleNamespace(outer=alone, scaling=scaling, scatter=None)
    side = math.isqrt(n)
    edge = math.isqrt(n // 80)
    many, at = [], 0
    for i in range(64):
        many.append(Matrix(at, edge + i, edge))
        at += (edge + i) * edge
    for name, matrices in (("one matrix", [Matrix(0, side, side)]), ("64 matrices", many)):
        matrices = [m for m in matrices if m.offset + m.rows * m.columns <= n]
        for rank in (1, 4):
            wire = wires.get(f"lowrank{rank}")(route, Options())
            state = ShardState(0, matrices=tuple(matrices))

            def exchange(i: int, wire: wires.Wire = wire, state: ShardState = state) -> None:
                out.copy_(gradients[i % 3])  # it works in place
                wire.exchange(out, state)

            yield f"low rank {rank}, {name}, and a copy", exchange, 24 * n

    half = torch.empty(n, dtype=torch.float16, device=device)
    yield "FP16 pack", lambda i: casts.narrow(gradients[i % 3], 0.5, half), 6 * n
    yield "FP16 unpack", lambda _: casts.widen(half, 1.0, out), 6 * n
    bhalf = torch.empty(n, dtype=torch.bfloat16, device=device)
    yield "BF16 pack", lambda i: casts.narrow(gradients[i % 3], 0.5, bhalf), 6 * n
    yield "BF16 unpack", lambda _: casts.widen(bhalf, 1.0, out), 6 * n


def main() -> None:
    """Measure, print, write."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--elements", type=parse_size, default=parse_size("64M"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="names to measure, a regular expression")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the kernels, which run on one thread
    rows: list[dict[str, Any]] = []
    bandwidth, torch_topk = 0.0, 0.0
    for name, call, least in kernels(given.elements, device):
        if name != "copy" and not re.search(given.only, name):
            continue
        try:
            seconds, host = timed(call, given.repeats, device)
        except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
            print(f"{name}: {type(error).__name__}: {error}")
            rows.append({"name": name, "error": str(error)[:500]})
            continue
        median = statistics.median(seconds)
        bandwidth = least / median if name == "copy" else bandwidth
        torch_topk = median if name == "torch.topk" else torch_topk
        rows.append({
            "name": name,
            "median_s": median,
            "fastest_s": min(seconds),
            "slowest_s": max(seconds),
            "host_s": host,
            "least_bytes": least,
            "share_of_copy": least / median / bandwidth,
        })  # fmt: skip
    shown = []
    for row in rows:
        if "error" not in row:
            ratio = torch_topk / row["median_s"] if row["name"].startswith("top-k") else None
            row["torch_topk_ratio"] = ratio or None
            times = (1e3 * row["median_s"], f"{row['share_of_copy']:.0%}", 1e3 * row["host_s"])
            shown.append([row["name"], *times, row["torch_topk_ratio"]])
    print(f"{given.elements} elements on {device}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    print(harness.show(["", "ms", "of copy", "host ms", "x torch.topk"], shown))
    harness.keep(given, bandwidth=bandwidth, rows=rows)


if __name__ == "__main__":
    main()
