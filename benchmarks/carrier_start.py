"""How soon after connecting the staged transport is as fast as it will be, against the library.

    evener lab run --spec 2x1@2gbit -- python benchmarks/carrier_start.py --json FILE

Run as ranks. Each turn connects anew and times all-gathers of the size by which `EVENER_OUTER=auto`
decides (`evener.comm.transport`): a few by NCCL or Gloo, many by the transport; the slowest rank's
time counts. "first" is the best of one round of the decision, "settled" the best of all that it may
make.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from evener.comm import groups, transport
from evener.comm.options import Options

_ROUND = transport._WARM + transport._TIMED
_CALLS = _ROUND * transport._ROUNDS


def series(call: Callable[[], object], count: int, control: groups.Group) -> list[float]:
    """Milliseconds of each call: the slowest rank's."""
    times = []
    for _ in range(count):
        dist.barrier(group=control.handle)
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    everyone: list[list[float]] = [[]] * control.size
    dist.all_gather_object(everyone, times, group=control.handle)
    return [max(call) for call in zip(*everyone, strict=True)]


def main() -> None:
    """All turns; rank 0 tells."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = dist.get_world_size()
    n = transport.MEASURED_BYTES // (size - 1)
    payload = torch.zeros(n, dtype=torch.uint8, device=device)
    received = torch.empty(n * size, dtype=torch.uint8, device=device)
    turns = []
    for _ in range(given.turns):
        # Never given back: the next one connects anew.
        made = groups.Communicators(Options(outer="staged"), device)
        outer, control = made.route.outer, made.control
        own = outer.transport
        if own is None:
            raise SystemExit(made.route.carrier.reason)
        library = series(
            lambda outer=outer: dist.all_gather_into_tensor(  # type: ignore[misc]
                received, payload, group=outer.handle
            ),
            _ROUND,
            control,
        )
        staged = series(lambda own=own: own.all_gather(received, payload), _CALLS, control)  # type: ignore[misc]
        found = {
            "library_ms": min(library[transport._WARM :]),
            "first_ms": min(staged[transport._WARM : _ROUND]),
            "settled_ms": min(staged[transport._WARM :]),
        }
        turns.append({**found, "library": library, "staged": staged})
        if dist.get_rank() == 0:
            said = " ".join(f"{name} {ms:.2f}" for name, ms in found.items())
            ratio = found["first_ms"] / found["settled_ms"]
            print(f"turn {len(turns)}: {said}, first/settled {ratio:.2f}", flush=True)
    if dist.get_rank() == 0 and given.json is not None:
        record = {
            "schema": "evener.carrier_start/1",
            "bytes": transport.MEASURED_BYTES,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "ranks": size,
            "preference": transport.PREFERENCE,
            "turns": turns,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # transports that were not given back need no end


if __name__ == "__main__":
    main()
