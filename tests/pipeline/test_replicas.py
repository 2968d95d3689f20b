"""Two replicas of a pipeline of two stages: four processes, and the gradients of both batches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from evener import pipeline
from evener.errors import UsageError
from tests import worlds
from tests.pipeline import models

RATES = pipeline.Rates(1e11, 1e10, 1e-6)


def model() -> models.GPT:
    torch.manual_seed(3)
    return models.GPT(2)


traced_model = functools.cache(model)


def batch(replica: int) -> dict[str, torch.Tensor]:
    return {"tokens": models.tokens(8, replica), "labels": models.tokens(8, replica + 5)}


def trained(rank: int, size: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica = mesh.get_local_rank("data")
    with models.trace_once:
        pipe = pipeline.auto(traced_model(), batch(0), mesh=mesh, rates=RATES, timeout=30,
                             microbatches=4)  # fmt: skip
    # In two steps, as gradients are accumulated.
    values = [float(pipe.step(**batch(replica + 2 * at))) for at in range(2)]
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    pipe.save(folder)
    pipe.load(folder)
    said = pipe.replicas.said(pipe.plan)
    # What is not finite in one replica is named in both.
    if replica == 1 and mesh.get_local_rank("pipeline") == 0:
        with torch.no_grad():
            next(pipe.parameters()).fill_(torch.nan)
    with pytest.raises(pipeline.PipelineError) as failed:
        pipe.step(**batch(replica))
    pipe.close()
    return values, gradients, said, str(failed.value), failed.value.rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas") / "run"


@pytest.fixture(scope="module")
def four(folder: Path) -> worlds.Several:
    cases: dict[str, Any] = {"trained": (trained, str(folder)), "forms": (in_a_form,)}
    return worlds.several([2, 2], cases)


def test_gradients_are_those_of_all_replicas(four: worlds.Several, folder: Path) -> None:
    whole = model()
    losses = []
    for at in range(2):
        total = 0.0
        for replica in (0, 1):
            for m in range(4):
                parts = {k: v.chunk(4)[m] for k, v in batch(replica + 2 * at).items()}
                loss = whole(**parts)["loss"] / 8
                loss.backward()
                total += loss.item()
        losses.append(total)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    seen = set()
    for values, gradients, said, error, rank in four["trained"]:
        assert values == pytest.approx(losses, rel=1e-5)
        assert "2 replicas of 2 stages, 1F1B, 4 microbatches of 2 rows" in said
        assert "of replica 1 on rank" in error and "not finite" in error and rank in (2, 3)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], msg=name)
            seen.add(name)
    assert seen == set(wanted)
    saved = pipeline.weights(folder)
    for name, parameter in whole.named_parameters():
        assert torch.equal(saved[name], parameter), name


def in_a_form(rank: int, size: int) -> Any:
    with models.trace_once:
        return forms()


def forms() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica, found = mesh.get_local_rank("data"), {}
    for form in ("exact", "int8"):
        pipe = pipeline.auto(traced_model(), batch(0), mesh=mesh, rates=RATES, timeout=30,
                             microbatches=4, gradients=form)  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for at in range(8):
            losses.append(float(pipe.step(**batch(replica + 2 * (at % 2)))))
            optimizer.step()
            optimizer.zero_grad()
        found[form] = losses, {name: p.detach().clone() for name, p in pipe.named_parameters()}
        pipe.close()
    # What a step adds to gradients that are there already is what it gives where there are none.
    sums = []
    for zero in (False, True):
        pipe = pipeline.auto(traced_model(), batch(0), mesh=mesh, rates=RATES, timeout=30,
                             microbatches=4, gradients="int8")  # fmt: skip
        pipe.step(**batch(replica))
        first = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        if zero:
            for parameter in pipe.parameters():
                parameter.grad = None
        pipe.step(**batch(replica + 2))
        sums.append({
            name: p.grad + first[name] if zero else p.grad for name, p in pipe.named_parameters()
        })  # fmt: skip
        pipe.close()
    apart = [name for name in sums[0] if not torch.equal(sums[0][name], sums[1][name])]
    return found, apart, mesh.get_local_rank("pipeline")


def test_gradients_cross_in_a_form(four: worlds.Several) -> None:
    weights: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for results, apart, stage in four["forms"]:
        assert apart == []
        exact, coded = (results[form][0] for form in ("exact", "int8"))
        assert coded != exact and coded == pytest.approx(exact, rel=0.01)
        for form, (_, own) in results.items():
            other = weights.setdefault((stage, form), own)
            assert all(torch.equal(own[name], other[name]) for name in own), (stage, form)


def refused(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match="gradients='int7'"):
        pipeline.auto(model(), batch(0), rates=RATES, gradients="int7")
    for shape, names, said in (
        ((2,), ("data",), "a mesh with the dimensions ['data']"),
        ((1, 2), ("data", "stage"), "a mesh with the dimensions"),
        ((1, 1, 2), ("data", "pipeline", "tensor"), "how GPT is divided"),
    ):
        with pytest.raises(UsageError) as caught:
            pipeline.auto(model(), batch(0), rates=RATES,
                          mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))  # fmt: skip
        assert said in caught.value.problem


def test_other_meshes_are_refused_by_name() -> None:
    worlds.run([2], refused)
