"""Low rank: where matrices lie, what arrives of them, and what stays, against plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.comm import wires
from evener.comm.buckets import Buckets, row_width
from evener.comm.codecs import lowrank
from evener.comm.codecs.lowrank import Layout, Memory
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.reducer import Reducer
from evener.comm.state import Matrix, ShardState
from tests import worlds
from tests.comm import models

SHAPES = st.sampled_from([(7, 5), (64, 33), (40,), (), (8, 3, 3, 3), (1, 9), (33, 1), (300, 20)])


@settings(max_examples=60)
@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(1, 3), st.booleans(), st.booleans())
def test_matrices_are_whole_rows_in_memory(
    shapes: list[tuple[int, ...]], shards: int, parts: bool, last: bool
) -> None:
    """Every view of a stack has rows of one parameter, in order; the rest is the rest."""
    parameters = [torch.empty(shape) for shape in shapes]
    if last:
        parameters = [
            p.to(memory_format=torch.channels_last) if p.dim() == 4 else p.T if p.dim() == 2 else p
            for p in parameters
        ]
    buckets = Buckets(
        parameters, range(len(parameters)), 9000, shards, partition_bytes=3000 if parts else 0
    )
    for index, view in enumerate(buckets.views):
        # The number of the parameter and the row, counted where the row begins in memory.
        flat = torch.arange(view.numel(), dtype=torch.float32)
        width = row_width(view) or 1
        view.copy_(torch.as_strided(flat // width + 1000 * (index + 1), view.size(), view.stride()))
    covered = 0
    for bucket in buckets:
        length = bucket.buffer.numel() // shards
        for shard in range(shards):
            found = lowrank.matrices(bucket, shard * length, (shard + 1) * length)
            flat = bucket.buffer[shard * length : (shard + 1) * length]
            layout = Layout.of(length, found, 1)
            seen = torch.zeros(length)
            for stack in layout.stacks:
                view = stack.of(flat)
                assert (view == view[:, :, :1]).all(), "entries of two rows"
                assert (view.diff(dim=1) == 1).all(), "rows that do not follow each other"
                stack.of(seen).add_(1)
                covered += view.numel()
            for start, end in layout.rest:
                seen[start:end] += 1
            assert (seen == 1).all()
            assert layout.exact + sum(s.count * s.rows * s.columns for s in layout.stacks) == length
    whole = {(300, 20), (64, 33)} & set(shapes)
    assert bool(whole) <= (covered > 0)


def test_rows_of_more_than_two_dimensions() -> None:
    """Memory is cut where rows and columns together are fewest, in whatever order it is."""
    for shape, width in (
        ((64, 64, 3, 3), 576),
        ((8, 512, 256), 256),
        ((1, 40, 30), 30),
        ((40, 30), 30),
        ((40, 1), 0),
        ((40,), 0),
        ((), 0),
    ):
        assert row_width(torch.empty(shape)) == width, shape
    assert row_width(torch.empty(40, 30).T) == 30
    assert row_width(torch.empty(64, 64, 3, 3).to(memory_format=torch.channels_last)) == 192


def test_equal_neighbours_are_one_stack() -> None:
    found = [Matrix(64 * i, 8, 8) for i in range(4)] + [Matrix(300, 16, 8), Matrix(428, 16, 8)]
    layout = Layout.of(600, found, 1)
    assert [(s.count, s.rows) for s in layout.stacks] == [(4, 8), (2, 16)]
    assert layout.rest == ((256, 300), (556, 600))
    assert layout.left == 4 * 8 + 2 * 16 and layout.right == 6 * 8
    assert not Layout.of(600, found, 4).stacks, "not worth it"


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(5, 60), st.integers(-25, 25), st.integers(0, 3))
def test_columns_become_orthonormal(rank: int, rows: int, power: int, zeros: int) -> None:
    torch.manual_seed(rows)
    found = torch.randn(3, rows, rank) * 10.0**power
    found[1, :, :zeros] = 0
    if rank > 1:
        found[2, :, 1] = found[2, :, 0] * 3
    made, usable = lowrank.orthonormal(found)
    products = made.transpose(1, 2) @ made
    want = torch.diag_embed(usable.squeeze(1).float())
    torch.testing.assert_close(products, want, atol=1e-5, rtol=0)
    assert usable[1, 0, :zeros].sum() == 0 and usable[0].all()
    if rank > 1:
        assert not usable[2, 0, 1], "parallel to the first"
    # What they span is what was given.
    along = made @ (made.transpose(1, 2) @ found)
    torch.testing.assert_close(along, found, atol=1e-4 * 10.0**power, rtol=1e-3)
    found[0, 0, 0] = torch.inf
    assert lowrank.orthonormal(found)[0][0].isnan().any()


# --- the exchange ---


def reference(
    gradients: list[torch.Tensor], residuals: list[torch.Tensor], basis: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """PowerSGD as the module says, of one matrix in float64: result, residuals, next basis."""
    wholes = [(g + r).double() for g, r in zip(gradients, residuals, strict=True)]
    left = torch.linalg.qr(sum(m @ basis.double() for m in wholes)).Q  # type: ignore[union-attr]
    rights = [m.T @ left for m in wholes]
    right = sum(rights)
    assert isinstance(right, torch.Tensor)
    kept = [m - left @ q.T for m, q in zip(wholes, rights, strict=True)]
    return left @ right.T / len(wholes), kept, right / right.norm(dim=0)


def follows(rank: int, size: int) -> None:
    """Five steps on a matrix with entries beside it; one of zeros among them."""
    communicators = Communicators(Options(), torch.device("cpu"))
    route = communicators.flat()
    for name in ("lowrank1", "lowrank2", "lowrank4"):
        wire = wires.get(name)(route, Options())
        state = ShardState(0, matrices=(Matrix(3, 40, 30),))
        residuals = [torch.zeros(40, 30, dtype=torch.float64) for _ in range(size)]
        basis: torch.Tensor | None = None
        for step in range(5):
            torch.manual_seed(step)
            low = torch.randn(40, 3) @ torch.randn(3, 30)
            everyone = [low + 0.1 * torch.randn(40, 30) for _ in range(size)]
            beside = [torch.randn(9) for _ in range(size)]
            if step == 3:
                everyone = [torch.zeros(40, 30)] * size
                residuals = [torch.zeros_like(r) for r in residuals]
                assert state.residual is not None
                state.residual.zero_()
            shard = torch.cat([beside[rank][:3], everyone[rank].flatten(), beside[rank][3:]])
            if basis is None:
                wire.exchange(torch.zeros_like(shard), state)
                memory = state.memory
                assert isinstance(memory, Memory)
                basis = memory.basis.view(30, -1).clone()
                assert torch.equal(memory.basis, memory.first), "zeros say nothing"
            wire.exchange(shard, state)
            shard *= 1 / (size * wire.scaling.outer)
            torch.testing.assert_close(shard[:3], sum(b[:3] for b in beside) / size)
            torch.testing.assert_close(shard[-6:], sum(b[3:] for b in beside) / size)
            matrix = shard[3:-6].view(40, 30)
            if step == 3:
                assert not matrix.any()
                basis = memory.basis.view(30, -1).clone()
                assert torch.equal(memory.basis, memory.first)
                continue
            result, residuals, basis = reference(everyone, residuals, basis)
            torch.testing.assert_close(matrix.double(), result, atol=2e-4, rtol=1e-3)
            assert state.residual is not None
            mine = state.residual[3:-6].view(40, 30)
            torch.testing.assert_close(mine.double(), residuals[rank], atol=2e-4, rtol=1e-3)
            assert not state.residual[:3].any() and not state.residual[-6:].any()
        expected = 2 * (size - 1) * 4 * (9 + 40 * wire.rank) // size
        expected += 2 * (size - 1) * 4 * 30 * wire.rank // size
        assert wire.sent_bytes(len(shard), 4, state) == expected
    communicators.close()


@pytest.mark.parametrize("shape", [[1, 1], [1, 1, 1]], ids=str)
def test_it_is_power_sgd(shape: list[int]) -> None:
    worlds.run(shape, follows)


def learns(rank: int, size: int) -> None:
    """A gradient of rank 2 that stays the same arrives whole after some steps, in two levels."""
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 90, bias=False, device=models.device())
    reducer = Reducer(
        model.named_parameters(), Options(wire="lowrank2", guard_steps=0), track_unused=False
    )
    torch.manual_seed(5)
    gradient = (torch.randn(90, 2) @ torch.randn(2, 60)).to(models.device())
    for _ in range(6):
        model.zero_grad()
        (model.weight * gradient).sum().backward()
        reducer.flush()
        reducer.apply()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, gradient, atol=1e-3, rtol=1e-3)
    sent = sum(exchange.sent_bytes for exchange in reducer.exchanges)
    assert 0 < sent < 90 * 60 * 4 / 4
    for parts in reducer.residuals().values():
        assert all(part.abs().max() < 1e-2 for _, part in parts)
    reducer.close()


@pytest.mark.parametrize("shape", [[1, 1], [2, 2]], ids=str)
def test_what_is_of_low_rank_arrives(shape: list[int]) -> None:
    worlds.run(shape, learns)


def overflows(rank: int, size: int) -> dict[str, Any]:
    """One rank's infinity: NaN for all, and each keeps what it had, and what was finite."""
    communicators = Communicators(Options(), torch.device("cpu"))
    wire = wires.get("lowrank2")(communicators.flat(), Options())
    state = ShardState(0, matrices=(Matrix(0, 40, 30),))
    torch.manual_seed(rank)
    wire.exchange(torch.randn(1200), state)
    assert isinstance(state.memory, Memory) and state.residual is not None
    before, basis = state.residual.clone(), state.memory.basis.clone()
    gradient = torch.randn(1200)
    bad = gradient.clone()
    bad[7] = torch.inf if rank == 0 else bad[7]
    shard = bad.clone()
    wire.exchange(shard, state)
    assert shard.isnan().all()
    want = before + gradient
    want[7] = 0.0 if rank == 0 else want[7]
    torch.testing.assert_close(state.residual, want)
    assert torch.equal(state.memory.basis, state.memory.first) and basis.isfinite().all()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, state.memory.basis)
    assert all(torch.equal(gathered[0], other) for other in gathered)
    communicators.close()
    return {}


def test_what_is_not_finite() -> None:
    worlds.run([1, 1], overflows)
