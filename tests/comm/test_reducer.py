"""Gradients in, averages out, in every mode, dtype and shape of world, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.reducer import Reducer
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models

SHAPES = {
    "1x1": [1],
    "1x2": [2],
    "2x1": [1, 1],
    "2x2": [2, 2],
    "3x1": [1, 1, 1],
    "2+1": [2, 1],
    "1+3": [1, 3],
    "3+2": [3, 2],
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of the largest entry: a sum of a few numbers, each rounded once to the narrowest form on its way.
TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1.6e-2}


def close(have: torch.Tensor, want: torch.Tensor, precision: str) -> None:
    scale = want.abs().max().item()
    worst = (have.cpu().double() - want).abs().max().item()
    assert worst <= TOLERANCE[precision] * max(scale, 1e-3), (worst, scale)


def train_against_the_reference(
    rank: int, size: int, dtype: str, wire: str, algorithm: str, bucket_bytes: int, to_none: bool
) -> str:
    """Three steps; after each, `p.grad` is the mean of what the ranks computed on their own."""
    device = models.device()
    own = models.seeded(DTYPES[dtype])
    model = accelerate(
        DistributedDataParallel(models.seeded(DTYPES[dtype]), find_unused_parameters=True),
        algorithm=algorithm,  # type: ignore[arg-type]
        wire=wire,
        bucket_bytes=bucket_bytes,
    )
    narrowest = max((dtype, wire if wire in TOLERANCE else dtype), key=TOLERANCE.__getitem__)
    for step in range(3):
        # In one step a layer is used by some ranks only, in one by none.
        use_all = step == 0 or (step == 1 and rank == 0)
        x = models.batch(rank, step, DTYPES[dtype]).to(device)
        own.zero_grad(set_to_none=to_none)
        model.zero_grad(set_to_none=to_none)
        models.backward(own, x, use_all)
        models.backward(model, x, use_all)
        want = models.mean_over_ranks(models.gradients(own))
        for name, parameter in model.module.named_parameters():
            if name not in want:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            close(parameter.grad, want[name], narrowest)
            assert parameter.grad.stride() == parameter.stride(), name
        assert models.same_on_all_ranks(model)
    return model.evener.describe()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", ["exact", "fp16", "bf16"])
def test_every_mode_dtype_and_world(shape: str, wire: str) -> None:
    def cases() -> list[tuple[Any, ...]]:
        sizes = (0, 4096, 1 << 20)
        grid = itertools.product(DTYPES, ("auto", "flat"), sizes, (True, False))
        # All would be 36 trainings a world. 7 shares no factor with the grid, so over the worlds
        # every combination comes up, and in each world every dtype.
        return [case for i, case in enumerate(grid) if i % 7 == hash_free(shape, wire) % 7]

    described = worlds.run(SHAPES[shape], _train_all, wire, cases())
    two_level = [text for text in described[0] if "2-D" in text]
    assert bool(two_level) == (shape == "2x2" or "+" in shape)
    if "+" in shape:
        assert all("of each in the exchange" in text for text in two_level)


def hash_free(*words: str) -> int:
    """A small number that depends on the words and, unlike hash(), on nothing else."""
    return sum(map(ord, "".join(words)))


def _train_all(rank: int, size: int, wire: str, cases: list[tuple[Any, ...]]) -> list[str]:
    described = []
    for dtype, algorithm, bucket_bytes, to_none in cases:
        described.append(
            train_against_the_reference(rank, size, dtype, wire, algorithm, bucket_bytes, to_none)
        )
    return described


def accumulate(rank: int, size: int) -> None:
    """Under no_sync gradients stay local; the next backward reduces their sum."""
    for to_none in (True, False):
        own = models.seeded()
        model = accelerate(DistributedDataParallel(models.seeded(), find_unused_parameters=True))
        for step in range(2):
            own.zero_grad(set_to_none=to_none)
            model.zero_grad(set_to_none=to_none)
            xs = [models.batch(rank, 10 * step + i, torch.float32) for i in range(3)]
            with model.no_sync():
                for x in xs[:2]:
                    models.backward(model, x)
            models.backward(model, xs[2])
            for x in xs:
                models.backward(own, x)
            for name, want in models.mean_over_ranks(models.gradients(own)).items():
                close(dict(model.module.named_parameters())[name].grad, want, "fp32")


def test_gradient_accumulation() -> None:
    worlds.run([2, 2], accumulate)


def passes(rank: int, size: int) -> None:
    """Horovod's way: the reducer counts the backward passes itself, and steps flush."""
    model, own = models.seeded(), models.seeded()
    reducer = Reducer(model.named_parameters(), Options())
    reducer.set_passes(2)
    for step in range(2):
        model.zero_grad()
        own.zero_grad()
        for i in range(2):
            x = models.batch(rank, 10 * step + i, torch.float32)
            models.backward(model, x)
            models.backward(own, x)
        reducer.flush()
        reducer.apply()
        assert model.unused.grad is not None  # zeros, as Horovod does
        for name, want in models.mean_over_ranks(models.gradients(own)).items():
            close(dict(model.named_parameters())[name].grad, want, "fp32")


