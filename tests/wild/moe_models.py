"""Experts of transformers and ours in their models: `python -m tests.wild.moe_models`.

It runs in the wild environment (`make wild` makes it), on one CPU process, with tiny models in
float32. Loss and gradients must be the model's own to rounding; a model in REFUSED must be refused,
with these words.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

import torch

from evener import moe
from evener.errors import UsageError

_BASE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "use_cache": False, "intermediate_size": 48, "moe_intermediate_size": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_FULL = {"layer_types": ["full_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Olmoe": {"num_experts": 4},
    "FlexOlmo": {"num_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "GraniteMoeShared": {"num_local_experts": 4, "shared_intermediate_size": 24},
    "Lfm2Moe": {"num_experts": 4, "num_dense_layers": 1, **_FULL},
    "Glm4Moe": {"n_routed_experts": 8, "head_dim": 8},
    "Glm4MoeLite": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, **_LATENT},
    "SolarOpen": {"n_routed_experts": 8, "head_dim": 8},
    "Afmoe": {"num_experts": 4, "head_dim": 8},
    "ExaoneMoe": {"num_experts": 4, "head_dim": 8},
    "MiniMaxM2": {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 8},
    "Qwen3_5Moe": {"num_experts": 4, "head_dim": 8, **_FULL},
    "DeepseekV32": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                    "first_k_dense_replace": 1, **_LATENT},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "MiMoV2Flash": {"n_routed_experts": 8},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2},
    "LongcatFlash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 8,
                     "zero_expert_num": 4, "moe_topk": 2, "num_layers": 1, "head_dim": 8,
                     **_LATENT},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8,
               "interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
    "JetMoe": {"num_local_experts": 4, "kv_channels": 8},
    "NemotronH": {"n_routed_experts": 4, "hybrid_override_pattern": "*E", "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}  # fmt: skip
REFUSED = {
    "LongcatFlash": "4 of 12 experts that give their token back as it is",
    "Llama4": "keeps its matrices transposed",
    "JetMoe": "no experts as stacked matrices",
    "NemotronH": "experts without a gate",
    "GptOss": "experts with a bias",
}
APART = 1e-4  # of a gradient, relative to its length


def made(name: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig", None)
    config = config or getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**{**_BASE, **MODELS[name]}))
    model.config._experts_implementation = "eager"
    for parameter in model.parameters():  # some are left empty, as zeros or as they lay in memory
        if not parameter.isfinite().all() or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train().float()


def trained(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = torch.arange(40).view(2, 20) * 7 % 61 + 3
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def compared(name: str) -> tuple[bool, str]:
    """Whether it does what it should, and what it did."""
    model = made(name)
    loss, want = trained(model)
    try:
        moe.convert(model)
    except UsageError as error:
        words = REFUSED.get(name)
        return words is not None and words in error.problem, f"refused: {error.problem}"
    if name in REFUSED:
        return False, "was converted, and should have been refused"
    layers = sum(isinstance(module, moe.Experts) for module in model.modules())
    again, got = trained(model)
    if set(got) != set(want):
        return False, f"gradients of other parameters: {set(got) ^ set(want)}"
    worst = max(
        float((got[k] - want[k]).norm() / want[k].norm().clamp(min=1e-12)) for k in want
    )  # fmt: skip
    apart = abs(again - loss) / abs(loss)
    return (
        layers > 0 and worst < APART and apart < 1e-5,
        f"{layers} layer(s), loss apart {apart:.0e}, a gradient at most {worst:.1e}",
    )


def main() -> int:
    """Exit status 1 where a model does not do what it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-k", default="", help="models whose names contain this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for name in MODELS:
        if given.k not in name:
            continue
        try:
            good, said = compared(name)
        except Exception:  # noqa: BLE001  # the other models are tried all the same
            good, said = False, f"FAILED\n{traceback.format_exc()[-900:]}"
        bad += not good
        print(f"{name:18} {said}{'' if good else '  <-'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
