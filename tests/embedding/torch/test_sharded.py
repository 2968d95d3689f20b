"""A table over ranks: as one table, each key crossing between hosts once."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener.embedding import Adagrad, Options, forget
from evener.embedding.parts import hashes
from evener.embedding.torch import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicOptimizer,
    clip_grad_norm_,
    no_sync,
)
from evener.embedding.torch.forms import decode, encode, width
from tests import worlds

DIM, STEPS, BATCH = 8, 6, 12


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.rand(BATCH, 4, generator=generator).pow(2) * 300).long() - 100


class Click(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = Options(DIM, optimizer=Adagrad(lr=0.1))
        self.bag = DynamicEmbeddingBag(options, "sharded", mode="sum", **how)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(ids)).square().mean()


def train(rank: int, size: int, how: dict[str, Any], mode: str = "") -> dict[str, Any]:
    """What this rank has after some steps: its rows, the dense weights, its traffic."""
    model = Click(**how)
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = DynamicOptimizer(model, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    asked, norms = [], []
    for step in range(STEPS):
        ids = batch(step, rank)
        if mode == "accumulate":
            first, second = ids.chunk(2)
            with no_sync(model), net.no_sync():
                (net(first) / 2).backward()
            (net(second) / 2).backward()
        elif mode == "overflow":
            # Of one rank's rows only: the dense gradients are those of all ranks anyway.
            loss = net(ids)
            if step == 2 and rank == 1:
                loss = loss + model.bag(ids).sum() * float("inf")
            elif step == 2:
                loss = loss + model.bag(ids).sum()
            scaler.scale(loss).backward()
        else:
            if mode == "prefetch":
                model.bag.prefetch(ids)
            net(ids).backward()
        asked.append(torch.unique(ids))
        if mode == "overflow":
            scaler.step(optimizer)
            scaler.update()
        else:
            if mode == "clip":
                norms.append(float(clip_grad_norm_(model, 0.05)))
            optimizer.step()
        optimizer.zero_grad()
    rows = {}
    for chunk in model.bag.store.export():
        for key, values in zip(chunk.keys, chunk.values, strict=True):
            rows[int(key)] = torch.tensor(values)
    return {
        "rows": rows,
        "top": model.top.weight.detach().clone(),
        "traffic": model.bag.traffic.to_json(),
        "asked": asked,
        "scale": scaler.get_scale(),
        "norms": norms,
        "step": model.bag.table.step,
    }


def alone(size: int, skip: int = -1, clip: bool = False) -> tuple[dict[int, torch.Tensor], Any]:
    """The same steps in one process."""
    forget("sharded")
    model = Click(shard=False)
    optimizer = DynamicOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for step in range(STEPS):
        if step != skip:
            torch.stack([model(batch(step, rank)) for rank in range(size)]).mean().backward()
            if clip:
                norms.append(float(clip_grad_norm_(model, 0.05)))
            optimizer.step()
        optimizer.zero_grad()
    rows = {}
    for chunk in model.bag.store.export():
        for key, values in zip(chunk.keys, chunk.values, strict=True):
            rows[int(key)] = torch.tensor(values)
    return rows, norms


def check(found: list[dict[str, Any]], wanted: dict[int, torch.Tensor], tolerance: float) -> None:
    keys = [key for each in found for key in each["rows"]]
    assert len(keys) == len(set(keys)), "a key has two owners"
    assert set(keys) == set(wanted)
    for each in found:
        for key, values in each["rows"].items():
            torch.testing.assert_close(values, wanted[key], atol=tolerance, rtol=0)
        assert torch.equal(each["top"], found[0]["top"])


@pytest.mark.parametrize("shape", [(2, 2), (3,), (2, 1)])
def test_as_one_table(shape: tuple[int, ...]) -> None:
    found = worlds.run(shape, train, {})
    check(found, alone(sum(shape))[0], 2e-6)


@pytest.mark.parametrize("mode", ["accumulate", "prefetch", "cache"])
def test_as_one_table_with(mode: str) -> None:
    how = {"cache_rows": 400} if mode in ("cache", "prefetch") else {}
    check(worlds.run((2, 2), train, how, mode), alone(4)[0], 2e-6)


def test_clipping_is_over_the_rows_of_all_ranks() -> None:
    found = worlds.run((2, 1), train, {}, "clip")
    rows, norms = alone(3, clip=True)
    check(found, rows, 2e-6)
    for each in found:
        assert each["norms"] == pytest.approx(norms, rel=1e-4)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    found = worlds.run((2, 1), train, {}, "overflow")
    assert [each["scale"] for each in found] == [2.0] * 3
    assert [each["step"] for each in found] == [STEPS - 1] * 3
    # The rows of the skipped step were made, and nothing trained them.
    rows = alone(3, skip=2)[0]
    for each in found:
        for key, values in each["rows"].items():
            if key in rows:
                torch.testing.assert_close(values, rows[key], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("wire", "gradient_wire", "tolerance"),
    [("fp16", "exact", 2e-3), ("int8", "fp16", 2e-2), ("bf16", "bf16", 2e-2)],
)
def test_forms_are_near_and_all_ranks_agree(
    wire: Any, gradient_wire: Any, tolerance: float
) -> None:
    how = {"wire": wire, "gradient_wire": gradient_wire}
    found = worlds.run((2, 2), train, how)
    check(found, alone(4)[0], tolerance)
    bound = least(found, [0, 0, 1, 1], width(wire, DIM), width(gradient_wire, DIM))
    assert bound < total(found) <= 1.05 * bound + counts(found)


def least(found: list[dict[str, Any]], hosts: list[int], values: int, gradients: int) -> int:
    """Bytes that must cross: each key that a host asks of another, once per step."""
    size, bound = len(found), 0
    for step in range(STEPS):
        for host in set(hosts):
            union = torch.unique(
                torch.cat([found[r]["asked"][step] for r in range(size) if hosts[r] == host])
            )
            # As many owners on every host.
            owner = hashes(union) % size // (size // len(set(hosts)))
            bound += int((owner != host).sum()) * (8 + values + gradients)
    return bound


def total(found: list[dict[str, Any]]) -> int:
    return sum(each["traffic"]["total"] for each in found)


def counts(found: list[dict[str, Any]]) -> int:
    return sum(each["traffic"]["counts"] for each in found)


@pytest.mark.parametrize("shape", [(2, 2), (1, 1)])
def test_what_crosses_is_the_deduplicated_bound(shape: tuple[int, ...]) -> None:
    found = worlds.run(shape, train, {})
    hosts = [host for host, n in enumerate(shape) for _ in range(n)]
    bound = least(found, hosts, 4 * DIM, 4 * DIM)
    assert total(found) - counts(found) == bound
    # A count of keys and the largest gradient, per peer and step.
    assert counts(found) == STEPS * 16 * sum(len(shape) - 1 for _ in hosts)
    if shape == (2, 2):
        assert all(each["traffic"]["inside"] > 0 for each in found)


def empty_on_one_rank(rank: int, size: int) -> int:
    module = DynamicEmbedding(Options(4), "empty")
    optimizer = DynamicOptimizer(module)
    ids = torch.arange(10 if rank else 0)
    module(ids).sum().backward()
    optimizer.step()
    module.eval()
    module(torch.arange(50))  # never inserts, on no rank
    whole = torch.tensor([len(module.store)])
    dist.all_reduce(whole)
    return int(whole)


def test_a_rank_without_ids() -> None:
    assert worlds.run((1, 1), empty_on_one_rank) == [10, 10]


@pytest.mark.parametrize("form", ["exact", "fp16", "bf16", "int8"])
def test_forms_keep_what_they_promise(form: Any) -> None:
    rows = torch.randn(50, DIM, generator=torch.Generator().manual_seed(4))
    rows[0] = 0
    rows[1] *= 1e-6
    codes = encode(rows, form)
    assert codes.shape == (50, width(form, DIM))
    back = decode(codes, form, DIM)
    error = {"exact": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.5 / 127 * 1.01}[form]
    largest = rows.abs().amax(1, keepdim=True)
    assert ((back - rows).abs() <= largest * error + 6e-8 * (form == "fp16")).all()
    assert encode(rows[:0], form).shape == (0, width(form, DIM))
    odd = rows[2:3, :5]  # a scale that no float lies on
    assert decode(encode(odd, form), form, 5).isclose(odd, rtol=0.02, atol=0.02).all()
    rows[2, 3], rows[3, 4], rows[4, 5] = math.inf, math.nan, 1e6
    back = decode(encode(rows, form), form, DIM)
    assert not back[2].isfinite().all() and not back[3].isfinite().all()
    assert back[4].isfinite().all()


def test_hashes_spread_and_are_the_same_everywhere() -> None:
    keys = torch.arange(-50_000, 50_000)
    found = hashes(keys)
    assert (found >= 0).all()
    assert found[50_000:50_003].tolist() == hashes(torch.tensor([0, 1, 2])).tolist()
    for size in (2, 3, 4, 7):
        share = torch.bincount(found % size) / len(keys) * size
        assert ((share - 1).abs() < 0.02).all()
