"""Training with states in host memory on the GPUs of one node beside its peers; JSON and a table.

    python benchmarks/zero_gpu.py [--only PREFIX;...] [--gpus N] [--json FILE]

A Llama-shaped model (2.69B parameters: 32 layers, width 2560), 8 x 1024 tokens a GPU, blocks
recomputed, clipping at 1.0. Rows that start with "largest" train one sequence of 1024 tokens in
24 GB of GPU and 110 GB of host memory; those with "whole" train 8 sequences in 76 and 110 GB; those
with "SSD" have a file for states beside these; those with "long" train one long sequence of 8.0B
parameters there; those with "4B", "8B" and "14B" are what Evener and its peers make of the same
machine. Each row runs in processes of its own (a peer that runs out of memory takes nobody with
it), one after the other; `--gpus` starts each under torchrun.

Reported: seconds a step from idle to idle over all steps, tokens/s, peak GPU memory of the process
(allocated, reserved, and the driver's figure for the whole GPU), peak host memory (all of them the
largest of the ranks), the plan's prediction, and for Evener where the time of a step went (3 more
steps, recorded). GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import zero_peers as peers
from zero_models import (
    GB,
    HYPER,
    Driver,
    Llama,
    batch_of,
    loss_of,
    memory,
    on_meta,
    planned,
    share_cores,
    timed,
    value_of,
)  # fmt: skip

from evener import zero
from evener.zero.config import MOMENTS

LAYERS, WIDTH, BATCH, STEPS = 32, 2560, 8, 8


def evener(
    layers: int,
    width: int,
    batch: int,
    steps: int,
    lr: float = HYPER["lr"],
    length: int = 1024,
    warmup: int = 3,
    recorded: int = 3,
    shape: dict[str, int] | None = None,
    **own: Any,
) -> dict[str, Any]:
    """The engine; `own`: keys of its section of the configuration."""
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0 if own.get("optimizer_in_backward") else 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER | {"lr": lr}},
        "evener": {"checkpointing": True, "device": "cuda", "loss": "chunked", **own},
    }
    moments = MOMENTS[own.get("moments", "fp32")]
    begun = time.perf_counter()
    found = zero.probe(
        torch.device("cuda", torch.cuda.current_device()),
        moments=moments,
        meet=dist.barrier if dist.is_initialized() else lambda: None,
    )
    probed = time.perf_counter()
    engine, *_ = zero.initialize(
        model=on_meta(layers, width, **(shape or {})),
        config=config,
        batch=(batch, length),
        machine=found.machine,
        weights=value_of,
    )
    ready = time.perf_counter()
    tokens = batch_of(batch, length)

    def step() -> torch.Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    result = timed(step, tokens.numel(), steps, engine.drain, warmup)
    shares = engine.updated
    if recorded:
        engine.record()
        for _ in range(recorded):
            step()
        result["where"] = zero.spans.summary(engine.recorded())
    result |= {
        "preparation": {"probe": probed - begun, "initialize": ready - probed},
        "updated": shares,
        "plan": planned(engine),
        "machine": dataclasses.asdict(found.machine),
        "host_adam_alone": found.host_adam_alone,
        "pinned": engine.store.host.pinned,
        "communicators": {"bytes": engine.ranks.bytes, "bytes_per_second": engine.ranks.network},
    }
    engine.close()
    return result


def peer(system: Callable[..., dict[str, Any]], **how: Any) -> Callable[..., dict[str, Any]]:
    """A row of a peer, on the own model."""

    def row(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
        tokens = batch_of(batch)
        task = peers.Task(
            lambda: on_meta(layers, width, recompute=True),
            lambda: Llama(layers, width, recompute=True), value_of,
            lambda model: loss_of(model, tokens), tokens.numel(), batch, drawn=False,
        )  # fmt: skip
        return system(task, steps, **how)

    return row


def _evener(**own: Any) -> Callable[..., dict[str, Any]]:
    return functools.partial(evener, **own)


def _largest(layers: int, width: int, **own: Any) -> Callable[..., dict[str, Any]]:
    budget = {"gpu": 24 * GB, "host": 110 * GB}
    return lambda *_: evener(layers, width, 1, 3, budget=budget, **own)


def _whole(layers: int, **own: Any) -> Callable[..., dict[str, Any]]:
    """The whole of a H100 (76 GB of it for the engine), 8 x 1024 tokens. A model of this depth
    does not bear the other rows' learning rate from its first step on."""
    own = {"budget": {"gpu": 76 * GB, "host": 110 * GB}, "checkpointing": "auto", **own}
    return lambda *_: evener(layers, 6144, BATCH, **{"steps": 3, "lr": 1e-6, **own})


