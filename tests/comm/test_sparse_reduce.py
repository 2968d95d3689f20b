"""Top-k among many ranks: in two halves, against plain arithmetic, and cheaper than a gather."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from evener.comm import wires
from evener.comm.codecs import chunks, topk
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.state import ScaleChange, ShardState
from evener.comm.wires.topk import SparseWire
from tests import worlds

RATIO = 0.02


def largest(row: torch.Tensor, chunk: int) -> torch.Tensor:
    """The mask of what a selection takes of `row`."""
    mask = torch.zeros(len(row), dtype=torch.bool)
    for start in range(0, len(row), chunk or max(1, len(row))):
        part = row[start : start + (chunk or len(row))]
        k = min(len(part), chunks.entries(RATIO) if chunk else topk.entries(len(part), RATIO))
        order = torch.sort(part.abs(), descending=True, stable=True).indices[:k]
        mask[start + order] = True
    return mask


def halves(rank: int, size: int, form: str, n: int, skips: bool) -> None:
    communicators = Communicators(Options(), torch.device("cpu"))
    wire = wires.get(form)(communicators.flat(), Options(ratio=RATIO))
    assert isinstance(wire, SparseWire) and wire.by_parts
    chunk = chunks.CHUNK if form == "topk-chunk" else 0
    state = ShardState(0, keep_sent=True)
    residuals = torch.zeros(size, n, dtype=torch.float64)
    starts = wire._starts(n)
    total = torch.zeros(n, dtype=torch.float64)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        everyone = torch.randn(size, n, generator=generator)
        shard = everyone[rank].clone()
        wire.exchange(shard, state)
        shard /= wire.scaling.outer
        residuals += everyone
        want = torch.zeros(n, dtype=torch.float64)
        for owner, (start, end) in enumerate(pairwise(starts)):
            part = residuals[:, start:end]
            masks = torch.stack([largest(row, chunk) for row in part])
            sums = torch.where(masks, part, 0.0).sum(0)
            part[masks] = 0.0
            mask = largest(sums, chunk)
            want[start:end] = torch.where(mask, sums, 0.0)
            part[owner] += torch.where(mask, 0.0, sums)
        # Chunks send FP16; which of two nearly equal sums goes may differ then.
        if chunk:
            assert ((shard != 0) != (want != 0)).float().mean() < 2e-3
        else:
            torch.testing.assert_close(shard.double(), want, atol=1e-5, rtol=1e-5)
        most = -(-n // chunk) * chunks.entries(RATIO) if chunk else n * RATIO + size
        assert (shard != 0).sum() <= most
        gathered = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(gathered, shard)
        assert all(torch.equal(shard, other) for other in gathered)
        assert state.residual is not None
        owed = state.residual.double()
        dist.all_reduce(owed)
        if skips and step == 2:  # what has arrived is kept back again
            state.rescale(ScaleChange(1.0, True))
            again = state.residual.double()
            dist.all_reduce(again)
            torch.testing.assert_close(again - owed, shard.double(), atol=1e-4, rtol=1e-4)
            break
        total += shard
        given = sum(
            torch.randn(size, n, generator=torch.Generator().manual_seed(s)).double().sum(0)
            for s in range(step + 1)
        )
        torch.testing.assert_close(total + owed, given, atol=1e-4, rtol=1e-4)
    to_all = (size - 1) * wire._size(n, RATIO)
    assert wire.sent_bytes(n, 4) < to_all or n < 100, "a few entries and padding"
    communicators.close()


@pytest.mark.parametrize(
    ("form", "n"), [("topk", 4096), ("topk", 70), ("topk-chunk", 5 * 4096 + 100)]
)
def test_it_is_a_sparse_reduce(form: str, n: int) -> None:
    worlds.run([1] * 4, halves, form, n, n == 4096)


def test_what_a_rank_sends_does_not_grow_with_their_number() -> None:
    paper = wires.get("topk-chunk").paper(0.01)
    sent = {nodes: paper.sent(100 << 20, nodes) for nodes in (2, 3, 4, 64)}
    assert sent[3] == 2 * sent[2]
    assert sent[4] < sent[3] and sent[64] < 2 * sent[2]
    assert paper.hops(3) == 2 and paper.hops(4) == 6
