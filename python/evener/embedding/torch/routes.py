"""What a rank asks of the owners of resident tables, and what it pools by itself: from its ids.

Everything that is made from a batch's ids before they travel. On a GPU three kernels
(`triton_route`) do it instead of some forty of torch, under the rules of `kernels`: they are tried
before they are used, and have the bits of the references.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evener.embedding.torch import kernels
from evener.embedding.torch.columns import Columns
from evener.embedding.torch.layouts import Layout, Side, Slots


@dataclass
class Filled:
    """Ids of a batch, by where they are pooled.

    `bodies`: int32 to each rank: of each group the lengths of its bags, and their ids. Where there
    is one rank, ids and ends of these bags instead, of each group: `asked`, `stops`. `near`,
    `ends`: the same of what this rank pools of tables that it is sent.
    """

    bodies: list[torch.Tensor]
    asked: list[torch.Tensor]
    stops: list[torch.Tensor]
    near: list[torch.Tensor]
    ends: list[torch.Tensor]


def look(values: torch.Tensor, ends: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int64: whether any id has no row, whether lengths do not fit the ids; where the ids of each
    input begin, and the last ends; and how many ids go where `layout.mask` says."""
    if kernels.on(values.device) and _routes(values.device):
        from evener.embedding.torch import triton_route

        return triton_route.look(values, ends, layout)
    return look_reference(values, ends, layout)


def look_reference(values: torch.Tensor, ends: torch.Tensor, layout: Layout) -> torch.Tensor:
    """See `look`."""
    at = ends[layout.at].long()
    wrong = out_of_range(values, at, layout)[0]
    odd = (ends[0] != 0) | (ends[-1] != len(values)) | (ends.diff() < 0).any()
    goes = (layout.mask * at.diff()).sum(1)
    return torch.cat((torch.stack((wrong.any(), odd)).long(), at, goes))


def out_of_range(
    values: torch.Tensor, at: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [n], whether an id has no row; int64 [n], its input."""
    count = torch.arange(len(values), device=values.device)
    which = torch.searchsorted(at[1:].contiguous(), count, right=True)
    which.clamp_(max=max(0, len(layout.limits) - 1))
    most = layout.limits[which]
    return ((values < 0) | (values >= most)) & (most >= 0), which


def fill(values: torch.Tensor, ends: torch.Tensor, layout: Layout, start: Sequence[int]) -> Filled:
    """Everything by where it goes; input i has ids `start[i]` to `start[i + 1]`."""
    if kernels.on(values.device) and _routes(values.device):
        return _filled(values, ends, layout, start)
    return fill_reference(values, ends, layout, start)


def fill_reference(
    values: torch.Tensor, ends: torch.Tensor, layout: Layout, start: Sequence[int]
) -> Filled:
    """See `fill`."""
    by_input = ends.diff().view(len(layout.limits), layout.batch).int()

    def taken(side: Side) -> torch.Tensor:
        """Ids of these features, one behind another."""
        if not side.features:
            return values.new_empty(0).int()
        parts = [values[start[i] : start[i + 1]] for i in side.places]
        counts = [len(part) for part in parts]
        each = torch.tensor(counts, device=values.device)
        return (torch.cat(parts) + side.bases.repeat_interleave(each)).int()

    near = [taken(side) for side in layout.whole]
    short = [ends_of(by_input[side.inputs].flatten()) for side in layout.whole]
    ids = [taken(side) for side in layout.bags]
    long = [by_input[side.inputs] for side in layout.bags]
    if layout.slots.alone:
        return Filled([], ids, [ends_of(each.flatten()) for each in long], near, short)
    bodies: list[list[torch.Tensor]] = [[] for _ in layout.bags[0].cuts]
    for side, own, each in zip(layout.bags, ids, long, strict=True):
        cuts = [0, *itertools.accumulate(side.cuts)]
        counts = [0, *itertools.accumulate(start[i + 1] - start[i] for i in side.places)]
        for body, (begin, end) in zip(bodies, itertools.pairwise(cuts), strict=True):
            body += [each[begin:end].flatten(), own[counts[begin] : counts[end]]]
    return Filled([torch.cat(body) for body in bodies], [], [], near, short)


def _filled(
    values: torch.Tensor, ends: torch.Tensor, layout: Layout, start: Sequence[int]
) -> Filled:
    from evener.embedding.torch import triton_route

    slots, batch, at = layout.slots, layout.batch, 0
    places: list[tuple[int, int, int]] = []
    cuts: list[tuple[int, int, int]] = []  # of each block: where it begins, its ids, where it ends
    for block, counts in zip(slots.blocks, slots.counts, strict=True):
        begin, before = at, 0
        ids = at + batch * len(block) + (0 if counts else 1)
        for j, i in enumerate(block):
            places.append((begin + j * batch, ids + before, before))
            before += start[i + 1] - start[i]
        at = ids + before
        cuts.append((begin, ids, at))
    out = torch.zeros(at, dtype=torch.int32, device=values.device)
    where = torch.tensor(places, dtype=torch.int64).view(-1, 3).to(values.device)
    triton_route.fill(values, ends, layout, where, out)
    n = len(layout.whole)
    near = [out[ids:end] for _, ids, end in cuts[-n:]]
    short = [out[begin:ids] for begin, ids, _ in cuts[-n:]]
    mine = cuts[:-n]
    if slots.alone:
        asked = [out[ids:end] for _, ids, end in mine]
        return Filled([], asked, [out[begin:ids] for begin, ids, _ in mine], near, short)
    bodies = [out[mine[r][0] : mine[r + n - 1][2]] for r in range(0, len(mine), n)]
    return Filled(bodies, [], [], near, short)


def ends_of(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [bags + 1]."""
    out = lengths.new_zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=out[1:])
    return out