def _ssd(layers: int) -> Callable[..., dict[str, Any]]:
    """As `_whole`, and 150 GB of a file in the folder for temporary files. Two steps after one."""
    budget = {"gpu": 76 * GB, "host": 110 * GB, "ssd": f"{tempfile.gettempdir()}:150GB"}
    how = {"moments": "int8", "master": False, "optimizer_in_backward": True}
    return _whole(layers, steps=2, warmup=1, recorded=0, budget=budget, **how)


_SIZES = {"4B": (32, 3072), "8B": (38, 4096), "14B": (44, 5120)}
"""Layers and width of 3.8B, 8.0B and 14.3B parameters. DeepSpeed holds the first in 128 GB of host
memory with FP32 states, and the second with BF16 ones."""


def _beside(
    size: str, rows: int = BATCH, host: int = 110, **own: Any
) -> Callable[..., dict[str, Any]]:
    """Beside the peers: 1024 tokens a row, the whole GPU and `host` GB of host memory."""
    own = {"budget": {"gpu": 76 * GB, "host": host * GB}, "checkpointing": True, **own}
    return lambda *_: evener(*_SIZES[size], rows, 3, lr=_rate(size), **own)


def _rate(size: str) -> float:
    return 1e-6 if size == "14B" else HYPER["lr"]


def _peer(size: str, **how: Any) -> Callable[..., dict[str, Any]]:
    how["lr"] = _rate(size)
    return lambda *_: peer(peers.deepspeed, **how)(*_SIZES[size], BATCH, 3)


def _megatrain(size: str, rows: int = BATCH) -> Callable[..., dict[str, Any]]:
    return lambda *_: peers.megatrain(*_SIZES[size], rows, 3)


def _long(length: int, tiles: bool, **how: int) -> Callable[..., dict[str, Any]]:
    """One sequence on the whole of a H100; 38 layers of width 4096 are 8.0B parameters. A step of
    65,536 tokens and more takes so long that no second warm-up would change its time."""
    return _sequence(38, length, tiles, **how)


def _two(length: int) -> Callable[..., dict[str, Any]]:
    """Two blocks of Llama 3 8B's shape, whose inputs wait on the host: what all 32 take of a GPU,
    in a sixteenth of their time. One step, without a warm-up."""
    shape = {"shared": 4, "inner": 14336}
    how: dict[str, Any] = {"checkpointing": "offload", "rehearse": False, "shape": shape}
    return _sequence(2, length, True, warmup=0, **how)


def _sequence(layers: int, length: int, tiles: bool, **how: Any) -> Callable[..., dict[str, Any]]:
    how = {"warmup": 1, "recorded": 0} | how if length > 1 << 15 else how
    own: dict[str, Any] = {
        "budget": {"gpu": 76 * GB, "host": 110 * GB},
        "checkpointing": "auto",
        "loss": "fused",
        "moments": "int8",
        "master": False,
        "tiles": tiles,
    }
    steps = 2 if length <= 1 << 15 else 1
    return lambda *_: evener(layers, 4096, 1, steps, lr=1e-6, length=length, **{**own, **how})


