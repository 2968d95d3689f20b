"""Stage times measured on a CPU, beside those that the plan expects.

    python benchmarks/pipeline_stages.py --json benchmarks/results/pipeline-stages-cpu.json
    python benchmarks/pipeline_stages.py --only gpt --stages 2

For each model and number of stages: `pipeline.plan` cuts it, and each stage runs forward and
backward on the tensors that the stage before really sends. One process, one thread, one stage at a
time, in turns: P processes on fewer than P cores would measure who waits for a core. So what is
measured is the time of stages, and not that of a step. The clock is the thread's own CPU time, so
that other programs of the machine do not count, and of the rounds the fastest, because programs
that share caches and memory can only add to it. Beside it: what the plan expected, and the unsplit
model's own forward and backward. Gradients are added up, as over the microbatches of a step.
Results are added to those that the file has.

`--seconds` bounds the rounds of one model and number of stages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evener import pipeline
from evener.pipeline import search
from evener.pipeline.capture import Captured
from evener.pipeline.search import Costs, Device, Setting
from evener.pipeline.simulate import Network
from evener.pipeline.split import Draw, Split, StageModule

Made = tuple[Callable[[], nn.Module], Any, Any, Any]
Tensors = tuple[torch.Tensor, ...]


def models(rows: int, tokens: int) -> Iterator[tuple[str, Made]]:
    """(name, (make, example, target, loss)). Sizes are those that a CPU trains in seconds."""
    import transformers as t
    from torchvision import models as v

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30000, (rows, tokens), generator=generator)
    text = {"input_ids": ids, "labels": ids}
    llama = t.LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                          num_attention_heads=12, num_key_value_heads=4, vocab_size=32000,
                          tie_word_embeddings=True)  # fmt: skip
    mixtral = t.MixtralConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=12,
                              num_attention_heads=8, num_key_value_heads=4, num_local_experts=8,
                              vocab_size=32000)  # fmt: skip
    t5 = t.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)
    yield "T5-small", (lambda: t.T5ForConditionalGeneration(t5), text, None, None)
    yield "BERT-base", (lambda: t.BertForMaskedLM(t.BertConfig()), text, None, None)
    yield "GPT-2", (lambda: t.GPT2LMHeadModel(t.GPT2Config()), text, None, None)
    yield "Llama 110M, tied", (lambda: t.LlamaForCausalLM(llama), text, None, None)
    yield "Mixtral 200M", (lambda: t.MixtralForCausalLM(mixtral), text, None, None)
    images = torch.randn(rows, 3, 224, 224, generator=generator)
    wanted = torch.zeros(rows, dtype=torch.long)
    for name, make in (("ViT-B/16", v.vit_b_16), ("ResNet-152", v.resnet152)):
        yield name, (make, images, wanted, functional.cross_entropy)


class Chain:
    """The stages of a plan in one process, which share the model's tensors."""

    def __init__(self, captured: Captured, cuts: list[int], leaves: list[Any]) -> None:
        self.split = Split(captured, cuts)
        device, draw = torch.device("cpu"), Draw()
        self.modules: list[StageModule] = [
            self.split.module(s, device, draw, place=lambda _name, held, _parameter: held)
            for s in range(len(self.split.bounds) - 1)
        ]
        given = dict(zip(self.split.input_names, leaves, strict=True))
        self.inputs = [{name: given[name] for name in module.needs} for module in self.modules]

    def pass_once(self, rows: int) -> list[float]:
        """Seconds of each stage's forward and backward."""
        took = [0.0] * len(self.modules)
        kept: list[tuple[Tensors, Tensors]] = []
        sent: Tensors = ()
        for s, module in enumerate(self.modules):
            edges = self.split.edge(self.split.bounds[s])
            came = tuple(
                self.split.laid(edge, x.detach(), rows).requires_grad_(edge.differentiable)
                for x, edge in zip(sent, edges, strict=True)
            )
            begin = time.thread_time()
            sent = module(*came, **self.inputs[s])
            took[s] += time.thread_time() - begin
            kept.append((came, sent))
        gradients: list[torch.Tensor | None] = [torch.ones(())]
        for s in reversed(range(len(self.modules))):
            came, left = kept.pop()
            pairs = [(out, gradient) for out, gradient in zip(left, gradients, strict=True)
                     if out.requires_grad]  # fmt: skip
            begin = time.thread_time()
            torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
            took[s] += time.thread_time() - begin
            gradients = [
                x.grad if x.grad is not None else torch.zeros_like(x) if x.requires_grad else None
                for x in came
            ]
        return took


