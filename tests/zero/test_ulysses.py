"""A sequence over two ranks: memory is that of a part, as planned; batches that differ and what
cannot be split are refused. That results are those of plain torch: tests/twins/zero_sequence.py,
of which a few programs run here. Needs transformers 5: `make wild` has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import zero
from evener.errors import UsageError
from evener.zero.config import ConfigError
from evener.zero.ulysses import Split, refuse_ranks
from tests import worlds
from tests.twins import zero_sequence as twin

transformers = pytest.importorskip("transformers", minversion="5")

PROGRAM: dict[str, Any] = {
    "seed": 1, "kind": "Llama", "ranks": 2, "sequence": 2, "heads": 4, "share": 2, "layers": 2,
    "rows": 2, "length": 12, "ignored": 0.5, "form": "plain", "items": False, "half": False,
    "stage": 3, "loss": "auto", "accumulate": 2, "clip": 0.5, "recompute": True, "planned": True,
    "steps": [["train", 0], ["evaluate", 1], ["differ", 2]],
}  # fmt: skip
CASES = {
    "recomputed": PROGRAM,
    "one head of keys": {**PROGRAM, "share": 4, "items": True, "recompute": False},
    "windows and documents": {**PROGRAM, "kind": "Gemma3", "form": "packed", "stage": 2},
    "padding": {**PROGRAM, "kind": "GPT2", "form": "padded", "planned": False},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_the_whole_sequence(name: str) -> None:
    worlds.run([2], twin.run, CASES[name], "")


@pytest.mark.parametrize("fault", ["a mean of means", "labels are shifted inside of a part"])
def test_a_fault_is_found(fault: str) -> None:
    with pytest.raises(worlds.RankFailedError, match="not close"):
        worlds.run([2], twin.run, PROGRAM, fault)


# --- Memory ---------------------------------------------------------------------------------------

LENGTH = 512


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa",
        **changes,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))


def measured(_rank: int, _size: int, sequence: int) -> tuple[int, int]:
    """The accelerator's peak, planned and as it was; its activations are nearly all of it."""
    torch.set_num_threads(1)
    tokens = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "labels": tokens}
    engine, *_ = zero.initialize(
        model=llama(),
        config={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "evener": {
                "device": "simulated",
                "budget": {"gpu": 1 << 30, "host": 1 << 30},
                "sequence": sequence,
            },
        },
        machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
        example=given,
    )
    for _ in range(3):
        engine.backward(engine(**given).loss)
        engine.step()
    found = engine.memory()
    engine.close()
    return found["gpu planned"], found["gpu peak"]


def test_memory_is_that_of_a_part_as_planned() -> None:
    alone = worlds.run([1], measured, 1)[0]
    both = worlds.run([2], measured, 2)
    for planned, peak in [alone, *both]:
        assert 0.8 * planned <= peak <= planned, (alone, both)
    assert max(peak for _, peak in both) < 0.6 * alone[1], (alone, both)


# --- What is refused ------------------------------------------------------------------------------


def _of(kind: str, **given: Any) -> Any:
    cls = getattr(transformers, kind)
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return cls(cls.config_class(**{**small, **given}))


REFUSED: dict[str, tuple[Callable[[], Any], int, str]] = {
    "heads": (llama, 3, "has 4 heads, not 3 equal parts"),
    "eager": (lambda: llama(attn_implementation="eager"), 2, "has attention 'eager'"),
    "no model of transformers": (lambda: torch.nn.Linear(2, 2), 2, "no model of transformers"),
    "positions by length": (
        lambda: llama(
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
        2,
        "rope_type dynamic",
    ),
    "a state": (
        lambda: _of("Qwen3NextForCausalLM", layer_types=["linear_attention", "full_attention"],
                    head_dim=8, num_experts=2, moe_intermediate_size=16),
        2,
        "layers that are no attention",
    ),
    "a loss of the router": (
        lambda: _of("MixtralForCausalLM", output_router_logits=True, num_key_value_heads=2,
                    intermediate_size=32, num_local_experts=2),
        2,
        "a loss of its router",
    ),
    "no next token": (
        lambda: _of("BertForMaskedLM", intermediate_size=32), 2, "another loss than that of the"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name: str) -> None:
    made, size, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        Split(made(), size)


TOKENS = torch.zeros(2, 8, dtype=torch.int64)
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"labels": None}, "without labels"),
    "odd": ({"input_ids": TOKENS[:, :7], "labels": TOKENS[:, :7]}, "7 tokens are not 2 equal"),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 8, 32)}, "inputs_embeds is not known"),
    "a mask of its own": ({"attention_mask": torch.ones(2, 1, 8, 8)}, "attention_mask"),
    "some logits": ({"logits_to_keep": 1}, "logits_to_keep is not known"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be_split_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Split, "_agree", lambda *_: None)
    given, words = CALLS[name]
    split = Split(model := llama(), 2)
    with pytest.raises(UsageError, match=words):
        model(**{"input_ids": TOKENS, "labels": TOKENS, **given})
    split.close()
    assert float(model(input_ids=TOKENS, labels=TOKENS).loss.detach()) > 0  # as it was


def test_ranks_and_keys_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="groups of 2 cannot be made of 3 ranks"):
        refuse_ranks(2, 3)
    with pytest.raises(UsageError, match="groups of 2 cannot be made of 1 ranks"):
        zero.initialize(model=llama(), config={"evener": {"sequence": 2, "device": "cpu"}})
    with pytest.raises(ConfigError, match=r"evener\.rehearse = true"):
        zero.config.read({"evener": {"sequence": 2, "rehearse": True}})
    with pytest.raises(ConfigError, match="8 is not"):
        zero.config.read(
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "evener": {"sequence": 2},
             "gradient_accumulation_steps": 1}, 4,
        )  # fmt: skip


def nodes(_rank: int, _size: int) -> str:
    try:
        refuse_ranks(2)
    except UsageError as error:
        return str(error)
    return ""


def test_a_sequence_over_nodes_is_refused() -> None:
    assert all("ranks 0 to 1 are on several nodes" in said for said in worlds.run([1, 1], nodes))
    assert worlds.run([2], nodes) == ["", ""]