SMALL = {"gpu": 8 * GB}
ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "evener, all offloaded, 8 GB": _evener(budget=SMALL),
    "evener, bf16 moments, 8 GB": _evener(budget=SMALL, moments="bf16"),
    "evener, int8 moments, 8 GB": _evener(budget=SMALL, moments="int8"),
    "evener, int8 moments, no copy, 8 GB": _evener(budget=SMALL, moments="int8", master=False),
    "evener, 24 GB": _evener(budget={"gpu": 24 * GB}),
    "resident all-bf16 (the bound)": peer(peers.resident),
    "largest, fp32 states": _largest(42, 4096),
    "largest, bf16 moments": _largest(37, 5120, moments="bf16"),
    "whole, 11.3B, fp32 states": _whole(24),
    "whole, 18.5B, int8 moments": _whole(40, moments="int8"),
    "whole, 18.5B, int8 moments, no copy": _whole(40, moments="int8", master=False),
    "whole, 27.6B, int8 moments, no copy": _whole(60, moments="int8", master=False),
    "whole, 27.6B, int8 moments, no copy, in backward": _whole(
        60, moments="int8", master=False, optimizer_in_backward=True
    ),
    "SSD, 40.3B, int8 moments, no copy, in backward": _ssd(88),
    "SSD, 61.1B, int8 moments, no copy, in backward": _ssd(134),
    "long, 32k, whole": _long(1 << 15, tiles=False),
    "long, 32k, tiles": _long(1 << 15, tiles=True),
    "long, 64k, tiles": _long(1 << 16, tiles=True),
    "long, 128k, tiles": _long(1 << 17, tiles=True),
    "long, 256k, tiles": _long(1 << 18, tiles=True, warmup=0),
    "long, 512k, two blocks": _two(1 << 19),
    "long, 768k, two blocks": _two(3 << 18),
    "long, 1M, two blocks": _two(1_000_000),
    "4B, evener": _beside("4B"),
    "4B, DeepSpeed": _peer("4B"),
    "4B, SuperOffload": _peer("4B", way="superoffload"),
    "4B, ZenFlow": _peer("4B", way="zenflow"),
    "4B, MegaTrain": _megatrain("4B"),
    "8B, evener": _beside("8B"),
    "8B, evener, bf16 moments, no copy": _beside("8B", moments="bf16", master=False),
    "8B, evener, 16 GB": _beside("8B", budget={"gpu": 16 * GB, "host": 120 * GB}),
    "8B, evener, 64 rows": _beside("8B", 64),
    "8B, DeepSpeed, FP32 states": _peer("8B"),
    "8B, DeepSpeed, all bf16": _peer("8B", half=True),
    "8B, SuperOffload": _peer("8B", way="superoffload"),
    "8B, ZenFlow": _peer("8B", way="zenflow"),
    "8B, MegaTrain": _megatrain("8B"),
    "8B, MegaTrain, 64 rows": _megatrain("8B", 64),
    "14B, evener": _beside("14B", host=230),
    "14B, evener, 64 rows": _beside("14B", 64, host=230),
    "14B, evener, bf16 moments, no copy": _beside("14B", moments="bf16", master=False),
    "14B, DeepSpeed, FP32 states": _peer("14B"),
    "14B, DeepSpeed, all bf16": _peer("14B", half=True),
    "14B, SuperOffload": _peer("14B", way="superoffload"),
    "14B, MegaTrain": _megatrain("14B"),
    "14B, MegaTrain, 64 rows": _megatrain("14B", 64),
    "FSDP2 CPU offload": peer(peers.fsdp, prefetch=False),
    "DeepSpeed ZeRO-3 offload": peer(peers.deepspeed),
    "largest of DeepSpeed, pinned": lambda *_: peer(peers.deepspeed)(26, 3840, 1, 2),
    "largest of DeepSpeed, pageable": lambda *_: peer(peers.deepspeed, pin=False)(26, 3840, 1, 2),
}


def run_one(given: argparse.Namespace) -> None:
    """A row, in this process."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if "LOCAL_RANK" in os.environ:
        share_cores(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Without device_id: NCCL's communicator of the default group is made only if it is used.
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.cuda.set_device(0)
    with Driver() as driver:
        found = ROWS[given.one](LAYERS, WIDTH, BATCH, STEPS)
        found |= memory(driver, found)
    if dist.is_initialized():
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        harness.say(**found)


def show(name: str, row: dict[str, Any]) -> None:
    """A line of the table, one a rank, and for Evener where the time went."""
    keys = ("failed", "seconds", "tokens_per_second", "gpu_allocated", "gpu_reserved", "gpu_driver",
            "host", "host_training", "row_s")  # fmt: skip
    print(name, {key: row[key] for key in keys if key in row}, flush=True)
    for rank, one in enumerate(row.get("each", [])):
        print(f"    rank {rank}: {one}", flush=True)
    if plan := row.get("plan"):
        print(
            f"    plan: {plan['planned_seconds'] / row['seconds']:.2f} of it reached: {plan}\n"
            f"    recorded: {row.get('where')}",
            flush=True,
        )


def main() -> None:
    """Parse, run the rows, write the record after each."""
    parser = harness.arguments(__doc__, json="zero_gpu.json")
    parser.add_argument("--only", default="", help="rows whose names begin so, separated by ;")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150, help="seconds for a row")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given)
        return
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one")
    launcher = [sys.executable]
    if given.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={given.gpus}"]
    # torchrun would give each rank's OpenMP one thread.
    threads = str(max(1, len(os.sched_getaffinity(0)) // given.gpus))
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    rows: dict[str, Any] = {}
    for name in ROWS:
        if not name.startswith(tuple(given.only.split(";"))):
            continue
        job = harness.again("--one", name, limit=given.limit, env=env, launcher=launcher)
        rows[name] = {**job.row, "row_s": job.seconds}
        if "failed" in job.row and given.gpus == 1:  # else the launcher's memory
            rows[name]["host_until_then"] = job.peak
        show(name, rows[name])
        harness.keep(given, ["deepspeed"], rows=rows)


if __name__ == "__main__":
    main()
