"""Models of transformers, unmodified, in a pipeline of two processes: the whole model's gradients.

Needs transformers 5, which Evener does not depend on: `make wild` has it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener import pipeline
from tests import worlds

RATES = pipeline.Rates(1e11, 1e10, 1e-6)
_SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
# Class, config. No dropout: the unsplit model draws in another order.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", {
        "vocab_size": 48, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
    }),
    "Llama": ("LlamaForCausalLM", {**_SMALL, "num_key_value_heads": 1, "use_cache": False}),
    "Llama, tied": ("LlamaForCausalLM", {
        **_SMALL, "num_key_value_heads": 1, "use_cache": False, "tie_word_embeddings": True,
    }),
    "Bert": ("BertForMaskedLM", {
        **_SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "T5": ("T5ForConditionalGeneration", {
        "vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
    }),
    "Mixtral": ("MixtralForCausalLM", {
        **_SMALL, "num_key_value_heads": 1, "num_local_experts": 4, "use_cache": False,
    }),
}  # fmt: skip


def case(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip(
        "transformers", minversion="5",
        reason="needs transformers 5, which Evener does not depend on",
    )  # fmt: skip
    transformers.logging.set_verbosity_error()
    name, shape = KINDS[kind]
    torch.manual_seed(0)
    family = kind.partition(",")[0]
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**shape)).train()
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 48, (2, 8, 10), generator=generator)
    return model, {"input_ids": tokens, "labels": labels}


def step(rank: int, size: int, kind: str) -> Any:
    model, inputs = case(kind)
    pipe = pipeline.auto(model, inputs, rates=RATES, microbatches=4, timeout=60)
    value = pipe.step(**inputs)
    gradients = {n: p.grad for n, p in pipe.named_parameters()}
    pipe.close()
    return value.item(), gradients


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_are_those_of_the_unsplit_model(kind: str) -> None:
    model, inputs = case(kind)
    total = 0.0
    for tokens, labels in zip(*(t.chunk(4) for t in inputs.values()), strict=True):
        loss = model(input_ids=tokens, labels=labels).loss / 4
        loss.backward()
        total += loss.item()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    seen = set()
    for value, gradients in worlds.run([2], step, kind):
        assert value == pytest.approx(total, rel=1e-5)
        for name, gradient in gradients.items():
            if gradient is not None:
                seen.add(name)
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    assert seen == set(wanted)
