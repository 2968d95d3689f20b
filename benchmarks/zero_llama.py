"""transformers' Llama 2.7B beside the own model of zero_gpu.py, in turn on one GPU.

    python benchmarks/zero_llama.py [--budgets 24,8] [--rounds 2] [--json FILE]

Both have 32 layers of width 2560 and train on 8 x 1024 tokens with clipping. They do not compute
the same: transformers' has a rotary embedding, norms in float32 made of single operations, and
three products where the own model has one. So each is also measured without the engine: one block
forward, and forward again with its backward pass, as recomputation does it. Expected of the engine
is the ratio of what the GPU computes, where the GPU is the bound. GB are 1e9 bytes. Each row is a
process of its own; rows alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zero_models as own
import zero_zoo as zoo
from torch import nn

from evener import zero

GB = 1_000_000_000
LAYERS, WIDTH, ROWS, LENGTH = 32, 2560, 8, 1024
WARMUP, STEPS = 3, 5
NAME = "llama 2.7B"


def block_of(kind: str) -> tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    """One block with memory on the GPU, and how it is called."""
    if kind == "own":
        block = own.on_meta(1, WIDTH).layers[0]
        return block.to_empty(device="cuda").bfloat16(), lambda b, x: b(x)
    import transformers  # type: ignore[import-not-found,unused-ignore]

    config = transformers.LlamaConfig(**{**zoo.MODELS[NAME][1], "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    model = transformers.LlamaModel(config).cuda().bfloat16()
    places = torch.arange(LENGTH, device="cuda")[None]

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = block(x, position_embeddings=model.rotary_emb(x, places), position_ids=places)
        return out[0] if isinstance(out, tuple) else out

    return model.layers[0], call


def blocks() -> dict[str, dict[str, float]]:
    """Seconds of one block, medians of 20 in turn."""
    made = {kind: block_of(kind) for kind in ("own", "transformers")}
    x = torch.randn(ROWS, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    for block, _ in made.values():
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)

    def clock(work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def backward(block: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        given = x.detach().requires_grad_()
        call(block, given).backward(x)
        block.zero_grad()

    def forward(block: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        with torch.no_grad():
            call(block, x)

    seconds: dict[str, dict[str, list[float]]] = {
        kind: {"forward": [], "again and backward": []} for kind in made
    }
    for turn in range(25):
        for kind, (block, call) in made.items():
            first = clock(lambda b=block, c=call: forward(b, c))  # type: ignore[misc]
            second = clock(lambda b=block, c=call: backward(b, c))  # type: ignore[misc]
            if turn >= 5:
                seconds[kind]["forward"].append(first)
                seconds[kind]["again and backward"].append(second)
    return {k: {n: statistics.median(s) for n, s in v.items()} for k, v in seconds.items()}


def row(kind: str, budget: float) -> dict[str, Any]:
    """One engine, in this process."""
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "evener": {
            "checkpointing": "auto", "device": "cuda", "loss": "chunked" if kind == "own" else
            "fused", "budget": {"gpu": int(budget * GB), "host": 100 * GB},
        },
    }  # fmt: skip
    machine = zero.probe(torch.device("cuda")).machine
    if kind == "own":
        engine, *_ = zero.initialize(
            model=own.on_meta(LAYERS, WIDTH), config=config, batch=(ROWS, LENGTH),
            machine=machine, weights=own.value_of,
        )  # fmt: skip
        tokens = own.batch_of(ROWS, LENGTH)

        def loss() -> torch.Tensor:
            return own.loss_of(engine, tokens)
    else:
        model = zoo.model_of(NAME, False)
        batch = zoo.batch_of(NAME, ROWS, model, "cuda", False)
        engine, *_ = zero.initialize(
            model=model, config=config, example=batch, machine=machine, weights=zoo.value_of
        )

        def loss() -> torch.Tensor:
            found: torch.Tensor = engine(**batch).loss
            return found

    def step() -> None:
        engine.backward(loss())
        engine.step()

    def idle() -> None:
        engine.drain()
        torch.cuda.synchronize()

    for _ in range(WARMUP):
        step()
    idle()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    idle()
    seconds = (time.perf_counter() - begun) / STEPS
    plan = engine.plan
    assert plan is not None
    engine.record()
    for _ in range(2):
        step()
    found = {
        "seconds": seconds,
        "tokens_per_second": ROWS * LENGTH / seconds,
        "planned_seconds": plan.step_seconds,
        "bound": plan.bound,
        "times": plan.times,
        "resident": f"{len(plan.resident)}/{len(plan.places)}",
        "recomputed": len(plan.recomputed),
        "checkpointing": plan.checkpointing,
        "streaming": plan.streaming,
        "gpu_peak": engine.memory()["gpu peak"],
        "made_room": engine.room.said,
        "where": zero.spans.summary(engine.recorded()),
        "updated": engine.updated,
    }
    engine.close()
    return found


def main() -> int:
    """Rows in turn, a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budgets", default="24", help="GB, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--row", nargs=2, metavar=("KIND", "GB"), help="in this process")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.row:
        print("found:" + json.dumps(row(given.row[0], float(given.row[1])), default=str))
        return 0
    if not torch.cuda.is_available():
        sys.exit("error: there is no GPU here\n  fix: run it on a machine with one")
    record: dict[str, Any] = {**own.ran(), "blocks": blocks(), "rows": []}
    torch.cuda.empty_cache()
    for name in ("forward", "again and backward"):
        one, other = (record["blocks"][kind][name] for kind in ("own", "transformers"))
        print(f"a block, {name}: own {one * 1e3:.2f} ms, transformers' {other * 1e3:.2f} ms: "
              f"{one / other:.3f} of its speed", flush=True)  # fmt: skip
    for budget in given.budgets.split(","):
        for turn in range(given.rounds):
            for kind in ("own", "transformers"):
                done = subprocess.run(
                    [sys.executable, __file__, "--row", kind, budget],
                    stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                last = (done.stdout.strip().splitlines() or [""])[-1]
                if done.returncode or not last.startswith("found:"):
                    print(f"{kind}, {budget} GB: failed (exit status {done.returncode})")
                    continue
                one = json.loads(last.removeprefix("found:"))
                record["rows"].append({"kind": kind, "budget": budget, "round": turn, **one})
                print(
                    f"{kind:13} {budget:>3} GB: {one['tokens_per_second']:9,.0f} tokens/s, "
                    f"{one['seconds']:.3f} s of {one['planned_seconds']:.3f} planned; resident "
                    f"{one['resident']}, recomputed {one['recomputed']}, {one['bound']}; "
                    f"{one['where']}", flush=True,
                )  # fmt: skip
                if given.json:
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
