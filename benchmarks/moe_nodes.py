"""Experts over nodes: the step, what of the traffic is hidden, and the bytes on the cards.

    evener lab run --nodes 2 --slots 1 --link 25gbit -- python benchmarks/moe_nodes.py
    evener lab run --nodes 2 --slots 2 --link 1gbit -- python benchmarks/moe_nodes.py --size tiny

`--what decoder` (the default): layers of attention (grouped queries, causal, no rotary positions)
and experts, the shared expert beside them, as a transformer has them. `--what layer`: the experts
alone, one layer. Forward and backward, bf16 on GPUs. Columns take turns:

    pairs       a row per choice, no overlap, the shared expert afterwards: a flat all-to-all
    ours        a row per token and node (two levels where nodes have several ranks), in chunks
    turns       of a decoder: two halves of the batch take turns (`moe.interleave`), one chunk each
    int8        the best of ours, tokens and gradients of outputs in 8 bits
    compute     the same products on one rank, nothing travels
    traffic     ours without the products: the same rows, there and back, twice
    traffic8    the same in 8 bits

hidden = 1 - (column - compute) / traffic, of the column's own traffic; at most compute / traffic
can be, but for what a column's traffic itself is faster. bytes: what the node's cards sent per
step, beside the bound: each token's row once to each other node that has an expert for it, and once
back, forward and backward, without choices, weights, counts and headers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from evener import moe
from evener.moe.route import Counts, Trip, count

# Tokens of a rank, width, inner, experts, choices, inner of the shared expert.
CASES = {
    "8 top-2, shared": (16384, 4096, 14336, 8, 2, 14336),
    "64 top-6, shared": (16384, 2048, 1408, 64, 6, 2816),
}
TINY = {"8 top-2, shared": (512, 1024, 256, 8, 2, 256)}
# For a decoder: layers, tokens of a row, heads, heads of keys and values.
DEPTHS = {"8 top-2, shared": (3, 4096, 32, 8), "64 top-6, shared": (6, 4096, 16, 16)}
TINY_DEPTHS = {"8 top-2, shared": (2, 64, 8, 2)}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, narrow: int) -> None:
        super().__init__()
        self.heads, self.narrow, self.each = heads, narrow, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * narrow) * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, -1, self.each).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.narrow, self.narrow), 1)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.out(a.transpose(1, 2).reshape(rows, length, width))
        return out


class Mixture(moe.MoE):
    """late: the shared expert after the others, as without overlap."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.late or self.shared_experts is None:
            return super().forward(x)
        flat = x.reshape(-1, x.shape[-1])
        _, weights, experts = self.gate(flat)
        out = self.experts(flat, experts, weights) + self.shared_experts(flat)
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self, shape: tuple[int, ...], heads: int, narrow: int) -> None:
        super().__init__()
        _, width, inner, experts, top_k, shared = shape
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, narrow)
        self.moe = Mixture(width, inner, experts, top_k, shared=shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.moe(self.norm2(x))
        return out


def made(
    shape: tuple[int, ...], depth: tuple[int, ...] | None, device: str
) -> tuple[nn.Module, torch.Tensor]:
    """The model and its tokens: [tokens, width], or [rows, length, width] with a depth."""
    tokens, width, inner, experts, top_k, shared = shape
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    model: nn.Module
    try:
        with torch.device(device):
            if depth is None:
                model = Mixture(width, inner, experts, top_k, shared=shared)
            else:
                layers, length, *heads = depth
                model = nn.Sequential(*(Block(shape, *heads) for _ in range(layers)))
            torch.manual_seed(1 + dist.get_rank())
            x = torch.randn(tokens, width)
    finally:
        torch.set_default_dtype(before)
    return model, x if depth is None else x.view(-1, length, width)


def mixtures(model: nn.Module) -> list[Mixture]:
    return [module for module in model.modules() if isinstance(module, Mixture)]


def turns(model: nn.Module, x: torch.Tensor) -> None:
    """A step. The gradients of weights are dropped: several models share the memory."""
    out = model(x.detach().requires_grad_())
    out.backward(x.detach())
    model.zero_grad()


def traffic(
    model: nn.Module, x: torch.Tensor, chunks: int, narrow: bool = False
) -> tuple[Callable[[], None], int]:
    """A step's rows without their products; and the bytes of the bound, of this rank's node."""
    given: list[torch.Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
             for layer in mixtures(model)]  # fmt: skip
    model.eval()  # the whole batch, not its parts
    with torch.no_grad():
        model(x)
    model.train()
    for hook in hooks:
        hook.remove()
    found = [_traffic(layer, of.reshape(-1, of.shape[-1]), chunks, narrow)
             for layer, of in zip(mixtures(model), given, strict=True)]  # fmt: skip

    def run() -> None:
        for again, _ in found:
            again()

    return run, sum(bound for _, bound in found)


def _traffic(
    layer: Mixture, x: torch.Tensor, chunks: int, narrow: bool
) -> tuple[Callable[[], None], int]:
    parallel = layer.experts.parallel
    assert parallel is not None
    shared, held = parallel.shared, layer.experts.gate_up_proj.shape[0]
    ranks, lane = shared.ranks, shared.lane
    with torch.no_grad():
        _, weights, experts = layer.gate(x)
        told = count(parallel.owner[experts], ranks, chunks)
        everyone = told.new_empty(ranks.size * told.numel())
        dist.all_gather_into_tensor(everyone, told.flatten(), group=ranks.group)
        everyone = everyone.view(ranks.size, *told.shape)
        counts = Counts(ranks, everyone.tolist())
        meta = torch.cat((experts.float(), weights), 1)
    way = shared.way or "flat"

    def run() -> None:
        for _ in range(2):
            gone = []
            for chunk, (part, choice) in enumerate(
                zip(x.tensor_split(chunks), meta.tensor_split(chunks), strict=True)
            ):
                trip = Trip(ranks, way, counts, chunk)
                gone.append((trip, lane.submit(
                    parallel._dispatch, trip, part, choice, held, narrow
                )))  # fmt: skip
            back = [lane.submit(trip.back, ticket.wait()[0]) for trip, ticket in gone]
            for ticket in back:
                ticket.wait()

    of_nodes = everyone[:, :, : ranks.nodes].sum(1)
    each = x.shape[1] * x.element_size()
    leave = [int(of_nodes[r].sum() - of_nodes[r, r // ranks.each]) for r in range(ranks.size)]
    # Back from this node goes what came from the others through it: the same on average.
    come = int(of_nodes[:, ranks.node].sum()) - int(
        of_nodes[ranks.node * ranks.each :][: ranks.each, ranks.node].sum()
    )
    own = sum(leave[ranks.node * ranks.each :][: ranks.each])
    return run, 2 * (own + come) * each


def measured(runs: dict[str, Callable[[], None]], args: Any) -> dict[str, Any]:
    """Milliseconds of the slowest rank, and bytes of this node; the columns take turns."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, list[int]] = {name: [] for name in runs}
    for turn in range(args.repeats + args.warmup):
        for name, run in runs.items():
            harness.settle()
            dist.barrier()
            before, begin = harness.sent_bytes(), time.perf_counter()
            run()
            harness.settle()
            mine = torch.tensor([time.perf_counter() - begin])
            # What is in the cards' queues leaves before the barrier's answer comes.
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if turn >= args.warmup:
                took[name].append(float(mine) * 1e3)
                sent[name].append(harness.sent_bytes() - before)
    return {
        name: {"ms": statistics.median(took[name]), "sent": statistics.median(sent[name]),
               "each_ms": took[name]}
        for name in runs
    }  # fmt: skip


def case(
    name: str, shape: tuple[int, ...], depth: tuple[int, ...] | None, args: Any, device: str
) -> dict[str, Any]:
    size = dist.get_world_size()
    plain, x = made(shape, depth, device)
    runs: dict[str, Callable[[], None]] = {"compute": lambda: turns(plain, x)}
    bound, way = 0, ""
    best: dict[str, Any] = {"route": args.route, "chunks": args.chunks}
    columns = {"pairs": {"route": "pairs", "chunks": 1}, "ours": best}
    if depth is not None:
        best = {"route": args.route, "chunks": args.part_chunks}
        columns["turns"] = best
    columns["int8"] = {**best, "dispatch": "int8"}
    for column, options in columns.items():
        model = moe.spread(made(shape, depth, device)[0], size, **options)
        for layer in mixtures(model):
            layer.late = column == "pairs"
        if depth is not None and column in ("turns", "int8"):
            moe.interleave(model)
        turns(model, x)
        runs[column] = lambda model=model: turns(model, x)
        if column == "ours":
            runs["traffic"], bound = traffic(model, x, args.chunks)
            way = mixtures(model)[0].experts.parallel.shared.way
        if column == "int8":
            runs["traffic8"], _ = traffic(model, x, args.chunks, True)
    found = measured(runs, args)
    ms = {column: each["ms"] for column, each in found.items()}
    of_traffic = {
        c: "traffic8" if c == "int8" else "traffic" for c in ("ours", "turns", "int8") if c in ms
    }
    return {
        "case": name, "what": args.what, "shape": shape, "depth": depth,
        "ranks": size, "way": way, "chunks": args.chunks,
        "ms": ms, "each_ms": {column: each["each_ms"] for column, each in found.items()},
        "bytes": {column: each["sent"] for column, each in found.items()},
        "bound": bound, "bytes_ratio": found["ours"]["sent"] / bound,
        "hidden": {c: 1 - (ms[c] - ms["compute"]) / ms[of] for c, of in of_traffic.items()},
        "hidden_at_most": {c: min(1.0, ms["compute"] / ms[of]) for c, of in of_traffic.items()},
        "faster": {c: ms["pairs"] / ms[c] for c in of_traffic},
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    depth = f", {found['depth'][0]} layers, rows of {found['depth'][1]}" if found["depth"] else ""
    print(f"\n{found['case']}: {found['shape']}{depth}, {found['ranks']} ranks, way "
          f"{found['way']}, {found['chunks']} chunks")  # fmt: skip
    columns = ("ms", "bytes", "hidden", "hidden_at_most", "faster")
    rows = [[name, *(found[column].get(name) for column in columns)] for name in found["ms"]]
    heads = ["column", "ms", "bytes of a node", "hidden", "at most", "x pairs"]
    print(harness.show(heads, rows))
    said = f"bytes of ours {found['bytes_ratio']:.3f} x the bound"
    print(f"  {said} of {found['bound'] / 1e6:.2f} MB", flush=True)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--what", choices=["decoder", "layer"], default="decoder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--part-chunks", type=int, default=1, help="chunks of each half in turns")
    parser.add_argument("--route", default="auto")
    args = parser.parse_args()
    device = harness.join().type
    found = []
    for name, shape in (CASES if args.size == "full" else TINY).items():
        depths = DEPTHS if args.size == "full" else TINY_DEPTHS
        depth = depths[name] if args.what == "decoder" else None
        found.append(case(name, shape, depth, args, device))
        if dist.get_rank() == 0:
            show(found[-1])
        if device == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        harness.keep(args, cases=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
