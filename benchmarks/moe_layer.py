"""A mixture of experts on one GPU: ours, transformers' grouped_mm path, a Megatron-style eager one.

    python benchmarks/moe_layer.py --json benchmarks/results/moe-layer.json
    python benchmarks/moe_layer.py --size tiny           anywhere, in seconds

bf16, forward and backward of the experts with their routing given, and of permute and unpermute
alone. Columns take turns, so that they share whatever the machine does; the table has medians, and
ratios in one run. First all are checked against each other.

`transformers` is its own function where transformers 5 is installed; `sorted` are the same
operations here: sort, gather, grouped_mm, gate, grouped_mm, weight, un-sort, sum. `eager` permutes
as Megatron-LM does without fused kernels: a mask of (expert, token), masked_select, index_select,
and scatter_add back; its products are grouped_mm as well.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import torch
from torch.nn import functional

from evener import moe
from evener.moe import grouped, permute

# Tokens, width, inner width, experts, choices.
CASES = {
    "8 top-2": (16384, 4096, 14336, 8, 2),
    "64 top-6": (16384, 2048, 1408, 64, 6),
}
TINY = {"8 top-2": (256, 64, 96, 8, 2), "64 top-6": (256, 64, 32, 64, 6)}


def products(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def sort_rows(x: torch.Tensor, experts: torch.Tensor, count: int) -> Any:
    chosen, order = torch.sort(experts.reshape(-1))
    each = torch.histc(chosen.int() if x.is_cuda else chosen.float(), count, 0, count - 1)
    return x[order // experts.shape[1]], order, each.cumsum(0, dtype=torch.int32)


def unsort_rows(y: torch.Tensor, order: torch.Tensor, tokens: int) -> torch.Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(tokens, -1, y.shape[1]).sum(1)


def sorted_layer(layer: moe.Experts, x: torch.Tensor, experts: torch.Tensor,
                 weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    rows, order, ends = sort_rows(x, experts, layer.num_experts)
    y = products(swiglu(products(rows, layer.gate_up_proj, ends)), layer.down_proj, ends)
    y = y * weights.reshape(-1)[order].unsqueeze(1)
    return unsort_rows(y, order, len(x)).to(x.dtype)


def eager_rows(x: torch.Tensor, experts: torch.Tensor, count: int) -> Any:
    mask = torch.zeros(len(x), count, dtype=torch.bool, device=x.device)
    mask = mask.scatter_(1, experts, True).t().contiguous()
    tokens = torch.arange(len(x), device=x.device).unsqueeze(0).expand(count, -1)
    tokens = tokens.masked_select(mask)
    return x.index_select(0, tokens), tokens, mask, mask.sum(1).cumsum(0, dtype=torch.int32)


def eager_back(y: torch.Tensor, tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return out.scatter_add_(0, tokens.unsqueeze(1).expand(-1, y.shape[1]), y)


def eager_layer(layer: moe.Experts, x: torch.Tensor, experts: torch.Tensor,
                weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    rows, tokens, mask, ends = eager_rows(x, experts, layer.num_experts)
    spread = torch.zeros(len(x), layer.num_experts, device=x.device).scatter(1, experts, weights)
    y = products(swiglu(products(rows, layer.gate_up_proj, ends)), layer.down_proj, ends)
    y = y * spread.t().contiguous().masked_select(mask).unsqueeze(1).to(y.dtype)
    return eager_back(y, tokens, x)


def transformers_layer() -> Callable[..., torch.Tensor] | None:
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError:
        return None

    def call(layer: moe.Experts, x: Any, experts: Any, weights: Any) -> torch.Tensor:
        own = SimpleNamespace(
            gate_up_proj=layer.gate_up_proj, down_proj=layer.down_proj, has_gate=True,
            has_bias=False, is_transposed=False, has_post_expert_norm=False,
            _is_expert_parallel=False, num_experts=layer.num_experts, _apply_gate=swiglu,
        )  # fmt: skip
        out: torch.Tensor = grouped_mm_experts_forward(own, x, experts, weights)
        return out

    return call


class Permuted(torch.autograd.Function):
    """Our permute and unpermute alone, as the layer uses them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
        ctx.at = permute.positions(experts, count)
        return permute.combine(permute.gather(x, ctx.at), ctx.at)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return permute.combine(permute.gather(gradient, ctx.at), ctx.at), None, None


