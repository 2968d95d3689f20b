"""DeepSpeed's learning-rate schedules that pre-training uses, as torch schedulers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from evener.errors import UsageError


def make(optimizer: torch.optim.Optimizer, kind: str, params: dict[str, Any]) -> LambdaLR:
    """WarmupLR, WarmupDecayLR (down to warmup_min_lr, linearly) or WarmupCosineLR, by DeepSpeed's
    parameters."""
    known = {
        "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
        "WarmupDecayLR": {
            "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps",
        },
        "WarmupCosineLR": {"total_num_steps", "warmup_num_steps", "cos_min_ratio"},
    }  # fmt: skip
    if kind not in known:
        raise UsageError(f"scheduler.type = {kind!r} is not known", f"use {', '.join(known)}")
    if unknown := set(params) - known[kind]:
        raise UsageError(
            f"scheduler.params has no {', '.join(sorted(unknown))}",
            f"{kind} has {', '.join(sorted(known[kind]))}",
        )
    warm = max(1, int(params.get("warmup_num_steps", 1000)))
    if kind != "WarmupLR" and "total_num_steps" not in params:
        raise UsageError(f"{kind} needs total_num_steps", "set scheduler.params.total_num_steps")
    total = int(params.get("total_num_steps", 0))
    top = params.get("warmup_max_lr")
    if top not in (None, "auto"):
        for group in optimizer.param_groups:
            group["lr"] = float(top)
    base = float(optimizer.param_groups[0]["lr"]) or 1.0
    low = float(params.get("warmup_min_lr", 0.0)) / base
    # DeepSpeed's own default is the logarithmic shape.
    shape = params.get("warmup_type", "log")
    if shape not in ("log", "linear"):
        raise UsageError(f"warmup_type = {shape!r}", "use log or linear")

    def factor(step: int) -> float:
        if step < warm:
            share = (
                math.log(step + 1) / math.log(warm) if shape == "log" and warm > 1 else step / warm
            )
            return low + (1 - low) * min(1.0, share)
        if kind == "WarmupLR":
            return 1.0
        share = min(1.0, (step - warm) / max(1, total - warm))
        if kind == "WarmupDecayLR":
            return low + (1 - low) * (1 - share)
        floor = float(params.get("cos_min_ratio", 1e-4))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, factor)
