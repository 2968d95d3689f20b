"""Models of transformers and torchvision, unmodified, in a pipeline of two processes: the whole
model's gradients, bit for bit.

What differs, in the last bit: a parameter that two stages use. Its gradient is the sum over the
stages of the sums over microbatches; the unsplit model adds both uses in each microbatch.

Those of transformers need transformers 5, which Evener does not depend on: `make wild` has it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

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
# The parameters that lie on both stages.
TIED = {
    "GPT2": "transformer.wte.weight", "Llama, tied": "model.embed_tokens.weight",
    "Bert": "bert.embeddings.word_embeddings.weight", "T5": "shared.weight",
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


def vision(kind: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    from torchvision import models

    torch.manual_seed(0)
    model: Any
    if kind == "ViT":
        model = models.VisionTransformer(
            image_size=16, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=24,
            num_classes=7,
        )  # fmt: skip
    else:
        model = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=7)
    return model.train(), {"x": torch.randn(8, 3, 16, 16)}, torch.arange(8) % 7


def step(rank: int, size: int, kind: str) -> Any:
    target = loss = None
    if kind in ("ViT", "ResNet"):
        model, inputs, target = vision(kind)
        loss = cross_entropy
    else:
        model, inputs = case(kind)
    pipe = pipeline.auto(model, inputs, target=target, loss=loss, rates=RATES, microbatches=4,
                         timeout=60)  # fmt: skip
    value = pipe.step(**inputs, target=target)
    gradients = {n: p.grad for n, p in pipe.named_parameters()}
    pipe.close()
    return value.item(), gradients


def unsplit(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    target = None
    if kind in ("ViT", "ResNet"):
        model, inputs, target = vision(kind)
    else:
        model, inputs = case(kind)
    total = 0.0
    for m in range(4):
        out = model(**{k: v.chunk(4)[m] for k, v in inputs.items()})
        loss = (out.loss if target is None else cross_entropy(out, target.chunk(4)[m])) / 4
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def two() -> worlds.Several:
    names = ["ViT", "ResNet"]
    if importlib.util.find_spec("transformers") is not None:
        names += KINDS
    return worlds.several([2], {name: (step, name) for name in names})


@pytest.mark.parametrize("kind", [*KINDS, "ViT", "ResNet"])
def test_gradients_are_those_of_the_unsplit_model(kind: str, two: worlds.Several) -> None:
    total, wanted = unsplit(kind)
    seen, other = set(), set()
    for value, gradients in two[kind]:
        assert value == pytest.approx(total, rel=1e-6)
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            seen.add(name)
            if not torch.equal(gradient, wanted[name]):
                other.add(name)
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    assert seen == set(wanted)
    assert other <= {TIED.get(kind)}, other
