"""Models of transformers under Evener, DeepSpeed ZeRO-3 offload and FSDP2 CPU offload: one GPU.

    python benchmarks/zero_peers_zoo.py [--budget-s 230] [--only PREFIX;...] [--gpu 24] [--json F]

Llama 2.7B, Qwen3 4B, a Mixtral of 2.2B and T5 3B (the shapes of zero_zoo.py), 8 rows a batch, bf16
with float32 masters, AdamW, clipping at 1.0. The peers are tuned: pinned memory, communication and
copies that overlap, blocks recomputed, DeepSpeed's own CPU Adam (compiled first, outside of what is
measured), torch's fused CPU AdamW and prefetched blocks for FSDP2. They may take the whole GPU;
Evener gets `--gpu` GB. Each row runs in a process of its own; a row that the file has is not run
again, so the command may be given again until all are there. --tiny: small models on a CPU, which
measures nothing. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_zoo as zoo
from torch import nn

from evener import zero

GB = 1_000_000_000
ROWS = 8
WARMUP, STEPS = 3, 4
HYPER: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
MODELS = ("llama 2.7B", "qwen3 4B", "mixtral 2.2B", "t5 3B")

Step = Callable[[], torch.Tensor]


def _cuda() -> bool:
    return torch.cuda.is_available()


def _batch(name: str, model: nn.Module, tiny: bool) -> dict[str, torch.Tensor]:
    return zoo.batch_of(name, ROWS, model, "cuda" if _cuda() else "cpu", tiny)


def _idle() -> None:
    if _cuda():
        torch.cuda.synchronize()


def timed(step: Step, tokens: int, finish: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Seconds a step over some steps in a row, from idle to idle, after the warm-up."""
    losses = [step() for _ in range(WARMUP)]
    finish()
    _idle()
    begun = time.perf_counter()
    losses += [step() for _ in range(STEPS)]
    finish()
    _idle()
    seconds = (time.perf_counter() - begun) / STEPS
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "losses": [float(x) for x in losses],
        "gpu_allocated": torch.cuda.max_memory_allocated() if _cuda() else 0,
        "gpu_reserved": torch.cuda.max_memory_reserved() if _cuda() else 0,
        "host_peak": zoo.host_peak(),
    }


def evener(name: str, tiny: bool, gpu: float) -> dict[str, Any]:
    """As a user has it: nothing is tuned, checkpointing is "auto"."""
    model = zoo.model_of(name, tiny)
    batch = _batch(name, model, tiny)
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "evener": {
            "checkpointing": "auto",
            "device": "cuda" if _cuda() else "cpu",
            "budget": {"gpu": int(gpu * GB)},
        },
    }
    engine, *_ = zero.initialize(model=model, config=config, example=batch, weights=zoo.value_of)
    plan = engine.plan
    assert plan is not None

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = timed(step, batch_tokens(name, tiny), engine.drain)
    found |= {
        "planned_seconds": plan.step_seconds,
        "bound": plan.bound,
        "gpu_planned": plan.gpu_bytes,
        "checkpointing": plan.checkpointing,
        "streaming": plan.streaming,
        "resident": f"{len(plan.resident)}/{len(plan.places)}",
    }
    engine.close()
    return found


def batch_tokens(name: str, tiny: bool) -> int:
    """Tokens of a batch, as zero_zoo.py counts them: those with a label."""
    return ROWS * (32 if tiny else zoo.MODELS[name][2])


def blocks_of(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of blocks: those that are in no other list."""
    found: list[nn.ModuleList] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def _recompute(model: Any) -> None:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _group() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.setdefault("MASTER_PORT", "29517")
    if _cuda():
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if _cuda() else "gloo")


def fsdp(name: str, tiny: bool, _gpu: float) -> dict[str, Any]:
    """FSDP2: CPUOffloadPolicy with pinned memory, the next block fetched ahead, float32 shards."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _group()
    model = zoo.model_of(name, tiny)
    _recompute(model)
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if _cuda():
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    else:
        how["mesh"] = dist.init_device_mesh("cpu", (1,))
    for blocks in blocks_of(model):
        for block in blocks:
            fully_shard(block, **how)
        for block, after in zip(blocks, list(blocks)[1:], strict=False):
            block.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
        for block, before in zip(list(blocks)[1:], blocks, strict=False):
            block.set_modules_to_backward_prefetch([before])  # type: ignore[operator]
    fully_shard(model, **how)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for full, parameter in model.named_parameters():
            parameter.to_local().copy_(zoo.value_of(full, parameter))  # type: ignore[attr-defined]
        for full, buffer in buffers.items():
            place, _, last = full.rpartition(".")
            model.get_submodule(place)._buffers[last] = buffer.cuda() if _cuda() else buffer
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    batch = _batch(name, model, tiny)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = timed(step, batch_tokens(name, tiny))
    dist.destroy_process_group()
    return found


def deepspeed(name: str, tiny: bool, _gpu: float) -> dict[str, Any]:
    """DeepSpeed ZeRO-3: parameters and optimizer on the host, pinned, its CPU Adam."""
    import deepspeed as ds  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found,unused-ignore]

    _group()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "steps_per_print": 1 << 30,
    }
    kind, shape, _ = zoo.MODELS[name]
    shape = zoo.tiny_of(shape) if tiny else shape
    cls = getattr(transformers, kind)
    with ds.zero.Init(config_dict_or_path=config):
        model = cls(cls.config_class(**shape)).train()
    for full, parameter in model.named_parameters():
        with ds.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(zoo.value_of(full, parameter))
    _recompute(model)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch = _batch(name, model, tiny)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    found = timed(step, batch_tokens(name, tiny))
    return {**found, "version": ds.__version__}


