"""Stages whose parameters are divided over ranks, in a pipeline and with replicas: four processes,
the same for all cases.

Llama needs transformers 5, which Evener does not depend on: `make wild` has it.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from evener import pipeline
from evener.pipeline.tensor import Sharding, plan_of
from tests import worlds
from tests.pipeline import models
from tests.pipeline.test_transformers import case

RATES = pipeline.Rates(1e11, 1e10, 1e-6)
# torch's words and transformers' mean the same.
WAYS = {
    "layers.*.qkv": ColwiseParallel(), "layers.*.up": "colwise",
    "layers.*.out": RowwiseParallel(), "layers.*.down": "rowwise",
}  # fmt: skip
MESHES = {
    "pipeline x tensor": ((2, 2), ("pipeline", "tensor")),
    "data x tensor": ((2, 1, 2), ("data", "pipeline", "tensor")),
    "tensor x pipeline": ((2, 2), ("tensor", "pipeline")),
}


def made(name: str) -> tuple[Any, dict[str, torch.Tensor], Any]:
    if name == "Llama":
        return *case("Llama, tied"), None
    torch.manual_seed(3)
    return models.GPT(2), {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}, WAYS


traced = functools.cache(made)


def train(rank: int, size: int, name: str, kind: str, folder: str) -> Any:
    shape, names = MESHES[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, inputs, ways = traced(name)
    with models.trace_once:
        pipe = pipeline.auto(
            model, inputs, mesh=mesh, tensor=ways, rates=RATES, microbatches=4, timeout=60
        )
    said = pipe.replicas.said(pipe.plan)
    value = pipe.step(**inputs).item()
    gradients = {n: p.grad.full_tensor() for n, p in pipe.named_parameters()}
    divided = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel()
                  for p in pipe.parameters())  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()
    pipe.save(folder, optimizer)
    after = [pipe.step(**inputs).item()]
    optimizer.step()
    optimizer.zero_grad()
    after.append(pipe.step(**inputs).item())
    # Back to the checkpoint: the same losses again.
    optimizer.zero_grad()
    pipe.load(folder, optimizer)
    again = [pipe.step(**inputs).item()]
    optimizer.step()
    optimizer.zero_grad()
    again.append(pipe.step(**inputs).item())
    pipe.close()
    return value, gradients, divided, said, after, again


CASES = {
    "pipeline x tensor": "GPT", "data x tensor": "GPT", "tensor x pipeline": "Llama",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def four(folder: Path) -> worlds.Several:
    there = importlib.util.find_spec("transformers") is not None
    return worlds.several([4], {
        kind: (train, name, kind, str(folder / kind))
        for kind, name in CASES.items()
        if there or name != "Llama"
    })  # fmt: skip


@pytest.mark.parametrize("kind", list(CASES))
def test_divided_stages_train_as_the_whole_model(
    kind: str, four: worlds.Several, folder: Path
) -> None:
    name = CASES[kind]
    model, inputs, _ = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, wanted = [], {}
    for step in range(3):
        total = 0.0
        for m in range(4):
            out = model(**{k: v.chunk(4)[m] for k, v in inputs.items()})
            (out["loss"] / 4).backward()
            total += out["loss"].item() / 4
        losses.append(total)
        if step == 0:
            wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            state = {n: t.clone() for n, t in model.state_dict().items()}
    seen = set()
    for value, gradients, divided, said, after, again in four[kind]:
        assert value == pytest.approx(losses[0], rel=1e-5) and divided > 5
        assert "2 tensor-parallel ranks" in said
        assert [value, *after] == pytest.approx(losses, rel=1e-4) and after == again
        for parameter, gradient in gradients.items():
            seen.add(parameter)
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-4, atol=1e-6)
    assert seen == set(wanted)
    saved = pipeline.weights(folder / kind)
    for parameter in wanted:
        torch.testing.assert_close(saved[parameter], state[parameter], rtol=1e-4, atol=1e-6)


def test_the_plan_says_how_a_parameter_is_divided() -> None:
    two: Any = SimpleNamespace(size=lambda: 2)
    sharding = Sharding(two, plan_of(models.GPT(), WAYS))
    places = {n: str(sharding.placement(n, p)) for n, p in models.GPT().named_parameters()}
    assert places["layers.1.up.weight"] == places["layers.1.up.bias"] == "S(0)"
    assert places["layers.1.down.weight"] == "S(1)" and places["layers.1.down.bias"] == "R"
    assert places["embed.weight"] == places["norm.weight"] == "R"
    three: Any = SimpleNamespace(size=lambda: 3)
    odd = Sharding(three, plan_of(models.GPT(), WAYS))
    assert str(odd.placement("layers.0.up.weight", torch.empty(64, 16))) == "R"
