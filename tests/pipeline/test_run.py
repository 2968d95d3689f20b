"""Pipelines of real processes on Gloo: gradients, tied weights, dropout, checkpoints.

The cases of two processes share one world, and trace a model once.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import pipeline
from evener.errors import UsageError
from evener.pipeline import schedules, torch_names
from tests import worlds
from tests.pipeline import models

RATES = pipeline.Rates(1e11, 1e10, 1e-6)


def case(name: str) -> tuple[nn.Module, dict[str, Any], Any, Any]:
    """(model, inputs, target, loss) with the same values on every rank."""
    torch.manual_seed(3)
    given = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    if name == "tied":
        return models.GPT(2), given, None, None
    if name == "untied":
        return models.GPT(2, tied=False), given, None, None
    if name == "encoder-decoder":
        two = {"source": models.tokens(8), "answer": models.tokens(8, 1)}
        return models.EncoderDecoder(2), two, models.tokens(8, 2), models.cross_entropy
    if name == "experts":
        one = {"tokens": models.tokens(8)}
        return models.Experts(), one, models.tokens(8, 2), models.cross_entropy
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    wanted = torch.arange(8) % 10
    return models.ResNet(2), {"images": images}, wanted, models.cross_entropy


traced_case = functools.cache(case)


def unsplit(name: str, microbatches: int) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """The same step of the whole model: the loss, gradients, and its state after."""
    model, inputs, target, loss = case(name)
    total = 0.0
    parts = {k: v.chunk(microbatches) for k, v in inputs.items()}
    wanted = target.chunk(microbatches) if target is not None else [None] * microbatches
    for m in range(microbatches):
        out = model(**{k: v[m] for k, v in parts.items()})
        one = (out["loss"] if loss is None else loss(out, wanted[m])) / microbatches
        one.backward()
        total += one.item()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total, gradients, model.state_dict()


def step(rank: int, size: int, name: str, options: dict[str, Any]) -> Any:
    model, inputs, target, loss = traced_case(name)
    with models.trace_once:
        pipe = pipeline.auto(
            model, inputs, target=target, loss=loss, rates=RATES, timeout=30, **options
        )
    value = pipe.step(**inputs, target=target)
    gradients = {n: p.grad for n, p in pipe.named_parameters()}
    state = {n: t.clone() for n, t in pipe.state_dict().items()}
    pipe.close()
    return value.item(), gradients, state, pipe.plan.to_dict()


def compare(name: str, found: list[Any], exact: bool, microbatches: int) -> None:
    loss, gradients, state = unsplit(name, microbatches)
    tied = {"embed.weight"} if name in ("tied", "encoder-decoder") else set()
    seen: set[str] = set()
    for value, own, after, _ in found:
        assert value == pytest.approx(loss, rel=1e-6)
        for parameter, gradient in own.items():
            seen.add(parameter)
            if exact and parameter not in tied:
                assert torch.equal(gradient, gradients[parameter]), parameter
            else:
                torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-4, atol=1e-6)
        for tensor, held in after.items():
            assert torch.equal(held, state[tensor]), tensor
    assert seen == set(gradients)
    # One checkpoint of all ranks has the names that the model's own has.
    assert set().union(*(after for _, _, after, _ in found)) == set(state)


NAMES = ("tied", "untied", "encoder-decoder", "experts", "images")


def of_schedule(schedule: str) -> str:
    """The model that a schedule is tried with."""
    # Split backward computes gradients of parameters from other sums.
    return "tied" if schedules.kind_of(schedule).split else "encoder-decoder"


SCHEDULES = [k for k, kind in schedules.KINDS.items() if not kind.split or torch_names.splits()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> worlds.Several:
    cases: dict[str, Any] = {name: (step, name, {"microbatches": 4}) for name in NAMES}
    for schedule in SCHEDULES:
        options = {"schedule": schedule, "microbatches": 4}
        cases[schedule] = step, of_schedule(schedule), options
    cases["recompute"] = step, "tied", {"microbatches": 4, "recompute": True}
    cases["dropout"] = (dropped,)
    cases["train"] = train, f"{folder}/here", 4, False, {}
    cases["resume"] = train, f"{folder}/here", 2, True, {}
    cases["meta"] = (on_meta,)
    cases["record"] = record, f"{folder}/deep/step.json"
    return worlds.several([2], cases, timeout=300)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model(name: str, two: worlds.Several) -> None:
    """Bit for bit, but for parameters of several stages: their sums have another order."""
    found = two[name]
    compare(name, found, exact=True, microbatches=4)
    if name == "tied":
        for (_, a, _, _), (_, b, _, _) in [found]:
            assert torch.equal(a["embed.weight"], b["embed.weight"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_gradients(schedule: str, two: worlds.Several) -> None:
    compare(
        of_schedule(schedule), two[schedule], exact=schedule in ("GPipe", "1F1B"), microbatches=4
    )


def test_split_backward_is_refused_where_it_loses_gradients() -> None:
    model, inputs, target, loss = case("encoder-decoder")
    with pytest.raises(UsageError, match=r"lose the gradient of embed.weight"):
        pipeline.plan(model, inputs, target=target, loss=loss, rates=RATES, stages=2,
                      schedule="InterleavedZeroBubble")  # fmt: skip


def test_four_stages_and_an_encoders_output_through_all_of_them() -> None:
    found = worlds.run([4], step, "encoder-decoder", {"microbatches": 4})
    compare("encoder-decoder", found, exact=True, microbatches=4)


def test_recomputed_forward(two: worlds.Several) -> None:
    compare("tied", two["recompute"], exact=True, microbatches=4)


def dropped(rank: int, size: int) -> Any:
    torch.manual_seed(rank)  # chance of the ranks' own generators must not matter
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    found = []
    torch.manual_seed(3)
    model = models.GPT(2, dropout=0.3)
    for options in ({}, {"recompute": True}):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        with models.trace_once:
            pipe = pipeline.auto(model, inputs, rates=RATES, microbatches=4, seed=7, **options)
        first = pipe.step(**inputs).item()
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters()}
        second = pipe.step(**inputs).item()
        quiet = [pipe.evaluate(**inputs).item() for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        pipe.close()
        found.append((first, second, quiet, gradients))
    return found


def test_dropout_does_not_depend_on_the_cuts(two: worlds.Several) -> None:
    (plain, again), *_ = worlds.run([1], dropped)
    assert plain[0] != plain[1], "two steps drew the same"
    assert plain[2][0] == plain[2][1] not in (plain[0], plain[1])
    assert plain[:3] == again[:3]
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    torch.manual_seed(3)
    model = models.GPT(2, dropout=0.3).eval()
    assert plain[2][0] == pytest.approx(model(**inputs)["loss"].item(), rel=1e-6)
    for rank in two["dropout"]:
        for kind in (0, 1):
            assert rank[kind][:2] == pytest.approx(plain[:2], rel=1e-7)
            for name, gradient in rank[kind][3].items():
                if name != "embed.weight":
                    assert torch.equal(gradient, plain[3][name]), name


def train(rank: int, size: int, folder: str, steps: int, resume: bool, options: Any) -> Any:
    torch.manual_seed(5 if resume else 3)  # a resumed run's own values must not matter
    model = models.GPT(2, dropout=0.1)
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    pipe = pipeline.auto(model, inputs, rates=RATES, microbatches=4, seed=7, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    if resume:
        assert pipe.load(folder, optimizer)["note"] == "here"
    losses = []
    for at in range(steps):
        losses.append(pipe.step(**inputs).item())
        optimizer.step()
        optimizer.zero_grad()
        if at == 1 and not resume:
            pipe.save(folder, optimizer, {"note": "here"})
    # Another number of rows, where torch.export left it open: uneven microbatches too.
    more = {"tokens": models.tokens(10, 4), "labels": models.tokens(10, 5)}
    losses.append(pipe.step(**more).item())
    with pytest.raises(UsageError, match="captured with"):
        pipe.step(more["tokens"])
    pipe.close()
    return losses


def test_a_checkpoint_goes_on_with_other_stages_and_without(
    two: worlds.Several, folder: Path, tmp_path: Path
) -> None:
    through, same = two["train"], two["resume"]
    assert through[0] == through[1] and same[0] == through[0][2:]
    folder = folder / "here"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    model = models.GPT(2)
    assert set(index["weight_map"]) == set(model.state_dict())
    model.load_state_dict(pipeline.weights(folder))
    assert model.head.weight is model.embed.weight
    one = worlds.run([1], train, str(folder), 2, True, {"schedule": "GPipe"})
    assert one[0] == pytest.approx(through[0][2:], rel=1e-5)
    with pytest.raises(UsageError, match="no checkpoint"):
        pipeline.weights(tmp_path)


def on_meta(rank: int, size: int) -> Any:
    with torch.device("meta"):
        model = models.GPT(2)
        given = {"tokens": torch.zeros(8, 8, dtype=torch.long),
                 "labels": torch.zeros(8, 8, dtype=torch.long)}  # fmt: skip

    def weights(name: str, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(tensor.shape, generator=generator) * 0.05

    with models.trace_once:
        with pytest.raises(UsageError, match="has no values"):
            pipeline.auto(model, given, rates=RATES, microbatches=4)
        pipe = pipeline.auto(model, given, rates=RATES, microbatches=4, weights=weights)
    losses = [pipe.step(tokens=models.tokens(8), labels=models.tokens(8)).item()]
    held = sum(p.numel() for p in pipe.parameters())
    pipe.close()
    return losses, held, sum(p.numel() for p in model.parameters())


def test_a_model_without_memory(two: worlds.Several) -> None:
    found = two["meta"]
    assert found[0][0] == found[1][0] and found[0][0][0] < 10
    assert all(held < whole for _, held, whole in found)


def record(rank: int, size: int, path: str) -> Any:
    model, inputs, *_ = traced_case("tied")
    with models.trace_once:
        pipe = pipeline.auto(model, inputs, rates=RATES, microbatches=4)
    pipe.step(**inputs)
    pipe.record(path)
    pipe.step(**inputs)
    pipe.close()


def test_a_step_is_recorded(two: worlds.Several, folder: Path) -> None:
    assert two["record"] == [None, None]
    found = pipeline.report.read(folder / "deep" / "step.json")
    assert len(found["measured"]["marks"]) == 2 * 2 * 4
    assert "ms were predicted" in pipeline.report.headline(found)
    assert "rank 1, measured" in pipeline.report.page(found)
