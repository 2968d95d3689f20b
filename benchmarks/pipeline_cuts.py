"""How even stages are: Evener's cuts beside uniform by block, and by count of parameters.

    python benchmarks/pipeline_cuts.py --json benchmarks/results/pipeline-cuts.json
    python benchmarks/pipeline_cuts.py --device cuda --rows 8 --tokens 1024
    python benchmarks/pipeline_cuts.py --flops 400T --bandwidth 3TB/s --rows 8 --tokens 1024

For each model and number of stages: longest stage over mean of the cuts that Evener finds; the
bound that the largest operation sets; the most even cuts that the operations allow, as pieces need
not add up to equal stages ("reach"; what cuts send does not count there); what the two ways by hand
give; and the step of each, simulated with 1F1B. Operations are timed on the device, one at a time;
no model is allocated. Models of transformers are left out where it is not installed. "uniform" is
an equal number of blocks per stage, and "parameters" the smallest largest count of parameters by
layer (as DeepSpeed's PipelineModule has it by `partition_method="parameters"`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evener import pipeline
from evener.base import units
from evener.pipeline import search
from evener.pipeline.search import Costs, Device, Setting
from evener.pipeline.simulate import Link, Network

Made = tuple[Callable[[], nn.Module], Any, Any, Any]


def models(rows: int, tokens: int) -> Iterator[tuple[str, Made]]:
    """(name, (make, example, target, loss)); everything on the meta device."""
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    text = {"input_ids": ids, "labels": ids}
    try:
        import transformers as t
    except ImportError:
        print("transformers is not installed: its models are left out")
    else:
        llama = t.LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                              num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
                              tie_word_embeddings=True)  # fmt: skip
        mixtral = t.MixtralConfig(hidden_size=1024, intermediate_size=3584, num_hidden_layers=16,
                                  num_attention_heads=16, num_key_value_heads=4,
                                  num_local_experts=8, vocab_size=32000)  # fmt: skip
        t5 = t.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12,
                        decoder_start_token_id=0)  # fmt: skip
        yield "T5-base", (lambda: t.T5ForConditionalGeneration(t5), text, None, None)
        yield "BERT-base", (lambda: t.BertForMaskedLM(t.BertConfig()), text, None, None)
        yield "GPT-2", (lambda: t.GPT2LMHeadModel(t.GPT2Config()), text, None, None)
        yield "Llama-1B tied", (lambda: t.LlamaForCausalLM(llama), text, None, None)
        yield "Mixtral (1.5B)", (lambda: t.MixtralForCausalLM(mixtral), text, None, None)
    from torchvision import models as v

    images = torch.empty(rows, 3, 224, 224, device="meta")
    wanted = torch.zeros(rows, dtype=torch.long, device="meta")
    for name, make in (("ViT-B/16", v.vit_b_16), ("ResNet-152", v.resnet152)):
        yield name, (make, images, wanted, functional.cross_entropy)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--flops", help="estimate instead of timing, as 400T")
    parser.add_argument("--bandwidth", help="with --flops, as 3TB/s")
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", help="models whose name has this in it")
    parser.add_argument("--network", default="25gbit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    link = Link(units.parse_rate(args.network) / 8, 50e-6)
    network = Network(link, link)
    results = []
    dtype = getattr(torch, args.dtype)
    head = f"{'model':15} {'P':>2} {'bound':>6} {'reach':>6} {'evener':>7}"
    print(f"{head} {'uniform':>8} {'params':>7}   step over evener's: uniform, params")
    for name, (make, example, target, loss) in models(args.rows, args.tokens):
        if args.only and args.only.lower() not in name.lower():
            continue
        begin = time.perf_counter()
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            model = make()
        if dtype != torch.float32 and isinstance(example, torch.Tensor):
            example = example.to(dtype)
        torch.set_default_dtype(torch.float32)
        if hasattr(model, "config"):
            model.config.use_cache = False
        captured = pipeline.capture(model, example, target=target, loss=loss)
        if args.flops:
            rates = pipeline.Rates(float(args.flops.rstrip("T")) * 1e12,
                                   units.parse_rate(args.bandwidth) / 8)  # fmt: skip
            profile = pipeline.estimate(captured, [args.rows], rates)
        else:
            profile = pipeline.measure(captured, [args.rows], args.device)
        took = time.perf_counter() - begin
        costs = Costs.of(captured, profile, args.rows, 3.0, recompute=False)
        for stages in map(int, args.stages.split(",")):
            setting = Setting("1F1B", stages, 1, 4 * stages, (Device(math.inf),) * stages, network)
            found = search.search(costs, setting)
            assert found is not None
            # Costs are the same for all three: only the cuts differ.
            mean = float(costs.total().sum()) / stages
            row: dict[str, Any] = {
                "model": name, "stages": stages, "operations": len(captured.ops),
                "bound": max(1.0, search.largest(costs) / mean), "evener": found.imbalance,
                "reachable": search.most_even(costs, setting),
                "step_ms": found.result.step * 1e3, "bubble": found.result.bubble,
                "theory_bubble": (stages - 1) / (5 * stages - 1), "profile_s": took,
                "estimated": list(profile.estimated),
            }  # fmt: skip
            ways = {
                "uniform": search.uniform_by_block(costs, captured, stages),
                "parameters": search.by_parameters(costs, captured, stages),
            }
            for key, cuts in ways.items():
                if cuts is None:
                    row[key] = row[f"{key}_step_ms"] = None
                    continue
                other = search.evaluate(costs, setting, cuts)
                row[key], row[f"{key}_step_ms"] = other.imbalance, other.result.step * 1e3
            results.append(row)
            print(line(row), flush=True)
    for key in ("uniform", "parameters"):
        ratios = [r[f"{key}_step_ms"] / r["step_ms"] for r in results if r[key] is not None]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{key}: step over Evener's, geometric mean {mean:.3f}, "
                  f"from {min(ratios):.3f} to {max(ratios):.3f}")  # fmt: skip
    if args.json:
        how = f"{args.flops}, {args.bandwidth}" if args.flops else args.device
        record = {
            "device": how, "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(), "rows": args.rows, "tokens": args.tokens,
            "dtype": args.dtype, "network": args.network, "results": results,
            "versions": {p: version(p) for p in ("torch", "torchvision", "transformers")},
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def line(row: dict[str, Any]) -> str:
    def over(key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    ratios = [
        "-" if row[key] is None else f"{row[f'{key}_step_ms'] / row['step_ms']:.3f}"
        for key in ("uniform", "parameters")
    ]
    return (
        f"{row['model']:15} {row['stages']:2} {row['bound']:6.3f} {row['reachable']:6.3f} "
        f"{row['evener']:7.3f} "
        f"{over('uniform', '.3f'):>8} {over('parameters', '.3f'):>7}   {', '.join(ratios)}"
    )


if __name__ == "__main__":
    main()
