"""T5, BERT and GPT-2 of transformers for 300 steps: the engine beside a plain torch loop.

    python benchmarks/zero_steps.py [--steps 300] [--only gpt] [--json FILE]

Tiny shapes on a CPU, dropout on, clipping, float32 and bf16. The plain loop is AdamW on float32
masters in separate torch operations (tests/zero/models.py). With `loss: plain` sums have the same
order: every loss and every weight must be equal in all bits. With the fused loss (what users get)
the largest difference of a loss is printed beside the largest between two seeds. A third run stops
in the middle, saves, and goes on in a new engine: it must be equal in all bits too.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.zero.models import Plain

from evener import zero

LR, DECAY, CLIP = 1e-3, 0.1, 0.5
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0}),
    "bert": ("BertForMaskedLM", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 32}),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96,
        "decoder_start_token_id": 0}),
}  # fmt: skip


def model_of(name: str, seed: int) -> Any:
    """The model with weights of this seed."""
    import transformers  # type: ignore[import-not-found,unused-ignore]

    kind, shape = SHAPES[name]
    torch.manual_seed(seed)
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**shape)).train()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """A language that can be learnt: each token follows from the one before, with noise."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 96, (4, 16), generator=generator)
    for place in range(1, 16):
        keep = torch.rand(4, generator=generator) < 0.9
        rows[:, place] = torch.where(keep, (rows[:, place - 1] * 7 + 3) % 96, rows[:, place])
    return {"input_ids": rows, "labels": rows.clone()}


def plain(model: Any, dtype: torch.dtype, steps: int) -> tuple[list[float], Plain]:
    """The plain loop."""
    loop, losses = Plain(model, LR, DECAY, CLIP, dtype), []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        loss = model(**batch_of(step)).loss
        loss.backward()
        for parameter in loop.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loop.step()
        losses.append(float(loss))
    return losses, loop


def started(model: Any, dtype: torch.dtype, loss: str) -> zero.Engine:
    """The engine, all states offloaded."""
    config = {
        "bf16": {"enabled": dtype == torch.bfloat16},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "evener": {"device": "cpu", "loss": loss},
    }
    engine, *_ = zero.initialize(model=model, config=config, resident=set())
    return engine


def run(engine: zero.Engine, steps: range) -> list[float]:
    """The engine's losses."""
    losses = []
    for step in steps:
        torch.manual_seed(1000 + step)
        loss = engine(**batch_of(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def weights(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """All float32 weights."""
    engine.drain()
    return {
        piece.name: chunk.full(piece.offset, piece.offset + piece.numel).clone()
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    }


def compare(name: str, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """One row."""
    first = model_of(name, 0)
    wanted, loop = plain(copy.deepcopy(first), dtype, steps)
    other, _ = plain(model_of(name, 1), dtype, steps)
    engine = started(copy.deepcopy(first), dtype, "plain")
    got = run(engine, range(steps))
    mine = weights(engine)
    engine.close()
    names = {id(p): n for n, p in loop.model.named_parameters()}
    equal = [
        bool(torch.equal(mine[names[id(p)]].float(), master.reshape(-1)))
        for p, master in zip(loop.trained, loop.masters, strict=True)
    ]
    half = steps // 2
    with tempfile.TemporaryDirectory() as folder:
        engine = started(copy.deepcopy(first), dtype, "plain")
        begun = run(engine, range(half))
        zero.save_checkpoint(engine, folder)
        engine.close()
        engine = started(model_of(name, 5), dtype, "plain")
        zero.load_checkpoint(engine, folder)
        begun += run(engine, range(half, steps))
        again = weights(engine)
        engine.close()
    engine = started(copy.deepcopy(first), dtype, "auto")
    fused = run(engine, range(steps))
    engine.close()
    return {
        "equal losses": sum(a == b for a, b in zip(wanted, got, strict=True)),
        "equal weights": f"{sum(equal)}/{len(equal)}",
        "resumed": begun == got and all(torch.equal(again[n], mine[n]) for n in mine),
        "first and last": [wanted[0], sum(wanted[-20:]) / 20],
        "fused differs by": max(abs(a - b) for a, b in zip(wanted, fused, strict=True)),
        "fused, last 20": abs(sum(wanted[-20:]) - sum(fused[-20:])) / 20,
        "seeds, last 20": abs(sum(wanted[-20:]) - sum(other[-20:])) / 20,
    }


def main() -> int:
    """Exit status 1 where something is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, bad = {}, 0
    for name in [given.only] if given.only else list(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            begun = time.perf_counter()
            row = compare(name, dtype, given.steps)
            rows[f"{name}, {str(dtype)[6:]}"] = row
            parts = row["equal weights"].split("/")
            good = row["equal losses"] == given.steps and parts[0] == parts[1] and row["resumed"]
            bad += not good
            print(f"{name:5} {str(dtype)[6:]:9} {row}, {time.perf_counter() - begun:.0f} s",
                  flush=True)  # fmt: skip
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
