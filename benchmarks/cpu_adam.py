"""CPU AdamW: Evener's fused kernels beside torch's fused AdamW, interleaved in one run.

    python benchmarks/cpu_adam.py [--elements 50M] [--repeats 15] [--json FILE]

Each variant updates its own tensors once a round, all variants in turn, so that a busy machine
slows all of them alike. Reported: median parameters a second, the spread (quartiles), bytes a
parameter, and the ratio to torch of the medians of the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evener import __version__
from evener.base import optimizers as _optimizers
from evener.base.units import parse_size

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def torch_fused(n: int, dtype: torch.dtype) -> Callable[[], object]:
    weights = torch.nn.Parameter(torch.randn(n).to(dtype))
    weights.grad = torch.randn(n).to(dtype)
    return torch.optim.AdamW([weights], fused=True, **HYPER).step


def evener(
    n: int, master: str, moments: torch.dtype, gradient: torch.dtype, output: bool, **run: Any
) -> Callable[[], object]:
    weights = torch.randn(n)
    first, second = torch.zeros(n, dtype=moments), torch.zeros(n, dtype=moments)
    state: Any = {
        "f32": weights,
        "split": _optimizers.split(weights),
        "bf16": weights.to(torch.bfloat16),
    }[master]
    grad = torch.randn(n).to(gradient)
    out = torch.zeros(n, dtype=torch.bfloat16) if output else None
    step = 0

    def call() -> None:
        nonlocal step
        step += 1
        how = _optimizers.Run(**run)
        _optimizers.adam(state, grad, first, second, out, step=step, run=how, **HYPER)

    return call


def deepspeed(n: int, dtype: torch.dtype) -> Callable[[], object] | None:
    """DeepSpeed's CPU Adam, where it is installed; its kernel is compiled at the first use."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    except ImportError:
        return None
    weights = torch.nn.Parameter(torch.randn(n).to(dtype))
    weights.grad = torch.randn(n).to(dtype)
    step: Callable[[], object] = DeepSpeedCPUAdam(
        [weights], adamw_mode=True, fp32_optimizer_states=dtype == torch.float32, **HYPER
    ).step
    return step


def variants(n: int, best_only: bool) -> dict[str, tuple[Callable[[], object], int]]:
    """Name: (a call that does one step, bytes of memory traffic a parameter)."""
    f32, bf16 = torch.float32, torch.bfloat16
    best = _optimizers.instruction_sets()
    made = {
        "torch fused fp32": (torch_fused(n, f32), 28),
        "torch fused all-bf16": (torch_fused(n, bf16), 14),
        "evener fp32": (evener(n, "f32", f32, f32, False), 28),
        "evener fp32, bf16 in and out": (evener(n, "f32", f32, bf16, True), 30),
        "evener split master, fp32 moments, bf16 in": (evener(n, "split", f32, bf16, False), 26),
        "evener split master, bf16 moments, bf16 in": (evener(n, "split", bf16, bf16, False), 18),
        "evener all-bf16, stochastic rounding": (evener(n, "bf16", bf16, bf16, False), 14),
    }
    for name, dtype, traffic in (("fp32", f32, 28), ("all-bf16", bf16, 14)):
        if (call := deepspeed(n, dtype)) is not None:
            made[f"DeepSpeed {name}"] = (call, traffic)
    for name in () if best_only else best[1:]:
        how = {"instructions": name}
        made[f"evener fp32 ({name})"] = (evener(n, "f32", f32, f32, False, **how), 28)
        made[f"evener split, bf16 moments ({name})"] = (
            evener(n, "split", bf16, bf16, False, **how),
            18,
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--elements", type=lambda text: parse_size(text), default=32 << 20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--best-only", action="store_true", help="only the best instructions")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/cpu_adam.json"))
    arguments = parser.parse_args()
    n = arguments.elements
    made = variants(n, arguments.best_only)
    times: dict[str, list[float]] = {name: [] for name in made}
    for round_ in range(arguments.repeats + 2):
        for name, (call, _) in made.items():
            start = time.perf_counter()
            call()
            if round_ >= 2:
                times[name].append(time.perf_counter() - start)
    base = times["torch fused fp32"]
    rows = []
    for name, (_, traffic) in made.items():
        low, middle, high = statistics.quantiles(times[name], n=4)
        rows.append(
            {
                "name": name,
                "parameters_per_second": n / middle,
                "quartiles": [n / high, n / low],
                "best": n / min(times[name]),
                "bytes_per_parameter": traffic,
                "gigabytes_per_second": n * traffic / middle / 1e9,
                "speed_over_torch_fp32": statistics.median(
                    b / t for b, t in zip(base, times[name], strict=True)
                ),
            }
        )
    print(f"{'':46} G param/s   quartiles      GB/s  x torch fp32")
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"{row['name']:46} {row['parameters_per_second'] / 1e9:8.3f}  "
            f"{low / 1e9:.3f}-{high / 1e9:.3f}  {row['gigabytes_per_second']:8.1f}  "
            f"{row['speed_over_torch_fp32']:8.2f}"
        )
    cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    record = {
        "command": "python benchmarks/cpu_adam.py",
        "machine": {
            "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
            "threads": _optimizers.threads(),
            "instructions": _optimizers.instruction_sets(),
            "load": Path("/proc/loadavg").read_text().split()[:3],
        },
        "versions": {"evener": __version__, "torch": torch.__version__},
        "elements": n,
        "repeats": arguments.repeats,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
