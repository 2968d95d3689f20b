"""What the zoo's models would be planned as on one H200, planned here: no GPU, no model in memory.

    python benchmarks/zero_plans.py [--only PREFIX;...] [--json FILE]

The shapes, batches and budgets are those of zero_zoo.py, the machine is the one that its results
name (benchmarks/results/zero_zoo.json). Launches beside the optimizer and units that ran are not
part of it, so seconds differ from those of the GPU's own runs; bytes are the same. Needs
transformers. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
import zero_zoo as zoo

from evener import zero
from evener.zero import planning
from evener.zero.budget import Budget
from evener.zero.config import read
from evener.zero.inputs import call_of
from evener.zero.transformers import fill_buffers, without_cache
from evener.zero.vocabulary import Head, find

CORES = 132
"""Multiprocessors of an H200."""
HOST = 200 * zoo.GB


def plans(name: str, machine: zero.Machine) -> dict[str, Any]:
    """The plan for each of a model's budgets."""
    model = zoo.model_of(name, tiny=False)
    fill_buffers(model)
    config = read(
        {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {}},
            "evener": {"checkpointing": "auto", "device": "cpu"},
        },
        1,
    )
    rows = 32 if name.startswith("vit") else 8
    batch = zoo.batch_of(name, rows, model, "cpu", tiny=False)
    linear = find(model, force=False)
    head = Head(linear) if linear is not None else None
    restore = without_cache(model)
    begun = time.perf_counter()
    units, profile = planning.cut_and_trace(
        model, {}, config, torch.device("cpu"), call_of(batch), head, CORES
    )
    took = time.perf_counter() - begun
    restore()
    if head is not None:
        head.close()
    tokens = rows * zoo.MODELS[name][2]
    found: dict[str, Any] = {}
    for budget in zoo.BUDGETS[name]:
        limit = Budget(int(budget * zoo.GB), HOST)
        plan = planning.plan_units(units, config, machine, limit, tokens, 1, profile)
        row = {
            "fits": plan.fits,
            "gpu_bytes": plan.gpu_bytes,
            "step_seconds": plan.step_seconds,
            "checkpointing": plan.checkpointing,
            "recomputed": len(plan.recomputed),
            "resident": f"{len(plan.resident)}/{len(plan.places)}",
            "streaming": plan.streaming,
            "holes": profile.lost(frozenset(plan.recomputed)) if profile else None,
            "traced_s": took,
        }
        found[zoo.name_of(name, budget, rows)] = row
        print(
            f"{name:18} {budget:4g} GB: {plan.gpu_bytes / zoo.GB:6.3f} GB"
            f"{'' if plan.fits else ' refused'}, {plan.step_seconds:.3f} s, "
            f"{plan.checkpointing} ({len(plan.recomputed)} blocks), "
            f"resident {row['resident']}{', streaming' * plan.streaming}, "
            f"holes {(row['holes'] or 0) / zoo.GB:.3f} GB",
            flush=True,
        )
    return found


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help="models whose names begin so, separated by ;")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    results = Path(__file__).parent / "results" / "zero_zoo.json"
    measured = json.loads(results.read_text(encoding="utf-8"))["machine"]
    machine = zero.Machine(**{**measured, "cores": CORES})
    rows: dict[str, Any] = {}
    for name in zoo.MODELS:
        if name.endswith("lora") or not name.startswith(tuple(given.only.split(";"))):
            continue
        rows |= plans(name, machine)
        if given.json:
            made = {"rows": rows, "torch": torch.__version__, "machine": measured}
            given.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
