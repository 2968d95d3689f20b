"""Training with states in host memory on the GPUs of one node beside its peers; JSON and a table.

    python benchmarks/zero_gpu.py [--quick] [--only PREFIX,...] [--gpus N] [--json FILE]

A Llama-shaped model (2.69B parameters: 32 layers, width 2560), 8 x 1024 tokens a GPU, blocks
recomputed, clipping at 1.0; --quick: 8 layers. Rows that start with "largest" train one sequence of
1024 tokens in 24 GB of GPU and 110 GB of host memory; "loss" trains a small model for 300 steps
beside an independent plain loop. Each row runs in processes of its own (a peer that runs out of
memory takes nobody with it), one after the other; `--gpus` starts each under torchrun.

Reported: seconds a step from idle to idle over all steps, tokens/s, peak GPU memory of the process
(allocated, reserved, and the driver's figure for the whole GPU), peak host memory (all of them the
largest of the ranks), the plan's prediction, and for Evener where the time of a step went (3 more
steps, recorded). GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_peers as peers
from zero_models import (
    Driver,
    Llama,
    batch_of,
    bind,
    host_peak,
    loss_of,
    memory,
    on_meta,
    timed,
    timed_phase,
    value_of,
)

from evener import zero
from evener.base import optimizers as _optimizers

TRACES = Path(os.environ.get("OUT", "."))


def evener(layers: int, width: int, batch: int, steps: int, **own: Any) -> dict[str, Any]:
    """The engine; `own`: keys of its section of the configuration, and `trace`: a file's name."""
    trace = own.pop("trace", None)
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": peers.HYPER},
        "evener": {"checkpointing": True, "device": "cuda", "loss": "chunked", **own},
    }
    took: dict[str, float] = {}
    moments = torch.bfloat16 if own.get("moments") == "bf16" else torch.float32
    with timed_phase(took, "probe"):
        found = zero.probe(
            torch.device("cuda", torch.cuda.current_device()),
            moments=moments,
            meet=dist.barrier if dist.is_initialized() else lambda: None,
        )
    with timed_phase(took, "initialize"):
        engine, *_ = zero.initialize(
            model=on_meta(layers, width),
            config=config,
            batch=(batch, 1024),
            machine=found.machine,
            weights=value_of,
        )
    plan = engine.plan
    assert plan is not None

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    tokens = batch_of(batch)
    result = timed(step, tokens, steps, engine.drain)
    shares = engine.updated
    engine.record()
    for _ in range(3):
        step(tokens)
    spans = engine.recorded()
    result["where"] = zero.spans.summary(spans)
    rank = int(os.environ.get("RANK", "0"))
    if trace and rank == 0:
        zero.report.write(engine, spans, TRACES / trace, found)
    result |= {
        "parameters": sum(place.numel for place in plan.places),
        "preparation": took,
        "updated": shares,
        "plan": {
            "seconds": plan.step_seconds,
            "bound": plan.bound,
            "gpu_bytes": plan.gpu_bytes,
            "host_bytes": plan.host_bytes,
            "resident": len(plan.resident),
            "streaming": plan.streaming,
            "checkpointing": plan.checkpointing,
            "times": plan.times,
        },
        "machine": dataclasses.asdict(found.machine),
        "host_adam_alone": found.host_adam_alone,
        "pinned": engine.store.host.pinned,
        "communicators": {"bytes": engine.ranks.bytes, "bytes_per_second": engine.ranks.network},
    }
    engine.close()
    return result


