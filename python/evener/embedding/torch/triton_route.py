"""A batch's ids on a GPU: looked through, and put where each is asked for, in three kernels.

`look` compares ids with the rows that there are, and counts them by feature; `fill` puts what goes
to each owner, and what this rank pools by itself, into one tensor. Ids of a feature lie side by
side, before and after: so a program takes every `SPREAD`th block of one feature, however many there
are, and the host need not know how many.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.embedding.torch.layouts import Layout

BLOCK = 1024
SPREAD = 32


@triton.jit(do_not_specialize=["n", "batch"])
def _look(
    values,  # int [n]
    ends,  # int [inputs * batch + 1]
    limits,  # int64 [inputs]: rows that there are; -1: of any
    head,  # int64 [2 + inputs + 1 + ...], zeros
    n,
    batch,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
):
    i = tl.program_id(0)
    part = tl.program_id(1)
    first = ends + tl.cast(i, tl.int64) * batch
    begin = tl.load(first).to(tl.int64)
    end = tl.load(first + batch).to(tl.int64)
    if part == 0:
        tl.store(head + 2 + i, begin)
        if i == INPUTS - 1:
            tl.store(head + 3 + i, end)
            tl.atomic_max(head + 1, (end != n).to(tl.int64))
        if i == 0:
            tl.atomic_max(head + 1, (begin != 0).to(tl.int64))
    lanes = tl.arange(0, BLOCK)
    most = tl.load(limits + i)
    # Whatever ends are, nothing beside the ids is read.
    at = tl.maximum(begin, 0) + part * BLOCK
    stop = tl.minimum(end, n)
    wrong = tl.zeros([BLOCK], tl.int64)
    while at < stop:
        inside = at + lanes < stop
        id = tl.load(values + at + lanes, inside, other=0).to(tl.int64)
        wrong |= (inside & (most >= 0) & ((id < 0) | (id >= most))).to(tl.int64)
        at += SPREAD * BLOCK
    if tl.max(wrong, 0) > 0:
        tl.atomic_max(head, tl.cast(1, tl.int64))
    odd = tl.zeros([BLOCK], tl.int64)
    at = tl.cast(part, tl.int64) * BLOCK
    while at < batch:
        inside = at + lanes < batch
        low = tl.load(first + at + lanes, inside, other=0)
        high = tl.load(first + at + lanes + 1, inside, other=0)
        odd |= (low > high).to(tl.int64)
        at += SPREAD * BLOCK
    if tl.max(odd, 0) > 0:
        tl.atomic_max(head + 1, tl.cast(1, tl.int64))


@triton.jit
def _tell(head, mask, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """head[2 + INPUTS + 1 + r]: ids of the inputs that row r of `mask` counts."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int64)
    for begin in tl.static_range(0, INPUTS, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < INPUTS
        low = tl.load(head + 2 + i, inside, other=0)
        high = tl.load(head + 3 + i, inside, other=0)
        total += tl.load(mask + row * INPUTS + i, inside, other=0) * (high - low)
    tl.store(head + 3 + INPUTS + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["batch"])
def _fill(
    values,  # int [n]
    ends,  # int [inputs * batch + 1]
    inputs,  # int64 [slots]
    bases,  # int64 [slots]: what is added to ids
    counts,  # int64 [slots]: 1 where lengths are asked for, 0 where ends are
    places,  # int64 [slots, 3]: of lengths or ends in `out`, of ids; ids of the bags before
    out,  # int32
    batch,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
):
    slot = tl.program_id(0)
    part = tl.program_id(1)
    first = ends + tl.load(inputs + slot) * batch
    begin = tl.load(first).to(tl.int64)
    n = tl.load(first + batch).to(tl.int64) - begin
    base = tl.load(bases + slot)
    words = out + tl.load(places + 3 * slot)
    ids = out + tl.load(places + 3 * slot + 1)
    before = tl.load(places + 3 * slot + 2)
    lengths = tl.load(counts + slot) > 0
    lanes = tl.arange(0, BLOCK)
    at = tl.cast(part, tl.int64) * BLOCK
    while at < n:
        inside = at + lanes < n
        id = tl.load(values + begin + at + lanes, inside, other=0).to(tl.int64)
        tl.store(ids + at + lanes, (id + base).to(tl.int32), inside)
        at += SPREAD * BLOCK
    at = tl.cast(part, tl.int64) * BLOCK
    while at <= batch:
        bag = at + lanes
        low = tl.load(first + bag, bag <= batch, other=0).to(tl.int64)
        if lengths:
            high = tl.load(first + bag + 1, bag < batch, other=0).to(tl.int64)
            tl.store(words + bag, (high - low).to(tl.int32), bag < batch)
        else:
            tl.store(words + bag, (low - begin + before).to(tl.int32), bag <= batch)
        at += SPREAD * BLOCK


def look(values: torch.Tensor, ends: torch.Tensor, layout: Layout) -> torch.Tensor:
    """See `routes.look`."""
    inputs, rows = len(layout.limits), len(layout.mask)
    head = torch.zeros(3 + inputs + rows, dtype=torch.int64, device=values.device)
    if inputs:
        _look[(inputs, SPREAD)](
            values, ends, layout.limits, head, len(values), layout.batch,
            INPUTS=inputs, BLOCK=BLOCK, SPREAD=SPREAD,
        )  # fmt: skip
        block = min(1024, triton.next_power_of_2(inputs))
        _tell[(rows,)](head, layout.mask, INPUTS=inputs, BLOCK=block)
    return head


def fill(
    values: torch.Tensor,
    ends: torch.Tensor,
    layout: Layout,
    places: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Put ids, and lengths or ends, to `places` of `out`, which has zeros."""
    if len(places):
        _fill[(len(places), SPREAD)](
            values, ends, layout.slots.inputs, layout.slots.bases, layout.slots.lengths, places,
            out, layout.batch, BLOCK=BLOCK, SPREAD=SPREAD,
        )  # fmt: skip