def compile_adam() -> None:
    """DeepSpeed's CPU Adam, compiled once and kept in torch's cache of extensions."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # type: ignore[import-not-found]

    CPUAdamBuilder().load(verbose=False)


SYSTEMS: dict[str, Callable[..., dict[str, Any]]] = {
    "Evener": evener,
    "DeepSpeed": deepspeed,
    "FSDP2": fsdp,
}


@contextlib.contextmanager
def _limited(command: list[str], limit: float) -> Iterator[tuple[int, str]]:
    """(status, output) of a process and of all that it started; -9 where it ran past `limit`."""
    env = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **os.environ}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
    ) as process:
        try:
            text, _ = process.communicate(timeout=max(1.0, limit))
            yield process.returncode, text
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            yield -9, ""


def show(name: str, row: dict[str, Any]) -> None:
    """A line of the table."""
    if "failed" in row:
        print(f"{name:26} failed: {row['failed'][:200]}", flush=True)
        return
    plan = f", plan x {row['planned_seconds'] / row['seconds']:.2f}" if "bound" in row else ""
    print(
        f"{name:26} {row['seconds']:7.3f} s {row['tokens_per_second']:8,.0f} tokens/s  GPU "
        f"{row['gpu_allocated'] / GB:6.2f}/{row['gpu_reserved'] / GB:6.2f} GB  host "
        f"{row['host_peak'] / GB:6.2f} GB  row {row['row_s']:.0f} s{plan}",
        flush=True,
    )


def summary(rows: dict[str, Any]) -> None:
    """Evener over the better peer, model by model."""
    for model in MODELS:
        speed = {
            system: rows[f"{model}, {system}"].get("tokens_per_second", 0.0)
            for system in SYSTEMS
            if f"{model}, {system}" in rows
        }
        peers = [rate for system, rate in speed.items() if system != "Evener" and rate]
        if speed.get("Evener") and peers:
            ratio = speed["Evener"] / max(peers)
            print(f"{model:14} Evener is {ratio:.2f} x the better of {len(peers)} peers")


def main() -> None:
    """Run what is missing, until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budget-s", type=float, default=230, help="seconds for the whole run")
    parser.add_argument("--only", help="rows whose names begin so, separated by ;")
    parser.add_argument("--limit", type=float, default=110, help="seconds for a row")
    parser.add_argument("--gpu", type=float, default=24, help="GB of GPU memory for Evener")
    parser.add_argument("--again", action="store_true", help="run failed rows again")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU: a dry run")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/zero_peers_zoo.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        if given.one == "compile":
            compile_adam()
            return
        model, system = given.one.rsplit(", ", 1)
        found = SYSTEMS[system](model, given.tiny, given.gpu)
        print("RESULT " + json.dumps(found, default=str), flush=True)
        gc.collect()
        return
    if not given.tiny and not _cuda():
        sys.exit("no GPU here: this benchmark needs one (--tiny: a dry run)")
    record: dict[str, Any] = {"rows": {}}
    if given.json.is_file():
        record = json.loads(given.json.read_text(encoding="utf-8"))
    record |= {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if _cuda() else "none",
        "cpus": len(os.sched_getaffinity(0)),
        "batch rows": ROWS,
        "budget of Evener": given.gpu * GB,
    }
    wanted = given.only.split(";") if given.only else [""]
    end = time.monotonic() + given.budget_s
    todo = []
    for model in MODELS:
        for system in SYSTEMS:
            old = record["rows"].get(f"{model}, {system}")
            if old is not None and not (given.again and "failed" in old):
                continue
            if any(f"{model}, {system}".startswith(start) for start in wanted):
                todo.append(f"{model}, {system}")
    command = [sys.executable, __file__, "--gpu", str(given.gpu), *(["--tiny"] * given.tiny)]
    run = functools.partial(_limited, limit=min(given.limit, given.budget_s))
    if any(name.endswith("DeepSpeed") for name in todo):
        begun = time.perf_counter()
        with run([*command, "--one", "compile"]) as (status, _):
            took = time.perf_counter() - begun
            print(f"DeepSpeed's CPU Adam: {took:.0f} s, status {status}", flush=True)
    for name in todo:
        left = end - time.monotonic()
        if left < 25:
            print(f"not begun, the time is over: {name}", flush=True)
            continue
        begun = time.perf_counter()
        with _limited([*command, "--one", name], min(given.limit, left)) as (status, text):
            lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
            row = json.loads(lines[-1][7:]) if lines else {"failed": f"status {status}"}
        if "failed" in row and status == -9 and time.monotonic() > end - 1:
            print(f"cut short by the time of this run: {name}", flush=True)
            continue
        row["row_s"] = time.perf_counter() - begun
        record["rows"][name] = row
        show(name, row)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    summary(record["rows"])


if __name__ == "__main__":
    main()
