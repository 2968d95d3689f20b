"""T5, BERT and GPT-2 of transformers, tiny, with dropout: bit for bit a plain torch loop.

The plain loop is AdamW on float32 masters in separate torch operations (models.py). With
`loss: plain` sums have the same order. A run that was saved in the middle and goes on in a new
engine has the same bits too. Needs transformers 5, which Evener does not depend on: `make wild` has
it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import zero
from tests.zero.models import Plain

transformers = pytest.importorskip("transformers", minversion="5")

LR, DECAY, CLIP, STEPS = 1e-3, 0.1, 0.5, 24
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


def plain(model: Any, dtype: torch.dtype) -> tuple[list[float], Plain]:
    """The plain loop's losses, and the loop."""
    loop, losses = Plain(model, LR, DECAY, CLIP, dtype), []
    for step in range(STEPS):
        torch.manual_seed(1000 + step)
        loss = model(**batch_of(step)).loss
        loss.backward()
        for parameter in loop.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loop.step()
        losses.append(float(loss))
    return losses, loop


def started(model: Any, dtype: torch.dtype) -> zero.Engine:
    """The engine, all states offloaded."""
    config = {
        "bf16": {"enabled": dtype == torch.bfloat16},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "evener": {"device": "cpu", "loss": "plain"},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_losses_and_weights_are_those_of_a_plain_loop_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    first = model_of(name, 0)
    wanted, loop = plain(copy.deepcopy(first), dtype)
    engine = started(copy.deepcopy(first), dtype)
    assert run(engine, range(STEPS)) == wanted
    mine = weights(engine)
    engine.close()
    names = {id(p): n for n, p in loop.model.named_parameters()}
    for parameter, master in zip(loop.trained, loop.masters, strict=True):
        assert torch.equal(mine[names[id(parameter)]].float(), master.reshape(-1))
    half = STEPS // 2
    engine = started(copy.deepcopy(first), dtype)
    begun = run(engine, range(half))
    zero.save_checkpoint(engine, tmp_path)
    engine.close()
    engine = started(model_of(name, 5), dtype)
    zero.load_checkpoint(engine, tmp_path)
    assert begun + run(engine, range(half, STEPS)) == wanted
    again = weights(engine)
    assert all(torch.equal(again[name], mine[name]) for name in mine)
    engine.close()