def loss_curve(*_: int) -> dict[str, Any]:
    """300 steps of a small model: the engine (all offloaded, both lanes, clipping), the plain loop
    with float32 masters twice (what two runs of the same loop differ by is the noise), and the loop
    in the engine's order of operations ("exact")."""
    shape, count = (4, 512, False), 300

    def tokens(step: int) -> torch.Tensor:
        # A language that can be learnt: each token is a function of the one before, with noise.
        generator = torch.Generator("cuda").manual_seed(step)
        rows = torch.randint(0, 512, (4, 256), device="cuda", generator=generator)
        for place in range(1, rows.shape[1]):
            follow = (rows[:, place - 1] * 7 + 3) % 512
            keep = torch.rand(4, device="cuda", generator=generator) < 0.9
            rows[:, place] = torch.where(keep, follow, rows[:, place])
        return rows

    data = [tokens(step) for step in range(count)]

    def plain(kind: type[peers.Masters]) -> list[float]:
        model = peers.filled(Llama(*shape), torch.bfloat16, "cuda")
        masters = kind(model, 3e-4, 0.1, 1.0)
        for master, (name, parameter) in zip(
            masters.masters, model.named_parameters(), strict=True
        ):
            master.copy_(value_of(name, parameter))
            if kind is peers.Exact:  # halves are rounded away from zero in a split, not to even
                parameter.data.copy_(_optimizers.split(master)[0])
        losses = []
        for rows in data:
            loss = loss_of(model, rows)
            loss.backward()
            masters.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def engine_losses(streaming: bool) -> list[float]:
        config = {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
            "evener": {"checkpointing": True, "device": "cuda"},
        }
        with torch.device("meta"):
            model = Llama(*shape)
        engine, *_ = zero.initialize(
            model=model, config=config, weights=value_of, resident=set(), streaming=streaming
        )
        losses = []
        for rows in data:
            loss = loss_of(engine, rows)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        engine.close()
        return [float(loss) for loss in losses]

    first, second, exact = (plain(k) for k in (peers.Masters, peers.Masters, peers.Exact))
    runs = {"streaming": engine_losses(True), "host": engine_losses(False)}

    def apart(a: list[float], b: list[float]) -> dict[str, float]:
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        tail = sum(a[-50:]) / 50 - sum(b[-50:]) / 50
        return {"largest": max(gaps), "mean": sum(gaps) / len(gaps), "last 50, mean": tail}

    return {
        "plain": first,
        **runs,
        "noise": apart(first, second),
        "exact": {name: apart(exact, losses) for name, losses in runs.items()},
        "two orders of the same sums": apart(first, exact),
        "engine": {name: apart(first, losses) for name, losses in runs.items()},
        "lanes": apart(runs["streaming"], runs["host"]),
    }


def _evener(**own: Any) -> Callable[..., dict[str, Any]]:
    return lambda *shape: evener(*shape, **own)


def _largest(layers: int, width: int, **own: Any) -> Callable[..., dict[str, Any]]:
    budget = {"gpu": 24_000_000_000, "host": 110_000_000_000}
    return lambda *_: evener(layers, width, 1, 3, budget=budget, **own)


SMALL = {"gpu": 8_000_000_000}
ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "evener, all offloaded, 8 GB": _evener(budget=SMALL, trace="zero_offloaded.json"),
    "evener, bf16 moments, 8 GB": _evener(budget=SMALL, moments="bf16"),
    "evener, 24 GB": _evener(budget={"gpu": 24_000_000_000}),
    "resident all-bf16 (the bound)": peers.resident,
    "largest, fp32 states": _largest(42, 4096),
    "largest, bf16 moments": _largest(37, 5120, moments="bf16"),
    "loss": loss_curve,
    "evener, cores only, 8 GB": _evener(budget=SMALL, balance=False),
    "FSDP2 CPU offload": peers.fsdp,
    "DeepSpeed ZeRO-3 offload": peers.deepspeed,
    "largest of DeepSpeed, pinned": lambda *_: peers.deepspeed(26, 3840, 1, 2),
    "largest of DeepSpeed, pageable": lambda *_: peers.deepspeed(26, 3840, 1, 2, pin=False),
}


