"""How rows are shown to be independent of the padding before that is relied on. No framework.

A function may run padded where what it gives for the real rows depends on them alone. Looking at
one nearly full batch does not show that: a mean over 1,024 rows changes little with one row more.
So the check runs the function several times:

- **Sizes.** Some rows of the call, as few as one of them, padded up to the edge, beside the plain
  function on these rows. What depends on the number of rows is then far off, and not by one
  part in the size of the batch.
- **Fillings.** The same rows with other padding: real rows in another order, rows far above and far
  below all real ones, and NaN. The shape is the same, so are the kernels, and what the function
  gives for real rows has to be the same **bits**. Any dependence shows, however small.
- **Rows.** Results are compared row by row: one wrong row among thousands is a wrong result.

Rows of integers (ids, lengths, masks) are filled with other real rows alone, because another
number may be no id. With `mask=` the function gets finite numbers only: it multiplies padding by
zero. Gradients are compared under fillings of real rows, whose numbers are in its domain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A record of an earlier process counts where its check was this one.
PROOF = 3
_FEW = 8


@dataclass(frozen=True)
class Filling:
    """What padded rows are: real rows of these numbers, times `factor`, and `shift` added.

    `shift` is in units of the largest magnitude among real rows; NaN makes every number NaN. Both
    are for floating point numbers alone. `wild`: these rows may lie outside of the function's
    domain, so gradients are not asked for.
    """

    name: str
    rows: tuple[int, ...]
    factor: float = 1.0
    shift: float = 0.0

    @property
    def wild(self) -> bool:
        """Whether a number in it may be one that no real row would have."""
        return self.factor != 1.0 or self.shift != 0.0


def samples(size: int, edge: int) -> list[range]:
    """Which of a call's `size` rows are run, padded to `edge`: at least one row of padding.

    The first has a real share of padding. Then come ever fewer, down to one: wherever the function
    takes another branch for fewer rows, one of them has it. A few rows run backwards too, and from
    the end: an `argmax` of two rows is right by luck every second time.
    """
    most = min(size, edge - 1)
    wanted = [min(most, max(1, edge // 2)), most, most * 2 // 3 | 1]
    while wanted[-1] > 1:
        wanted.append(wanted[-1] // 2)
    found: list[range] = []
    for n in dict.fromkeys(n for n in wanted if n <= most):
        found.append(range(n))
        if n <= _FEW:
            found += [range(n - 1, -1, -1), range(size - n, size)]
    return list(dict.fromkeys(found))


def fillings(size: int, more: int, masked: bool) -> list[Filling]:
    """Paddings of `more` rows behind `size` real ones; the first is the one that calls get."""
    last = (size - 1,) * more
    around = tuple((size - 2 - i) % size for i in range(more))
    spread = tuple((i * 7 + size // 2) % size for i in range(more))
    found = [
        Filling("the last row", last),
        Filling("the rows backwards", around),
        Filling("other rows", spread),
    ]
    if masked:
        return [*found, Filling("rows of other signs", around, factor=-2.0)]
    return [
        *found,
        Filling("rows far above", around, shift=1e4),
        Filling("rows far below", spread, shift=-1e4),
        Filling("rows that are no numbers", around, shift=float("nan")),
    ]


def apart(plain: np.ndarray, padded: np.ndarray, dim: int | None) -> float:
    """How far two results are apart: the largest error of a row, over the size of a row.

    `dim`: where rows are; None compares the whole. The size of a row is its own norm, and not below
    a hundredth of the mean row's, so that rounding of a row of zeros does not count.
    """
    if plain.size == 0:
        return 0.0
    a, b = plain.astype(np.float64), padded.astype(np.float64)
    if dim is None or not 0 <= dim < a.ndim:
        a, b = a.reshape(1, -1), b.reshape(1, -1)
    else:
        a = np.moveaxis(a, dim, 0).reshape(a.shape[dim], -1)
        b = np.moveaxis(b, dim, 0).reshape(a.shape)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities too
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.linalg.norm(np.where(same, 0.0, a - b), axis=1)
        own = np.linalg.norm(np.where(same & ~np.isfinite(a), 0.0, a), axis=1)
    if not np.isfinite(gap).all():
        return float("inf")
    own = np.where(np.isfinite(own), own, 0.0)
    return float((gap / (np.maximum(own, 1e-2 * own.mean()) + 1e-12)).max())


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two results of one shape are equal; zeros of either sign, and NaN, are."""
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    return bool(((one == other) | (np.isnan(one) & np.isnan(other))).all())