@functools.cache
def _routes(device: torch.device) -> bool:
    return kernels.tried("routes of ids", lambda: try_routes(device))


def try_routes(device: torch.device) -> bool:
    """Whether the kernels give the references' numbers: of one rank and of two, and of what does
    not fit."""
    draw = torch.Generator().manual_seed(1)
    batch, inputs = 5, 3
    lengths = torch.randint(0, 4, (inputs * batch,), generator=draw)
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(device)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=draw).to(device)
    same = True
    for ranks in (1, 2):
        layout = _trial(ranks, batch, device)
        for ids, given in (
            (values, ends),
            (values.int(), ends.int()),
            (values - 3, ends),
            (values % 18, ends),
            (values, ends.flip(0)),
        ):
            mine, right = (f(ids, given, layout) for f in (_look_by_kernel, look_reference))
            # Where ends are no ends, the ids of an input are not said either.
            same &= torch.equal(mine, right) or bool(mine[1] & right[1])
        start = right_start(look_reference(values, ends, layout), inputs)
        for mine, right in zip(
            vars(_filled(values, ends, layout, start)).values(),
            vars(fill_reference(values, ends, layout, start)).values(),
            strict=True,
        ):
            same &= len(mine) == len(right) and all(map(torch.equal, mine, right))
    return same


def right_start(head: torch.Tensor, inputs: int) -> list[int]:
    found: list[int] = head[2 : 3 + inputs].tolist()
    return found


def _look_by_kernel(values: torch.Tensor, ends: torch.Tensor, layout: Layout) -> torch.Tensor:
    from evener.embedding.torch import triton_route

    return triton_route.look(values, ends, layout)


def _trial(ranks: int, batch: int, device: torch.device) -> Layout:
    """Three inputs: the first of two features, one of them pooled here; the last one's owner is the
    last rank."""

    def up(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device)

    def side(places: list[int], bases: list[int], cuts: list[int]) -> Side:
        none = up([0] * len(places))
        columns = Columns.of([0] * len(places), torch.empty(0, device=device))
        return Side(places, columns, up(places), up(bases), cuts, places, none, None)

    bags = side([0, 1, 2], [7, 0, 100], [3] if ranks == 1 else [2, 1])
    whole = side([0], [11], [1, 0][:ranks])
    mask = [[1, 1, 1]] if ranks == 1 else [[1, 1, 0], [0, 0, 1]]
    return Layout(
        batch,
        up([0, 1, 2, 3]) * batch,
        up([20, -1, 18]),
        [bags],
        [whole],
        [[5]],
        [up([0] * 5)],
        torch.tensor(mask).to(device),
        Slots.of([bags], [whole], device),
    )
