"""The exchange of rows: of an embedding's gradient only what was looked up crosses the network.

Every rank sends which rows it has and what is in them, all to all (an all-gather, in one level), in
as many bytes as the rank with the most; each adds what came to its own copy in rank order, so all
end with the same bits. The values go as the bucket's form says (`Wire.rows_as`): their own dtype,
16 bits, or INT8 in blocks, rounded to either side at random so that the mean is right. Rounding
leaves no residual here: other rows come in every step. Quantising without one: Alistarh et al.,
QSGD, arXiv 1610.02132.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evener.comm.buckets import padded
from evener.comm.codecs import int8
from evener.comm.exchange import Exchange, Step
from evener.comm.scratch import Scratch
from evener.comm.state import let_go


@dataclass
class Rows:
    """What one rank brings in one step. `rows`: int64 [n], each once but for rows of zeros;
    `values`: [n, width].

    `most`: the largest n of all ranks, at least 1.
    """

    rows: torch.Tensor
    values: torch.Tensor
    most: int


class RowsExchange(Exchange):
    """The exchange of a bucket by rows. `bring` replaces `run`."""

    most = 0  # of the last step

    def __post_init__(self) -> None:
        super().__post_init__()
        self._payload, self._received, self._wide = Scratch(), Scratch(), Scratch()
        self._width = 0

    @property
    def bytes(self) -> int:
        """See `Exchange`; of the last step."""
        return self.most * self._width * self.bucket.buffer.element_size()

    @property
    def sent_bytes(self) -> int:
        """See `Exchange`; of the last step."""
        sent = self._layout(self.most)[-1] if self.most else 0
        return (self.route.outer.size - 1) * sent

    def bring(
        self, given: Rows, view: torch.Tensor, step: Step, before: Callable[[], None]
    ) -> None:
        """Add to `view` [n, width] what all ranks bring, scaled as a reduction is.

        `before()` waits, on the current stream, for what must be in `view` first.
        """
        self.most, self._width = given.most, view.shape[1]
        scaling = self.route.scaling
        factor = scaling.pack * scaling.outer
        with self.timer.around(view, step.timed):
            received = self._gather(given, factor)
            before()
            for part in received:
                places = part[: 4 * self.most].view(torch.int32)
                view.index_add_(0, places, self._decoded(part, view.dtype, factor, scaling.final))
            if step.checked and self.wire.name != "exact":
                self._measure_rows(given, received, factor)
        let_go(given.rows)
        let_go(given.values)

    def _measure_rows(self, given: Rows, received: torch.Tensor, factor: float) -> None:
        """For the guard: what came against what it would be exactly, over the rows of all ranks."""
        n, size = given.rows.numel(), self.route.outer.size
        exact = given.values.new_zeros(given.most, self._width, dtype=torch.float32)
        exact[:n] = given.values * factor
        everyone = exact.new_empty(size * exact.numel())
        self.route.outer.all_gather(everyone, exact.view(-1))
        sums = exact.new_zeros(5, dtype=torch.float64)  # see `Exchange.measured`
        for part, dense in zip(received, everyone.view(size, -1), strict=True):
            # As `_decoded` gives them, without the last scaling.
            result = self._decoded(part, torch.float32, factor, 1.0).view(-1).double()
            dense = dense.double()
            sums[2] += (result * dense).sum()
            sums[3] += result.square().sum()
            sums[4] += dense.square().sum()
        sums[1] = exact.double().square().sum()
        self.measured = sums

    def _layout(self, most: int) -> tuple[int, int]:
        """Bytes to the end of the row numbers, and of the values."""
        numbers = padded(4 * most, 16)
        values = self.wire.rows_bytes(most * self._width, self.bucket.buffer.dtype)
        return numbers, numbers + values

    def _gather(self, given: Rows, factor: float) -> torch.Tensor:
        """uint8 [ranks, bytes], valid until the next bucket."""
        outer, n = self.route.outer, given.rows.numel()
        numbers, size = self._layout(given.most)
        device = given.values.device
        payload = self._payload.get(size, torch.uint8, device)
        received = self._received.get(size * outer.size, torch.uint8, device)
        places = payload[: 4 * given.most].view(torch.int32)
        places[:n].copy_(given.rows)
        places[n:].zero_()  # zeros are added to row 0
        key = int8.key(self.state.steps, self.bucket.index, outer.rank)
        self.wire.rows_write(given.values.reshape(-1), factor, payload[numbers:], key)
        outer.all_gather(received, payload)
        if self.wire.name != "exact":
            self.state.steps += 1
        return received.view(outer.size, size)

    def _decoded(
        self, part: torch.Tensor, dtype: torch.dtype, factor: float, final: float
    ) -> torch.Tensor:
        """One rank's values [most, width]."""
        numbers, end = self._layout(self.most)
        wide = self._wide.get(self.most * self._width, torch.float32, part.device)
        values = self.wire.rows_read(part[numbers:end], factor, final, wide, dtype)
        return values.view(self.most, -1).to(dtype)


def merged(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of several lookups, each once, and their sums.

    As many as came in: what is left over is row 0 with zeros. So the host need not wait for the
    device to know how many rows there are, which at the end of backward is the whole backward.
    """
    if len(found) == 1:
        return found[0]
    rows = torch.cat([rows for rows, _ in found])
    values = torch.cat([values for _, values in found])
    ordered, order = rows.sort()
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    place = first.cumsum(0) - 1
    inverse = torch.empty_like(place).scatter_(0, order, place)
    once = torch.zeros_like(rows).scatter_(0, place, ordered)
    return once, torch.zeros_like(values).index_add_(0, inverse, values)
