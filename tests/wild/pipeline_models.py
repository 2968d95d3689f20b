"""Models of others in a pipeline of two stages: `python -m tests.wild.pipeline_models`.

It runs in the wild environment (`make wild` makes it), on two CPU processes, with tiny models in
float32. Each trains 3 steps of SGD in 4 microbatches, cut and whole. Losses must be the whole
model's, and weights too, bit for bit; where both stages use a parameter, to rounding. A model in
REFUSED must be refused, with these words.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evener import pipeline
from evener.errors import UsageError
from tests import worlds

WORDS, ROWS, PARTS, STEPS = 96, 8, 4, 3
RATES = pipeline.Rates(1e11, 1e10, 1e-6)
REFUSED: dict[str, str] = {}
APART = 1e-5  # of what training did to all weights
Case = tuple[nn.Module, dict[str, Any], Any]

_DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
    "attention_dropout": 0.0,
}  # fmt: skip
_ENCODER = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_SEEN = {
    "image_size": 32, "patch_size": 8, "num_labels": 7, "hidden_size": 32, "num_hidden_layers": 4,
    "intermediate_size": 48, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _text(kind: str, **config: Any) -> Case:
    model = _transformers(kind, **config)
    tokens = torch.randint(3, WORDS, (ROWS, 12))
    return model, {"input_ids": tokens, "labels": tokens.clone()}, None


def _transformers(kind: str, **config: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, kind)
    made: nn.Module = cls(cls.config_class(**config))
    return made


def _images(kind: str, **config: Any) -> Case:
    model = _transformers(kind, **{**_SEEN, **config})
    images = torch.randn(ROWS, 3, 32, 32)
    return model, {"pixel_values": images, "labels": torch.arange(ROWS) % 7}, None


def _timm(name: str, size: int = 32, **config: Any) -> Case:
    import timm

    model = timm.create_model(name, num_classes=7, **config)
    return model, {"x": torch.randn(ROWS, 3, size, size)}, torch.arange(ROWS) % 7


def _whisper() -> Case:
    model = _transformers(
        "WhisperForConditionalGeneration", vocab_size=WORDS, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=50, num_mel_bins=16,
        max_target_positions=32, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, dropout=0.0, use_cache=False,
    )  # fmt: skip
    sounds = torch.randn(ROWS, 16, 100)
    return model, {"input_features": sounds, "labels": torch.randint(3, WORDS, (ROWS, 12))}, None


MODELS: dict[str, Callable[[], Case]] = {
    "Qwen3": lambda: _text("Qwen3ForCausalLM", **_DECODER),
    "Gemma 2": lambda: _text("Gemma2ForCausalLM", **_DECODER, sliding_window=8),
    "Phi-3": lambda: _text("Phi3ForCausalLM", **_DECODER),
    "GPT-NeoX": lambda: _text("GPTNeoXForCausalLM", **_DECODER),
    "OLMo 2": lambda: _text("Olmo2ForCausalLM", **_DECODER),
    "OPT": lambda: _text(
        "OPTForCausalLM", vocab_size=WORDS, hidden_size=32, ffn_dim=48, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=64, dropout=0.0, word_embed_proj_dim=32,
        use_cache=False,
    ),
    "Mamba": lambda: _text(
        "MambaForCausalLM", vocab_size=WORDS, hidden_size=32, state_size=8, num_hidden_layers=4,
        use_cache=False,
    ),
    "ELECTRA": lambda: _text("ElectraForMaskedLM", **_ENCODER, embedding_size=32),
    "DeBERTa v2": lambda: _text("DebertaV2ForMaskedLM", **_ENCODER),
    "ModernBERT": lambda: _text(
        "ModernBertForMaskedLM", **{**_ENCODER, "attention_dropout": 0.0, "cls_token_id": 1,
                                    "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "BART": lambda: _text(
        "BartForConditionalGeneration", vocab_size=WORDS, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
        pad_token_id=0, use_cache=False,
    ),
    "Cohere": lambda: _text(
        "CohereForCausalLM", **{k: v for k, v in _DECODER.items() if k != "head_dim"},
    ),
    "FNet": lambda: _text(
        "FNetForMaskedLM", vocab_size=WORDS, hidden_size=32, intermediate_size=48,
        num_hidden_layers=4, hidden_dropout_prob=0.0, max_position_embeddings=64, pad_token_id=0,
    ),
    "Whisper": _whisper,
    "DINOv2": lambda: _images("Dinov2ForImageClassification", mlp_ratio=2),
    "ConvNeXt (timm)": lambda: _timm(
        "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)
    ),
    "Swin (timm)": lambda: _timm(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(1, 1, 2, 1),
        num_heads=(2, 2, 4, 4), window_size=4, drop_path_rate=0.0,
    ),
    "EfficientNet (timm)": lambda: _timm(
        "efficientnet_lite0", 96, drop_rate=0.0, drop_path_rate=0.0
    ),
    "BEiT (timm)": lambda: _timm(
        "beit_base_patch16_224", img_size=32, depth=4, embed_dim=32, num_heads=2
    ),
    "XCiT (timm)": lambda: _timm(
        "xcit_nano_12_p8_224", img_size=32, depth=4, embed_dim=32, num_heads=2
    ),
    "PVT v2 (timm)": lambda: _timm(
        "pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)
    ),
    "DeiT (timm)": lambda: _timm(
        "deit_tiny_patch16_224", img_size=32, depth=4, embed_dim=32, num_heads=2
    ),
}  # fmt: skip


def _loss(model: nn.Module, inputs: dict[str, Any], target: Any) -> torch.Tensor:
    out = model(**inputs)
    found: torch.Tensor = out.loss if target is None else cross_entropy(out, target)
    return found


def whole(case: Case) -> list[float]:
    """The losses of the model that is not cut; it is trained."""
    model, inputs, target = case
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parts = {name: tensor.chunk(PARTS) for name, tensor in inputs.items()}
    wanted = target.chunk(PARTS) if target is not None else [None] * PARTS
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for m in range(PARTS):
            loss = _loss(model, {k: v[m] for k, v in parts.items()}, wanted[m])
            (loss / PARTS).backward()
            total += loss.item() / PARTS
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compared(name: str, made: Callable[[], Case]) -> tuple[bool, str]:
    """Whether it does what it should, and what it did."""
    torch.manual_seed(0)
    model, inputs, target = made()
    model.train()
    before = copy.deepcopy(model)
    want = whole((model, inputs, target))
    loss = cross_entropy if target is not None else None
    try:
        pipe = pipeline.auto(before, inputs, target=target, loss=loss, rates=RATES,
                             microbatches=PARTS, timeout=60)  # fmt: skip
    except UsageError as error:
        words = REFUSED.get(name)
        return words is not None and words in error.problem, f"refused: {error.problem}"
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(pipe.step(**inputs, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    state, start = model.state_dict(), before.state_dict()
    other, off, changed = [], 0.0, 0.0
    for key, tensor in pipe.state_dict().items():
        off += float((tensor.double() - state[key].double()).square().sum())
        changed += float((state[key].double() - start[key].double()).square().sum())
        if not torch.equal(tensor, state[key]):
            other.append(key)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, want, strict=True))
    # A parameter of both stages is rounded in another way, and after a step all others follow.
    worst = (off / max(changed, 1e-30)) ** 0.5
    good = apart < 1e-5 and (worst < APART if pipe.plan.tied else not other)
    said = f"loss apart {apart:.0e}, {len(other)} of {len(state)} tensors not equal"
    said += f", by {worst:.0e} of what training did" if other else ""
    return good, said + (", tied over stages" if pipe.plan.tied else "")


def run(rank: int, size: int, names: list[str]) -> list[tuple[str, bool, str, float]]:
    """All of them in one pair of processes."""
    found = []
    for name in names:
        begin = time.perf_counter()
        try:
            good, said = compared(name, MODELS[name])
        except Exception:  # noqa: BLE001  # the other models are tried all the same
            good, said = False, f"FAILED\n{traceback.format_exc()[-900:]}"
        found.append((name, good, said, time.perf_counter() - begin))
    return found


def main() -> int:
    """Exit status 1 where a model does not do what it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-k", default="", help="models whose names contain this")
    given = parser.parse_args()
    names = [name for name in MODELS if given.k.lower() in name.lower()]
    bad = 0
    for first, second in zip(*worlds.run([2], run, names, timeout=600), strict=True):
        name, good, said, _ = first if not first[1] else second
        bad += not good
        print(f"{name:20} {said}{'' if good else '  <-'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
