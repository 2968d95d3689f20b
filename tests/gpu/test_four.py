"""Four ranks on GPUs: stages, experts, sharded states and HSDP, each beside a plain loop.

On fewer than four GPUs ranks share them (`tests.gpus`). Then this says that results are right, and
nothing of NVLink or of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evener import moe, pipeline, zero
from tests import gpus, test_fsdp, worlds
from tests.comm import models
from tests.gpu.test_nccl import ENV
from tests.moe import test_training as experts
from tests.pipeline import models as shapes
from tests.zero import models as layers

pytestmark = [
    pytest.mark.gpu,
    gpus.needs(2, 2),
]
STEPS = 5


# --- pipeline ---


def stages(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Losses of a model in `size` stages, and of the same model whole on this rank's device."""
    device = models.device()
    given = {
        "tokens": shapes.tokens(8).to(device),
        "labels": shapes.tokens(8, 1).to(device),
    }
    torch.manual_seed(3)
    plain = shapes.GPT(6).to(device)
    torch.manual_seed(3)
    pipe = pipeline.auto(shapes.GPT(6), given, microbatches=4, timeout=60)
    assert len(pipe.plan.stages) == size
    mine = torch.optim.SGD(pipe.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    found, wanted = [], []
    for _ in range(STEPS):
        found.append(pipe.step(**given).item())
        loss = plain(**given)["loss"]
        loss.backward()
        wanted.append(loss.item())
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()
    return found, wanted


def test_a_pipeline_of_four_stages_has_the_losses_of_the_whole_model() -> None:
    for found, wanted in worlds.run([1, 1, 1, 1], stages, gpu=True, env=ENV, timeout=150):
        assert wanted[-1] < wanted[0]
        assert found == pytest.approx(wanted, rel=1e-4)


# --- mixtures of experts ---


def spread(rank: int, size: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Losses of experts over all ranks, and of a dense loop over them, over the same tokens."""
    device = models.device()
    plain = experts.model(True, 8).to(device, dtype)
    ours = moe.spread(experts.model(False, 8).to(device, dtype), size, chunks=2)
    return experts.losses(ours, 20, rank, size), experts.losses(plain, 20)


@pytest.mark.parametrize("shape", [[2, 2], [1, 1, 1, 1]], ids=["2x2", "4x1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_experts_over_four_ranks_have_the_losses_of_a_dense_loop(
    shape: list[int], dtype: torch.dtype
) -> None:
    rtol = 1e-7 if dtype == torch.float64 else 1e-3
    for found, wanted in worlds.run(shape, spread, dtype, gpu=True, env=ENV, timeout=150):
        assert wanted[-1] < wanted[0]
        assert found == pytest.approx(wanted, rel=rtol)


# --- training in host memory ---


def own() -> torch.nn.Module:
    return layers.Model(width=64)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=layers.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Predict the input."""
    out = model(tokens)
    logits = getattr(out, "logits", out)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def sharded(
    rank: int, size: int, make: Callable[[], torch.nn.Module], nodes: str
) -> tuple[list[float], list[float], tuple[int, int]]:
    """Losses under the engine, on this rank's batches; those of a plain loop over all ranks'."""
    device = models.device()
    data = [[t.to(device) for t in layers.batches(STEPS, seed=r)] for r in range(size)]
    hyper = {"lr": 1e-3, "weight_decay": 0.1}
    torch.manual_seed(0)
    plain = make().to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), **hyper)
    wanted = []
    for step in range(STEPS):
        losses = [loss_of(plain, each[step]) for each in data]
        (torch.stack(losses).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(losses[rank].item())
    torch.manual_seed(0)
    engine, *_ = zero.initialize(
        model=make(),
        config={
            "optimizer": {"type": "AdamW", "params": hyper},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "evener": {
                "device": device.type,
                "nodes": nodes,
                "budget": {"gpu": "2GB", "host": "2GB"},
            },
        },
        resident=set(),
    )
    found = []
    for tokens in data[rank]:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    places = engine.world, engine.ranks.replicas
    engine.close()
    return found, wanted, places


@pytest.mark.parametrize("make", [own, llama])
@pytest.mark.parametrize(
    ("shape", "nodes", "places"),
    [([2, 2], "replicate", (2, 2)), ([1, 1, 1, 1], "shard", (4, 1))],
    ids=["2x2", "4x1"],
)
def test_states_over_four_ranks_train_as_a_plain_loop(
    shape: list[int], nodes: str, places: tuple[int, int], make: Callable[[], torch.nn.Module]
) -> None:
    if make is llama:
        pytest.importorskip("transformers", reason="Evener does not depend on transformers")
    for found, wanted, where in worlds.run(
        shape, sharded, make, nodes, gpu=True, env=ENV, timeout=150
    ):
        assert where == places
        assert wanted[-1] < wanted[0]
        assert found == pytest.approx(wanted, rel=1e-4)


# --- HSDP ---


def test_every_form_between_replicas_of_fsdp2() -> None:
    env = {**ENV, "LIGHT_TOPK_THRESHOLD": "0"}
    test_fsdp.check_forms(
        worlds.run([2, 2], test_fsdp.every_form, gpu=True, env=env, timeout=150)[0]
    )
