"""Causal language models of transformers with their sequence split over two ranks, beside the whole
sequence: `python -m tests.wild.zero_sequences`.

It runs in the wild environment (`make wild` makes it), over Gloo. Every class that can be made tiny
from one set of sizes takes part, in float32, with half of a row's labels ignored. Loss and
gradients must be those of the whole sequence to rounding, or the model must be refused, or raise.
`-k NAME` takes one. Exit status 1 where a model is wrong, or a rank dies or hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evener.errors import UsageError
from evener.zero.ulysses import Split
from tests.twins._ranks import Ranks

LENGTH, ROUNDING = 12, 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
    "max_position_embeddings": 64, "moe_intermediate_size": 16, "num_local_experts": 4,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "attn_implementation": "sdpa",
}  # fmt: skip
DROPOUTS = (
    "attention_dropout", "dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "activation_dropout", "layerdrop", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "residual_dropout",
)  # fmt: skip
WITHOUT: tuple[tuple[str, ...], ...] = (
    (), ("head_dim",), ("head_dim", "v_head_dim"), ("head_dim", "num_key_value_heads"),
)  # fmt: skip
"""Sizes that are left out, until a model can be made."""
LARGE = {"BltForCausalLM", "Gemma4UnifiedAssistantForCausalLM"}
"""Parts of these keep their own sizes, of gigabytes."""
GOOD = {"right", "refused", "raises", "not made"}


def names() -> list[str]:
    """All causal language models."""
    import transformers

    ends = ("ForCausalLM", "LMHeadModel")
    return sorted(name for name in dir(transformers) if name.endswith(ends) and name not in LARGE)


def _made(name: str, without: tuple[str, ...]) -> Any:
    import transformers

    cls = getattr(transformers, name)
    torch.manual_seed(0)
    sizes = {key: size for key, size in SIZES.items() if key not in without}
    model = cls(cls.config_class(**sizes, **dict.fromkeys(DROPOUTS, 0.0))).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    return model


def compared(_rank: int, size: int, name: str) -> tuple[str, str]:
    """What became of a model on a rank, and more of it."""
    warnings.filterwarnings("ignore")
    tokens = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, : LENGTH // 2] = -100
    whole: Any = None
    why = ""
    for without in WITHOUT:
        try:
            whole = _made(name, without)
            wanted = whole(input_ids=tokens, labels=labels).loss
            wanted.backward()
            break
        except Exception as error:  # noqa: BLE001 - these sizes are not for it
            whole, why = None, why or str(error).partition("\n")[0][:80]
    if whole is None:
        return "not made", why
    torch.manual_seed(1)
    if not torch.equal(whole(input_ids=tokens, labels=labels).loss, wanted):
        return "not made", "it draws random numbers"
    model = _made(name, without)
    model.load_state_dict(whole.state_dict())
    try:
        split = Split(model, size)
        split.join(torch.device("cpu"))
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        split.close()
    except UsageError as error:
        return "refused", error.problem
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        return "raises", f"{type(error).__name__}: {error}"[:200]
    off, way = torch.zeros(2)
    for p, right in zip(model.parameters(), whole.parameters(), strict=True):
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(mine)
        grad = torch.zeros_like(p) if right.grad is None else right.grad
        off += (mine / size - grad).square().sum()
        way += grad.square().sum()
    share = float((off / way).sqrt())
    good = share < ROUNDING and abs(float(loss - wanted)) < ROUNDING
    return "right" if good else "WRONG", f"gradients off by {share:.0e}, loss {float(loss):.5f}"


def main() -> int:
    """The table; exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="", help="one of the models")
    parser.add_argument("--json", type=Path, help="write what was found here")
    given = parser.parse_args()
    world, found = Ranks(2, timeout=120), {}
    for name in names():
        if given.k not in name:
            continue
        try:
            found[name] = world.run("tests.wild.zero_sequences:compared", name)[0]
        except AssertionError as error:
            found[name] = "dies", str(error).strip().splitlines()[-1][:200]
        print(f"{name:45} {found[name][0]:10} {found[name][1]}", flush=True)
    counts = Counter(kind for kind, _ in found.values())
    print(", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if {*counts} <= GOOD else 1


if __name__ == "__main__":
    sys.exit(main())