def run_one(name: str, layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """A row, in this process."""
    bind()
    with Driver() as driver:
        found = ROWS[name](layers, width, batch, steps)
        found |= memory(driver, found)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def show(name: str, row: dict[str, Any]) -> None:
    """A line of the table, and for Evener where the time went."""

    def gb(value: float) -> str:
        return f"{value / 1e9:.2f}"

    def seconds(times: dict[str, float]) -> str:
        return ", ".join(f"{key} {value:.3f}" for key, value in times.items())

    if "failed" in row:
        said = f"; host {gb(row['host_until_then'])} GB" if row.get("host_until_then") else ""
        print(f"{name:30} failed: {row['failed']}{said}", flush=True)
        return
    if "noise" in row:
        print(f"{name:30} engine {row['engine']}, noise {row['noise']}, exact {row['exact']}")
        return
    print(
        f"{name:30} {row['seconds']:.3f} s {row['tokens_per_second']:8,.0f} tokens/s  GPU "
        f"{gb(row['gpu_allocated'])}/{gb(row['gpu_reserved'])}/{gb(row['gpu_driver'])} GB  "
        f"host {gb(row['host'])} GB, training {gb(row['host_training'])}  row {row['row_s']:.0f} s",
        flush=True,
    )
    for rank, one in enumerate(row.get("each", [])):
        print(
            f"    rank {rank}: GPU {gb(one['gpu_reserved'])}/{gb(one['gpu_driver'])} GB, host "
            f"{gb(one['host_training'])} GB, contexts on GPUs {one['contexts on GPUs']}"
        )
    if not (plan := row.get("plan")):
        return
    where, share, machine = row["where"], row["updated"], row["machine"]
    streamed = share["stream"] / max(1, sum(share.values()))
    print(
        f"    plan {plan['seconds']:.3f} s, bound by {plan['bound']}: "
        f"{plan['seconds'] / row['seconds']:.2f} of it reached; GPU {gb(plan['gpu_bytes'])} GB, "
        f"host {gb(plan['host_bytes'])} GB, communicators "
        f"{gb(row['communicators']['bytes'])} GB at {gb(row['communicators']['bytes_per_second'])} "
        "GB/s, "
        f"{plan['resident']} chunks resident, "
        f"streaming {plan['streaming']}"
    )
    print("    planned: " + seconds(plan["times"]))
    print(
        f"    recorded step {where['step']:.3f}: forward {where['forward']:.3f}, "
        f"backward {where['backward']:.3f}, optimizer {where['optimizer']:.3f} "
        f"(exposed {where['exposed optimizer']:.3f}, streamed {streamed:.0%}), "
        f"copies {where['transfers']:.3f} (hidden {where['transfers hidden']:.0%}), "
        f"gathers {where['communication']:.3f} (hidden {where['communication hidden']:.0%})"
    )
    print("    busy: " + seconds(where["busy"]) + "; waits: " + seconds(where["waits"]))
    print(
        f"    probe, G parameters/s: cores {gb(machine['host_adam'])} (alone "
        f"{gb(row['host_adam_alone'])}), both lanes {gb(machine['balanced'])}, GPU "
        f"{gb(machine['device_adam'])}; PCIe {gb(machine['h2d'])}/{gb(machine['d2h'])} GB/s; "
        f"prepared: {seconds(row['preparation'])}",
        flush=True,
    )


def main() -> None:
    """Parse, run the rows, write the record after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 layers, 5 steps")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", help="rows whose names begin so, separated by ;")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150, help="seconds for a row")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/zero_gpu.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers = arguments.layers or (8 if arguments.quick else 32)
    steps = arguments.steps or (5 if arguments.quick else 8)
    if arguments.one:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        found = run_one(arguments.one, layers, arguments.width, arguments.batch, steps)
        if os.environ.get("RANK", "0") == "0":
            print("RESULT " + json.dumps(found, default=str), flush=True)
        return
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one")
    said = [*sys.argv[1:]]
    if "--json" in said:
        at = said.index("--json")
        del said[at : at + 2]  # where this machine keeps its files is no part of the figure
    wanted = arguments.only.split(";") if arguments.only else [""]
    record: dict[str, Any] = {
        "command": "python benchmarks/zero_gpu.py " + shlex.join(said),
        "gpu": torch.cuda.get_device_name(),
        "gpus": arguments.gpus,
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "layers": layers,
        "width": arguments.width,
        "batch": arguments.batch,
        "steps": steps,
        "rows": {},
    }
    for name in ROWS:
        if not any(name.startswith(start) for start in wanted):
            continue
        command = [sys.executable]
        if arguments.gpus > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={arguments.gpus}"]
        command += [__file__, "--one", name, "--layers", str(layers), "--steps", str(steps)]
        command += ["--width", str(arguments.width), "--batch", str(arguments.batch)]
        begun = time.perf_counter()
        row: dict[str, Any]
        # torchrun would give each rank's OpenMP one thread.
        threads = str(max(1, record["cpus"] // arguments.gpus))
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ},
        ) as process:
            try:
                text, _ = process.communicate(timeout=arguments.limit)
                lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
                status = process.returncode
                row = json.loads(lines[-1][7:]) if lines else {"failed": f"exit {status}"}
            except subprocess.TimeoutExpired:
                # Of a row on one GPU, which is this process and no launcher.
                peak = host_peak(process.pid) if arguments.gpus == 1 else 0
                os.killpg(process.pid, signal.SIGKILL)
                row = {"failed": f"ran past {arguments.limit:.0f} s", "host_until_then": peak}
        row["row_s"] = time.perf_counter() - begun
        record["rows"][name] = row
        show(name, row)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