def whole(model: nn.Module, example: Any, target: Any, loss: Any) -> float:
    """Seconds of the unsplit model's forward and backward."""
    begin = time.thread_time()
    out = model(**example) if isinstance(example, dict) else model(example)
    (out.loss if loss is None else loss(out, target)).backward()
    return time.thread_time() - begin


def measured(name: str, made: Made, counts: list[int], seconds: float) -> list[dict[str, Any]]:
    make, example, target, loss = made
    torch.manual_seed(0)
    model = make().train()
    if hasattr(model, "config"):
        model.config.use_cache = False
    rows = example["input_ids"].shape[0] if isinstance(example, dict) else example.shape[0]
    found = []
    for module in model.modules():  # the unsplit model draws in another order, and as long
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for stages in counts:
        # One microbatch per stage is the least that the schedule takes; it changes
        # nothing in the stages, whose times are per microbatch.
        begin = time.perf_counter()
        call = pipeline.Example.of(example, target)
        several = call.resized(rows * stages)
        planned = pipeline.planned(
            model, several, loss=loss, stages=stages, microbatches=stages, device="cpu",
            target=several.target,
        )  # fmt: skip
        took = time.perf_counter() - begin
        plan, captured = planned.plan, planned.captured
        chain = Chain(captured, plan.cuts, captured.flatten(call))
        rounds: list[list[float]] = []
        alone: list[float] = []
        for _ in range(2):  # buffers of gradients are made, caches are filled
            chain.pass_once(rows)
            whole(model, example, target, loss)
        until = time.perf_counter() + seconds
        while len(rounds) < 5 or (time.perf_counter() < until and len(rounds) < 40):
            rounds.append(chain.pass_once(rows))
            alone.append(whole(model, example, target, loss))
        own = [min(each) for each in zip(*rounds, strict=True)]
        wanted = [stage.seconds for stage in plan.stages]
        costs = Costs.of(captured, planned.profile, rows, 3.0, recompute=False)
        mean = float(costs.total().sum()) / stages
        setting = Setting("1F1B", stages, 1, stages, (Device(math.inf),) * stages, Network())
        found.append(
            {
                "model": name, "stages": stages, "cuts": plan.cuts,
                "blocks": [stage.blocks for stage in plan.stages],
                "bound": max(1.0, search.largest(costs) / mean),
                "reachable": search.most_even(costs, setting),
                "predicted_ms": [t * 1e3 for t in wanted],
                "measured_ms": [t * 1e3 for t in own],
                "predicted_imbalance": max(wanted) * stages / sum(wanted),
                "measured_imbalance": max(own) * stages / sum(own),
                "unsplit_ms": min(alone) * 1e3,
                "median_ms": [statistics.median(each) * 1e3 for each in zip(*rounds, strict=True)],
                "rounds": len(rounds), "planning_s": took,
                "estimated": plan.estimated,
            }
        )  # fmt: skip
        print(line(found[-1]), flush=True)
        model.zero_grad(set_to_none=True)
    return found


def line(row: dict[str, Any]) -> str:
    total, wanted = sum(row["measured_ms"]), sum(row["predicted_ms"])
    stages = " ".join(f"{t:.0f}" for t in row["measured_ms"])
    return (
        f"{row['model']:17} {row['stages']:2} {row['bound']:6.3f} "
        f"{row['reachable']:6.3f} "
        f"{row['predicted_imbalance']:9.3f} {row['measured_imbalance']:8.3f} "
        f"{wanted / total:14.3f} {total / row['unsplit_ms']:13.3f}   {stages}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--seconds", type=float, default=8.0, help="of rounds, per row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':17} {'P':>2} {'bound':>6} {'reach':>6} {'predicted':>9} {'measured':>8} "
          f"{'predicted sum':>14} {'sum / unsplit':>13}   ms of each stage")  # fmt: skip
    results = []
    for name, made in models(args.rows, args.tokens):
        if args.only.lower() in name.lower():
            counts = [int(count) for count in args.stages.split(",")]
            results += measured(name, made, counts, args.seconds)
    if args.json:
        write(args.json, results, args)


def write(path: Path, results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Rows of another model or number of stages that the file has stay."""
    before: list[dict[str, Any]] = []
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))["results"]
    new = {(row["model"], row["stages"]) for row in results}
    rows = [row for row in before if (row["model"], row["stages"]) not in new] + results
    order = [name for name, _ in models(1, 1)]
    rows.sort(key=lambda row: (order.index(row["model"]), row["stages"]))
    record = {
        "device": "cpu", "machine": platform.processor() or platform.machine(), "threads": 1,
        "clock": "CPU time of the thread",
        "rows": args.rows, "tokens": args.tokens, "results": rows,
        "versions": {p: importlib.metadata.version(p)
                     for p in ("torch", "torchvision", "transformers")},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