def test_several_passes_a_flush() -> None:
    worlds.run([1, 1], passes)


def sums(rank: int, size: int, predivide: float, average: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    reducer = Reducer([("p", parameter)], Options(average=average, predivide=predivide))
    (parameter.sum() * (rank + 1)).backward()
    reducer.flush()
    reducer.apply()
    want = sum(range(1, size + 1)) / (size if average else 1)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.full((100,), float(want)))


@pytest.mark.parametrize(("predivide", "average"), [(1.0, True), (1.0, False), (4.0, True)])
def test_average_sum_and_predivide(predivide: float, average: bool) -> None:
    worlds.run([2, 2], sums, predivide, average)


def large_half(rank: int, size: int) -> float:
    parameter = torch.nn.Parameter(torch.zeros(64))
    reducer = Reducer([("p", parameter)], Options(wire="fp16"))
    (parameter.sum() * 40000.0).backward()
    reducer.flush()
    reducer.apply()
    assert parameter.grad is not None
    return float(parameter.grad.max())


def test_division_comes_before_the_cast_to_fp16() -> None:
    """Two gradients of 40,000 add up past the largest FP16, 65,504; their mean does not."""
    assert worlds.run([1, 1], large_half) == [40000.0, 40000.0]


def other_order(rank: int, size: int) -> list[int]:
    """Ranks whose backward produces gradients in different orders still meet in the same one."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))
    torch.manual_seed(0)
    reducer = Reducer(layers.named_parameters(), Options(bucket_bytes=0))
    for step in range(3):
        layers.zero_grad()
        order = range(4) if rank else reversed(range(4))
        for i in order:
            (layers[i].weight.sum() * (i + 1) * (rank + 1) * (step + 1)).backward()
        reducer.flush()
        reducer.apply()
        for i in range(4):
            want = torch.full((8, 8), (i + 1) * (size + 1) / 2 * (step + 1))
            torch.testing.assert_close(layers[i].weight.grad, want)
    return list(reducer.buckets.order)


def test_the_order_of_issue_does_not_depend_on_the_rank() -> None:
    # Rank 0 produced the gradient of layer 3 first, so that is everybody's order.
    assert worlds.run([1, 1], other_order) == [[3, 2, 1, 0]] * 2
    assert worlds.run([2, 2], other_order) == [[3, 2, 1, 0]] * 4


def thresholds(rank: int, size: int) -> tuple[list[str], list[int]]:
    model = torch.nn.ModuleList(
        torch.nn.Linear(n, 64, bias=False)
        for n in (512, 64, 1)  # 131072, 16384, 256 bytes
    )
    options = Options(
        algorithm="2d", wire="topk", bucket_bytes=0, topk_min_bytes=8192, two_level_max_bytes=20000
    )
    reducer = Reducer(model.named_parameters(), options)
    sum(layer.weight.sum() for layer in model).backward()  # type: ignore[union-attr]
    reducer.flush()
    reducer.apply()
    order = reducer.buckets.order
    by_layer = sorted(zip(order, reducer.exchanges, strict=True), key=lambda t: t[0])
    return [e.wire.name for _, e in by_layer], [e.route.shards for _, e in by_layer]


def test_thresholds_compare_the_buffer_that_is_sent() -> None:
    """128 KiB, over the two-level limit, go flat; 16 KiB in two shards of 8 KiB go as top-k."""
    forms, shards = worlds.run([2, 2], thresholds)[0]
    assert shards == [1, 2, 2]
    assert forms == ["topk", "topk", "exact"]


def memory_traffic(rank: int, size: int) -> dict[str, int]:
    """Bytes moved to bring gradients in, counted by wrapping the two operations that move them."""
    moved = {"copied": 0}
    real = torch._foreach_copy_

    def counting(into: Any, source: Any) -> Any:
        moved["copied"] += 2 * sum(t.numel() * t.element_size() for t in into)
        return real(into, source)

    model = models.seeded()
    reducer = Reducer(model.named_parameters(), Options(average=False))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    for step in range(3):
        model.zero_grad(set_to_none=step < 2)
        torch._foreach_copy_ = counting
        models.backward(model, models.batch(rank, step, torch.float32))
        reducer.flush()
        torch._foreach_copy_ = real
        reducer.apply()
        moved[f"step {step}"], moved["copied"] = moved["copied"], 0
    return {**moved, "total": total}


def test_at_most_two_bytes_of_traffic_a_byte_of_gradient() -> None:
    moved = worlds.run([1, 1], memory_traffic)[0]
    assert 0 < moved["step 1"] <= 2 * moved["total"]  # zero_grad set None: one copy
    assert moved["step 2"] == 0  # gradients already live in the bucket


def one_after_another(rank: int, size: int) -> None:
    """A script that trains several models in one process."""
    for wire in ("exact", "topk", "exact"):
        reducer = Reducer(torch.nn.Linear(40, 30).named_parameters(), Options(wire=wire))  # type: ignore[arg-type]
        weight = reducer.parameters[0]
        for _ in range(2):
            weight.grad = None
            (weight.sum() * (rank + 1)).backward()
            reducer.flush()
            reducer.apply()
            assert weight.grad is not None
        reducer.close()
        reducer.close()


def test_reducers_one_after_another_in_one_process() -> None:
    worlds.run([2, 2], one_after_another)


# --- what must be refused ---


def unequal(rank: int, size: int) -> None:
    model = torch.nn.Linear(4, 5 + (rank == size - 1))
    Reducer(model.named_parameters(), Options(timeout=20))


def test_unequal_models_are_named_on_every_rank() -> None:
    for outcome in worlds.outcomes([2, 1], unequal):
        assert isinstance(outcome.exception, CommError), outcome.error
        assert "parameter weight" in str(outcome.exception)
        assert "5x4" in str(outcome.exception) and "6x4" in str(outcome.exception)


def unequal_settings(rank: int, size: int) -> None:
    model = torch.nn.Linear(4, 5)
    Reducer(model.named_parameters(), Options(wire="fp16" if rank else "exact", timeout=20))


def test_unequal_settings_are_named_on_every_rank() -> None:
    for outcome in worlds.outcomes([1, 1], unequal_settings):
        assert "option wire" in str(outcome.exception)


def absent(rank: int, size: int) -> None:
    if rank == 1:
        return
    Reducer(torch.nn.Linear(4, 5).named_parameters(), Options(timeout=3))


def test_a_rank_that_never_comes_is_an_error_within_the_timeout() -> None:
    found = worlds.outcomes([1, 1, 1], absent, timeout=60)
    for rank in (0, 2):
        assert isinstance(found[rank].exception, CommError), found[rank].error
        assert "EVENER_TIMEOUT" in str(found[rank].exception)


def dies(rank: int, size: int) -> None:
    import os

    model = models.seeded()
    model = accelerate(DistributedDataParallel(model, find_unused_parameters=True))
    for step in range(4):
        if rank == size - 1 and step == 2:
            os._exit(9)
        models.backward(model, models.batch(rank, step, torch.float32))


@pytest.mark.parametrize("shape", ["1x2", "2x2", "3x1"])
def test_a_peer_that_dies_is_an_error_on_every_rank(shape: str) -> None:
    found = worlds.outcomes(SHAPES[shape], dies, env={"EVENER_TIMEOUT": "8"}, timeout=60)
    assert found[-1].error == "the process died"
    for outcome in found[:-1]:
        assert outcome.error and "not finished" not in outcome.error, outcome.error


def sparse(rank: int, size: int) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    Reducer(model.named_parameters(), Options())
    model(torch.tensor([1])).sum().backward()


def twice(rank: int, size: int) -> None:
    model = torch.nn.Linear(2, 2)
    Reducer(model.named_parameters(), Options())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def complex_parameter(rank: int, size: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    Reducer([("z", parameter)], Options())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sparse, "gradient of weight is sparse"),
        (twice, "came again before it was applied"),
        (complex_parameter, "z is torch.complex64"),
    ],
)
def test_what_cannot_be_reduced_is_refused(function: Any, message: str) -> None:
    assert message in worlds.outcomes([1], function)[0].error