def there_and_back(how: str, x: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    if how == "ours":
        out: torch.Tensor = Permuted.apply(x, experts, count)
        return out
    if how == "sorted":
        rows, order, _ = sort_rows(x, experts, count)
        return unsort_rows(rows, order, len(x))
    rows, tokens, _, _ = eager_rows(x, experts, count)
    return eager_back(rows, tokens, x)


def measured(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each; they take turns."""
    took = harness.turns(runs, repeats, warmup=3, settle=harness.settle)
    return {name: [1e3 * seconds for seconds in each] for name, each in took.items()}


def case(name: str, shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    tokens, width, inner, experts, top_k = shape
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        layer = moe.Experts(width, inner, experts).bfloat16()
        x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        seed = torch.randn(tokens, width, dtype=torch.bfloat16)
        weights, chosen = torch.randn(tokens, experts).softmax(-1).topk(top_k, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()
    layers: dict[str, Callable[..., torch.Tensor]] = {
        "ours": lambda own, *given: own(*given), "sorted": sorted_layer, "eager": eager_layer,
    }  # fmt: skip
    if (theirs := transformers_layer()) is not None:
        layers["transformers"] = theirs
    of = (x, weights, layer.gate_up_proj, layer.down_proj)

    def step(how: str) -> tuple[torch.Tensor, ...]:
        out = layers[how](layer, x, chosen, weights)
        return out.detach(), *torch.autograd.grad(out, of, seed)

    results = {how: step(how) for how in layers}
    apart = 0.0
    for how, found in results.items():
        for mine, other in zip(results["ours"], found, strict=True):
            away = float((mine.float() - other.float()).norm() / other.float().norm())
            apart = max(apart, away)
            assert away < 0.02, f"{how} differs from ours by {away:.1%}"
    del results
    memory = {}
    for how in layers if cuda else ():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(how)
        memory[how] = torch.cuda.max_memory_allocated() - before
    samples = {
        "layer": measured({how: functools.partial(step, how) for how in layers}, args.repeats)
    }
    with torch.no_grad():
        ahead = {how: functools.partial(call, layer, x, chosen, weights)
                 for how, call in layers.items()}  # fmt: skip
        samples["forward"] = measured(ahead, args.repeats)

    def move(how: str) -> None:
        torch.autograd.grad(there_and_back(how, x, chosen, experts), x, seed)

    ways = ("ours", "sorted", "eager")
    samples["permute"] = measured({how: functools.partial(move, how) for how in ways}, args.repeats)
    medians = {what: {how: statistics.median(each) for how, each in took.items()}
               for what, took in samples.items()}  # fmt: skip
    whole, moved = medians["layer"], medians["permute"]
    flops = 3 * 2 * 3 * tokens * top_k * width * inner
    best = min(ms for how, ms in whole.items() if how != "ours")
    return {
        "case": name, "shape": shape, "layer_ms": whole, "forward_ms": medians["forward"],
        "permute_ms": moved, "samples_ms": samples,
        "peak_bytes": memory, "largest_difference": apart,
        "way": grouped.way(x, layer.gate_up_proj),
        "tflops": {how: flops / ms / 1e9 for how, ms in whole.items()},
        "layer_ratio": best / whole["ours"], "permute_ratio": moved["eager"] / moved["ours"],
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    tokens, width, inner, *_ = found["shape"]
    print(f"\n{found['case']}: {tokens} tokens, width {width}, inner {inner}, "
          f"products by {found['way']}")  # fmt: skip
    rows = (
        (how, ms, found["forward_ms"][how], found["tflops"][how], found["permute_ms"].get(how),
         found["peak_bytes"].get(how, 0) / 1e9)
        for how, ms in found["layer_ms"].items()
    )  # fmt: skip
    heads = ["", "step ms", "forward", "TFLOP/s", "permute ms", "peak, GB"]
    print(harness.show(heads, rows))
    print(
        f"  ours against the best other: {found['layer_ratio']:.3f} x; permute against eager: "
        f"{found['permute_ratio']:.2f} x; apart at most {found['largest_difference']:.2%}"
    )


def main() -> None:
    """All cases."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    found = []
    for name, shape in (CASES if args.size == "full" else TINY).items():
        found.append(case(name, shape, args))
        show(found[-1])
    harness.keep(args, ["transformers"], cases=found)


if __name__ == "__main__":
    main()
