"""The step of rows that lie on a GPU, in one kernel: what `updates` does in torch operations.

A step of `Arena` is some forty small kernels in torch: rows are gathered, updated value by value in
many passes, and put back. Here a program takes some rows through all of it. A sum over a row is
made of every sixteenth value by itself and then of these sums by halves, as the store has it, so
all optimizers give the store's bits. For that nothing is contracted into a fused multiply-add, and
divisions and roots are rounded to nearest.

`add_rows` adds up gradients by row: entries that are sorted by row, in parts of `PART`, and then
the parts of a row. What a row gets depends on nothing but its own entries and their order.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from evener.embedding.torch import updates
from evener.embedding.torch.updates import Held

ROWS = 16  # of a program
PART = 64  # entries that one program adds up
TILE = 8  # pieces of a row that are read together


@triton.jit
def _halves(x, ROWS: tl.constexpr):
    """[ROWS]: the sums of 16 values, by halves."""
    x = tl.sum(tl.reshape(x, [ROWS, 2, 8]), 1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 4]), 1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 2]), 1)
    return tl.sum(x, 1)


@triton.jit
def _power(base, exponent):
    """float64: base to each exponent, by squaring, as the store does it."""
    result = (exponent * 0).to(tl.float64) + 1.0
    square = result * 0.0 + base
    for bit in tl.static_range(32):
        result = tl.where(((exponent >> bit) & 1) == 1, result * square, result)
        square = square * square
    return result


@triton.jit
def _narrow(w, DTYPE: tl.constexpr):
    if DTYPE == "f16":
        w = w.to(tl.float16).to(tl.float32)
    if DTYPE == "bf16":
        # By its bits: Triton's interpreter cuts them off.
        bits = w.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        w = tl.where(w == w, near.to(tl.uint32).to(tl.float32, bitcast=True), w)
    return w


@triton.jit(do_not_specialize=["n", "step"])
def _step(
    places,  # int64 [n]: rows, once each
    gradients,  # float32 [n, DIM]
    weight,  # float32 [rows, DIM]
    slots,  # float32 [rows, SLOTS]
    version,  # int64 [rows]
    frequency,  # int64 [rows]
    n,
    step,
    lr,
    decay,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    first,  # corrections, or what they have become: see `_numbers`
    second,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < n
    row = tl.load(places + at, here, other=0)
    lanes = tl.arange(0, 16)
    old = tl.load(version + row, here, other=0)
    if KIND == "adam":
        absent = tl.maximum(tl.maximum(step - old, 0) - 1, 0)
        shrink1 = _power(beta1, absent).to(tl.float32)
        shrink2 = _power(beta2, absent).to(tl.float32)

    # What is of a whole row.
    if KIND == "row_wise_adagrad" or KIND == "partial_row_wise_adam" or KIND == "lamb":
        total = tl.zeros([ROWS, 16], tl.float32)
        other = tl.zeros([ROWS, 16], tl.float32)
        for part in tl.static_range((DIM + 15) // 16):
            column = part * 16 + lanes
            inside = here[:, None] & (column < DIM)[None, :]
            g = tl.load(gradients + at[:, None] * DIM + column[None, :], inside, other=0.0)
            if KIND == "row_wise_adagrad":
                if DECAYS and not DECOUPLED:
                    w = tl.load(weight + row[:, None] * DIM + column[None, :], inside, other=0.0)
                    g = g + w * decay
                total = total + g * g
            elif KIND == "partial_row_wise_adam":
                total = total + g * g
            else:
                w = tl.load(weight + row[:, None] * DIM + column[None, :], inside, other=0.0)
                own = slots + row[:, None] * SLOTS + column[None, :]
                m = tl.load(own, inside, other=0.0) * beta1 + g * rest1
                v = tl.load(own + DIM, inside, other=0.0) * beta2 + (g * g) * rest2
                change = tl.math.div_rn(
                    tl.math.div_rn(m, first), tl.math.sqrt_rn(tl.math.div_rn(v, second)) + eps
                )
                change = change + w * decay
                total = total + w * w
                other = other + tl.where(inside, change * change, 0.0)
        total = _halves(total, ROWS)
        other = _halves(other, ROWS)
        if KIND == "row_wise_adagrad":
            s = tl.load(slots + row * SLOTS, here, other=0.0)
            s = s + tl.math.div_rn(total, total * 0 + DIM)
            tl.store(slots + row * SLOTS, s, here)
            size = tl.math.div_rn(s * 0 + lr, tl.math.sqrt_rn(s) + eps)
            keep = 1 - decay * (s * 0 + lr if DECOUPLED else size)
        elif KIND == "partial_row_wise_adam":
            v = tl.load(slots + row * SLOTS + DIM, here, other=0.0)
            v = v * beta2 + tl.math.div_rn(total, total * 0 + DIM) * rest2
            tl.store(slots + row * SLOTS + DIM, v, here)
            size = tl.math.sqrt_rn(tl.math.div_rn(v, v * 0 + second)) + eps
            keep = size
        else:
            length = tl.math.sqrt_rn(total)
            way = tl.math.sqrt_rn(other)
            good = (length > 0) & (way > 0)
            trust = tl.where(good, tl.math.div_rn(length, tl.where(good, way, 1.0)), 1.0)
            size = trust * lr
            keep = size

    # Pieces are wider from here on, so other threads have them. What was read must not be written
    # before all have read it.
    tl.debug_barrier()

    # What is of each value.
    for begin in tl.static_range(0, DIM, WIDE):
        column = begin + tl.arange(0, WIDE)
        inside = here[:, None] & (column < DIM)[None, :]
        to = weight + row[:, None] * DIM + column[None, :]
        own = slots + row[:, None] * SLOTS + column[None, :]
        w = tl.load(to, inside, other=0.0)
        g = tl.load(gradients + at[:, None] * DIM + column[None, :], inside, other=0.0)
        if KIND == "sgd":
            w = w - (g + w * decay) * lr
        elif KIND == "adagrad":
            if DECAYS:
                g = g + w * decay
            a = tl.load(own, inside, other=0.0) + g * g
            tl.store(own, a, inside)
            w = w - tl.math.div_rn(g * lr, tl.math.sqrt_rn(a) + eps)
        elif KIND == "row_wise_adagrad":
            w = w * keep[:, None] - g * size[:, None]
        elif KIND == "partial_row_wise_adam":
            m = tl.load(own, inside, other=0.0) * beta1 + g * rest1
            tl.store(own, m, inside)
            change = tl.math.div_rn(tl.math.div_rn(m, m * 0 + first), m * 0 + size[:, None])
            w = w - (change + w * decay) * lr
        elif KIND == "lamb":
            m = tl.load(own, inside, other=0.0) * beta1 + g * rest1
            v = tl.load(own + DIM, inside, other=0.0) * beta2 + (g * g) * rest2
            tl.store(own, m, inside)
            tl.store(own + DIM, v, inside)
            change = tl.math.div_rn(
                tl.math.div_rn(m, first), tl.math.sqrt_rn(tl.math.div_rn(v, second)) + eps
            )
            change = change + w * decay
            w = w - change * size[:, None]
        else:  # adam, adam_w and lazy_adam; `first` is the size of a step, `second` of the root
            m = tl.load(own, inside, other=0.0)
            v = tl.load(own + DIM, inside, other=0.0)
            if KIND == "adam":
                m = m * shrink1[:, None]
                v = v * shrink2[:, None]
            if KIND == "adam_w":
                w = w * decay
            elif DECAYS:
                g = g + w * decay
            m = m * beta1 + g * rest1
            v = v * beta2 + (g * g) * rest2
            tl.store(own, m, inside)
            tl.store(own + DIM, v, inside)
            w = w - tl.math.div_rn(m * first, tl.math.sqrt_rn(v) * second + eps)
        tl.store(to, _narrow(w, DTYPE), inside)
    tl.store(version + row, old * 0 + step, here)
    tl.store(frequency + row, tl.load(frequency + row, here, other=0) + 1, here)


def _numbers(o: dict[str, Any], t: int, lr: float) -> dict[str, float]:
    """The numbers of a step, rounded as `updates` has them."""
    f, rounded = np.float32, updates.rounded
    decay, eps = rounded(o.get("weight_decay", 0.0)), rounded(o.get("eps", 0.0))
    beta1, beta2 = rounded(o.get("beta1", 0.0)), rounded(o.get("beta2", 0.0))
    first = second = 1.0
    kind = o["kind"]
    if kind in ("partial_row_wise_adam", "lamb"):
        first, second = updates.corrections(o, t)
    elif kind in ("adam", "adam_w", "lazy_adam"):
        first, second, eps = updates.sizes(o, t, lr)
        if kind == "adam_w":
            decay = float(f(1) - f(lr) * f(o["weight_decay"]))
        elif kind == "lazy_adam":
            decay = 0.0
    return {
        "lr": lr,
        "decay": decay,
        "eps": eps,
        "beta1": beta1,
        "rest1": float(f(1) - f(beta1)),
        "beta2": beta2,
        "rest2": float(f(1) - f(beta2)),
        "first": first,
        "second": second,
    }


def step(
    rows: Held, places: torch.Tensor, gradients: torch.Tensor, number: int, t: int, lr: float
) -> None:
    """See `kernels.step`."""
    n = len(places)
    if not n:
        return
    optimizer, dim = rows.options["optimizer"], rows.weight.shape[1]
    numbers = _numbers(optimizer, t, lr)
    extra: dict[str, Any] = {"enable_fp_fusion": False}
    _step[(triton.cdiv(n, ROWS),)](
        places, gradients.contiguous(), rows.weight, rows.slots, rows.version, rows.frequency,
        n, number,
        **numbers,
        DIM=dim,
        SLOTS=rows.slots.shape[1],
        KIND=optimizer["kind"],
        DECAYS=numbers["decay"] != 0.0,
        DECOUPLED=bool(optimizer.get("decoupled", False)),
        DTYPE=rows.options["dtype"],
        ROWS=ROWS,
        WIDE=min(128, triton.next_power_of_2(dim)),
        **extra,
    )  # fmt: skip


@triton.jit
def _pieces(bags, of, index, out, n, DIM: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of entries that lie side by side in a part and are of one row.

    Parts are numbered, and so are rows; along the entries one or both go up. So the sum of both
    numbers is a place that no other piece has.
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = part * PART
    row = tl.load(index + begin)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PART):
        at = begin + i
        mine = tl.load(index + at, at < n, other=-1)
        bag = tl.load(of + at, at < n, other=0).to(tl.int64)
        if (mine != row) & (at < n):
            tl.store(out + (part + row) * DIM + column, total, column < DIM)
            total = tl.zeros([BLOCK], tl.float32)
            row = mine
        width = tl.where(at < n, DIM, 0)
        total += tl.load(bags + bag * DIM + column, column < width, other=0.0)
    tl.store(out + (part + row) * DIM + column, total, column < DIM)


@triton.jit
def _whole(pieces, starts, out, DIM: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """The sums of each row's pieces."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(starts + row) // PART + row
    end = (tl.load(starts + row + 1) - 1) // PART + row + 1
    total = tl.zeros([BLOCK], tl.float32)
    while i < end:
        at = i + tl.arange(0, TILE)
        inside = (at < end)[:, None] & (column < DIM)[None, :]
        total += tl.sum(tl.load(pieces + at[:, None] * DIM + column[None, :], inside, other=0.0), 0)
        i += TILE
    tl.store(out + row * DIM + column, total, column < DIM)


def add_rows(
    bags: torch.Tensor,
    of: torch.Tensor,
    index: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`out` [rows, dim]: for each row the sum of `bags` [m, dim] of its entries.

    Entries are sorted by row: `of` (int [n]) has the bag of each, `index` (int64 [n]) its row,
    counted from 0 without gaps, and `starts` (int64 [rows + 1]) where a row's entries begin.
    """
    n, rows, dim = len(of), len(starts) - 1, bags.shape[1]
    if not n:
        return
    parts = triton.cdiv(n, PART)
    block = min(128, triton.next_power_of_2(dim))
    pieces = torch.empty(parts + rows, dim, device=bags.device)
    columns = triton.cdiv(dim, block)
    # One warp each: there are many programs, and each waits for memory most of the time.
    small: dict[str, Any] = {"num_warps": 1}
    _pieces[(parts, columns)](bags, of, index, pieces, n, DIM=dim, PART=PART, BLOCK=block, **small)
    _whole[(rows, columns)](
        pieces, starts, out, DIM=dim, PART=PART, BLOCK=block, TILE=TILE, **small
    )
