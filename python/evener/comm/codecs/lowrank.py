"""Low rank: a matrix as a product of two thin ones, found by one step of a power iteration.

PowerSGD (Vogels et al., arXiv 1905.13727). From the matrices M_i that the ranks hold (gradient
plus residual) and a basis Q, [cols, r], of the step before:

    P   = sum of M_i Q        all-reduced; its columns are then made orthonormal
    Q_i = M_i^T P             and all-reduced to Q
    result P Q^T,   residual M_i - P Q_i^T

so r (rows + cols) numbers cross instead of rows * cols, and the sum of results and residuals is
the sum of the M_i. (The paper subtracts P Q^T from each; the sum is the same, and this leaves
smaller residuals where ranks differ.) Q is the next step's basis (warm start), brought to length 1.

Which matrices: a bucket's shard holds slices of several parameters. For each with two dimensions
or more the whole rows that lie in the shard are a matrix, in the order of the parameter's memory
(how long rows are where there are more than two: `buckets.row_width`). So it works on the shards of
two levels as on whole buckets: a slice of rows has no higher rank than the whole. What is left
(parts of rows at the ends, small matrices) is sent exactly, beside P.

Columns that mean nothing (a gradient of zeros, or of a rank below r) are dropped: their part of the
result is 0, and their place in the basis is taken by what it began with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evener.comm.buckets import Bucket
from evener.comm.state import Matrix, let_go

# Smaller is nothing, and one over it would not be finite.
_NOTHING = 1e-37
# A column that keeps less than this of its length, when the others' part is taken out, is noise.
_NOISE = 1e-5
# Matrices that would not get smaller by this factor at least are sent exactly.
_WORTH = 2


def matrices(bucket: Bucket, start: int, end: int) -> tuple[Matrix, ...]:
    """Whole rows of the bucket's parameters between its entries `start` and `end`."""
    found = []
    for slot in () if bucket.by_rows else bucket.slots:
        low, high = max(slot.offset, start), min(slot.offset + slot.numel, end)
        if slot.width <= 1 or low >= high:
            continue
        # Counted in the parameter's own memory.
        shift = slot.start - slot.offset
        first = -(-(low + shift) // slot.width)
        rows = (high + shift) // slot.width - first
        if rows > 1:
            found.append(Matrix(first * slot.width - shift - start, rows, slot.width))
    return tuple(found)


def assumed(numel: int) -> tuple[Matrix, ...]:
    """One matrix, as square as can be, for entries of which nothing is known."""
    columns = 1 << max(0, numel.bit_length() // 2)
    return (Matrix(0, numel // columns, columns),) if numel >= columns else ()


@dataclass(frozen=True)
class Stack:
    """`count` matrices of one shape, `stride` entries apart."""

    offset: int
    rows: int
    columns: int
    count: int = 1
    stride: int = 0

    def with_(self, one: Matrix) -> Stack | None:
        """With one more matrix behind its last; None where that is of another shape or distance."""
        apart = one.offset - (self.offset + self.stride * (self.count - 1))
        same = (one.rows, one.columns) == (self.rows, self.columns)
        if not same or (self.count > 1 and apart != self.stride):
            return None
        return dataclasses.replace(self, count=self.count + 1, stride=apart)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view [count, rows, columns] of a shard."""
        start = flat.storage_offset() + self.offset
        stride = self.stride or self.rows * self.columns
        return flat.as_strided(
            (self.count, self.rows, self.columns), (stride, self.columns, 1), start
        )


@dataclass(frozen=True)
class Layout:
    """What of a shard goes as matrices, in stacks, and what exactly: (start, end), ascending."""

    rank: int
    stacks: tuple[Stack, ...]
    rest: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numel: int, found: Sequence[Matrix], rank: int) -> Layout:
        """The layout of a shard of `numel` entries; `found`: ascending."""
        stacks: list[Stack] = []
        rest, at = [], 0
        for one in found:
            if _WORTH * rank * (one.rows + one.columns) >= one.rows * one.columns:
                continue
            if at < one.offset:
                rest.append((at, one.offset))
            at = one.offset + one.rows * one.columns
            for place, stack in enumerate(stacks):
                if (longer := stack.with_(one)) is not None:
                    stacks[place] = longer
                    break
            else:
                stacks.append(Stack(one.offset, one.rows, one.columns))
        if at < numel:
            rest.append((at, numel))
        return cls(rank, tuple(stacks), tuple(rest))

    @property
    def exact(self) -> int:
        """Entries that are sent as they are."""
        return sum(end - start for start, end in self.rest)

    @property
    def count(self) -> int:
        """Matrices in all."""
        return sum(stack.count for stack in self.stacks)

    @property
    def rows(self) -> int:
        """Rows of the tallest matrix."""
        return max((stack.rows for stack in self.stacks), default=0)

    @property
    def columns(self) -> int:
        """Columns of the widest matrix."""
        return max((stack.columns for stack in self.stacks), default=0)

    @property
    def left(self) -> int:
        """Entries of all P."""
        return self.rank * sum(stack.count * stack.rows for stack in self.stacks)

    @property
    def right(self) -> int:
        """Entries of all Q."""
        return self.rank * sum(stack.count * stack.columns for stack in self.stacks)

    def lefts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views [count, rows, rank] of `flat` [left], by stack."""
        return self._cut(flat, [stack.rows for stack in self.stacks])

    def rights(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views [count, columns, rank] of `flat` [right], by stack."""
        return self._cut(flat, [stack.columns for stack in self.stacks])

    def _cut(self, flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        found, at = [], 0
        for stack, length in zip(self.stacks, lengths, strict=True):
            shape = (stack.count, length, self.rank)
            end = at + stack.count * length * self.rank
            found.append(flat[at:end].view(shape))
            at = end
        return found

    def tall(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Views [count, rows, rank] of `padded` [all matrices, most rows, rank], by stack."""
        return self._parts(padded, [stack.rows for stack in self.stacks])

    def wide(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Views [count, columns, rank] of `padded` [all matrices, most columns, rank]."""
        return self._parts(padded, [stack.columns for stack in self.stacks])

    def _parts(self, padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        parts = padded.split([stack.count for stack in self.stacks]) if self.stacks else ()
        return [part[:, :length] for part, length in zip(parts, lengths, strict=True)]


@dataclass
class Memory:
    """What low rank remembers besides the residual.

    `basis`, `first`: [all matrices, most columns, rank] float32, 0 past a matrix's own columns.
    """

    layout: Layout
    basis: torch.Tensor
    first: torch.Tensor

    @classmethod
    def new(cls, layout: Layout, seed: int, device: torch.device) -> Memory:
        """`seed`: equal on all ranks that exchange this shard."""
        generator = torch.Generator().manual_seed(seed)
        first = torch.zeros(layout.count, layout.columns, layout.rank)
        for view in layout.wide(first):
            view.normal_(generator=generator)
        first = first.to(device)
        return cls(layout, first.clone(), first)

    def renew(self, found: torch.Tensor, usable: torch.Tensor) -> None:
        """`found`, as `basis`, is the next one where `usable` [all matrices, 1, rank]."""
        length = found.norm(dim=1, keepdim=True)
        # One that is not finite is as useless as one of no length.
        usable = usable & (length > _NOTHING) & length.isfinite()
        torch.where(usable, found / length, self.first, out=self.basis)


@dataclass
class SentFactors:
    """What a step took out of the residual, while it may be skipped: see `state.Sent`.

    `left`, `right`: [all matrices, most rows or columns, rank].
    """

    layout: Layout
    left: torch.Tensor
    right: torch.Tensor

    def give_back(self, residual: torch.Tensor, skipped: torch.Tensor | float) -> None:
        """Add it to `residual` where `skipped` is 1."""
        add_products(self.layout, residual, self.left * skipped, self.right, 1.0)

    def let_go(self) -> None:
        """See `state.let_go`."""
        let_go(self.left)
        let_go(self.right)


def orthonormal(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of each of `found` [count, rows, rank], float32, made orthonormal.

    Gram-Schmidt, each column twice (Giraud et al., doi 10.1007/s00211-005-0615-4). Also which
    columns are usable, [count, 1, rank]; the others are 0. What is not finite makes NaN.
    """
    largest = found.abs().amax(dim=1, keepdim=True)
    usable = ~(largest <= _NOTHING)
    # Each column to the size of 1, so that squares of 1e-25 are not nothing.
    made = found / torch.where(usable, largest, 1.0)
    for column in range(found.shape[2]):
        own = made[:, :, column : column + 1]
        before = own.norm(dim=1, keepdim=True)
        for _ in range(2 if column else 0):
            others = made[:, :, :column]
            along = (others * own).sum(dim=1, keepdim=True)
            own -= (others * along).sum(dim=2, keepdim=True)
        length = own.norm(dim=1, keepdim=True)
        noise = (length <= _NOISE * before) | ~usable[:, :, column : column + 1]
        own.copy_(torch.where(noise, 0.0, own / length))
        usable[:, :, column : column + 1] &= ~noise
    return made, usable


def add_products(
    layout: Layout, flat: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sign: float
) -> None:
    """Each matrix in `flat` += `sign` * its `left` times its `right`, transposed; both padded.

    Column by column and never by a matrix product, which on a GPU may round to TF32: then what was
    sent and what is left would not be the whole.
    """
    for stack, tall, wide in zip(layout.stacks, layout.tall(left), layout.wide(right), strict=True):
        out = stack.of(flat)
        for column in range(layout.rank):
            out.addcmul_(tall[:, :, column, None], wide[:, None, :, column], value=sign)


def set_products(
    layout: Layout, flat: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Each matrix in `flat` becomes that product."""
    for stack, tall, wide in zip(layout.stacks, layout.tall(left), layout.wide(right), strict=True):
        out = stack.of(flat)
        torch.mul(tall[:, :, 0, None], wide[:, None, :, 0], out=out)
        for column in range(1, layout.rank):
            out.addcmul_(tall[:, :, column, None], wide[:, None, :, column])
