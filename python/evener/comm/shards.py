"""Reduce-scatter of gradients in a form: FSDP2's `ReduceScatter`, with one rounding per sender.

    flat gradients of a unit, [world, n]: a row for each rank's shard
    nodes of several ranks:  rows of the same place in their node are summed in the node first, in
                             the gradients' own dtype; what is left is [nodes, n], per rank
    between nodes:           each row in the form to the rank whose shard it is, in one all-to-all;
                             added there in float32, the own row unrounded

So an entry is rounded once for each node, whatever the number of nodes; a ring would round it at
every hop. Norms and biases go as they are, in the same message: their places are zero in what is
coded.

INT8 and BF16 keep nothing: INT8 rounds at random and right on the mean, BF16 to eight bits. INT4
rounds to the nearest and keeps at the sender what rounding took away, for the next step (error
feedback; Karimireddy et al., arXiv 1901.09847). That is a number for each gradient that the rank
sends: [nodes - 1, n], in bf16, because a tenth of a per cent of a rounding error is none. A unit
that falls back to a milder form hands it on. A row that is not finite leaves it as it was: such a
step is skipped, and the rest of its gradients must not come with the next one. Weights that are
loaded drop it: it belongs to a training that goes on no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from evener.base import torch_names
from evener.comm import wires
from evener.comm.buckets import padded
from evener.comm.codecs import int8
from evener.comm.codecs import rows as row_parts
from evener.comm.groups import Communicators
from evener.comm.mirrors import order
from evener.comm.replicas import Unit
from evener.comm.wires import Wire
from evener.comm.wires.blocks import BlockWire
from evener.errors import UsageError

logger = logging.getLogger("evener.fsdp")

FORMS = ("exact", "bf16", "int8", "int4")


class Way:
    """Where messages of all units go between nodes: on two streams in turn.

    So the next one is on its way to host memory while the last one is in the network. At most two
    are on their way: what computes must not run further ahead, or all of them lie in memory.
    """

    def __init__(self, communicators: Communicators) -> None:
        self.outer = communicators.route.outer
        on_gpu = communicators.device.type == "cuda"
        device = communicators.device
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if on_gpu else []
        self._events: list[Any] = [None, None]
        self._turn = 0

    def wait(self) -> None:
        """The current stream waits until one may follow."""
        if (event := self._events[self._turn]) is not None:
            torch.cuda.current_stream().wait_event(event)

    def all_to_all(self, sent: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What came, [nodes, bytes] as `sent`, and the event after which it is there."""
        if not self._streams:
            got = torch.empty_like(sent)
            self.outer.all_to_all(got.view(-1), sent.view(-1))
            return got, None
        stream = self._streams[self._turn]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = torch.empty_like(sent)
            self.outer.all_to_all(got.view(-1), sent.view(-1))
            event = self._events[self._turn] = stream.record_event()
        sent.record_stream(stream)
        self._turn = 1 - self._turn
        return got, event


@dataclass(frozen=True)
class _Layout:
    """What a message is made of: codes, and behind them the entries at the places `small`.

    `others`: nodes to which it goes; `bytes`: how long it is. The same in each step.
    """

    code: _Blocks | _Cast
    others: list[int]
    bytes: int
    small: torch.Tensor


@dataclass
class _Flight:
    """What is on its way for this rank's shard: [nodes, bytes], and its own part of the sum."""

    layout: _Layout
    got: torch.Tensor
    there: Any
    own: torch.Tensor


class FormedReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP2 unit; give it to `FSDPModule.set_custom_reduce_scatter`.

    And `finish` to `set_all_reduce_hook`, which runs on the stream behind: so FSDP2's next unit
    waits until gradients are coded, and not until they have arrived.

    `form`: one of `FORMS`, from the next step on; "exact" is the collective library's sum. Call
    `set_force_sum_reduction_for_comms(True)` on the module: then every sum is a plain one, and
    FSDP2 divides. `checked`: measure what the guard judges, in the next call.
    """

    def __init__(
        self, unit: Unit, form: str, communicators: Communicators, way: Way, group: Any
    ) -> None:
        """`group`: FSDP2's parameter group. `way`: the model's."""
        self.unit, self.communicators, self.way, self.group = unit, communicators, way, group
        self._flight: _Flight | None = None
        self._layouts: dict[tuple[str, int, torch.dtype], _Layout] = {}
        self.form = form
        route = communicators.route
        self.nodes, self.node = route.outer.size, route.outer.rank
        self.residual: torch.Tensor | None = None  # [nodes - 1, n] bf16
        # New loss scale over the one that the residual is in, where a scaler says so.
        self.rescale: float | torch.Tensor = 1.0
        self.checked = False
        self.measured: torch.Tensor | None = None
        self._calls, self._odd = 0, False
        self._taken_over = False  # and not sent since
        places = order(communicators)
        # Ranks as [local, node], where that is another order than their own.
        self._order: torch.Tensor | None = None
        if places != sorted(places):
            by_place = sorted(range(len(places)), key=places.__getitem__)
            self._order = torch.tensor(by_place, device=communicators.device)

    # What `guard.judge` asks of an exchange.

    @property
    def bucket(self) -> Any:
        """The unit's place and size."""
        return self.unit.bucket

    @property
    def wire(self) -> type[Wire]:
        """The form."""
        return wires.get(self.form)

    @property
    def title(self) -> str:
        """For logs."""
        return self.unit.name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's buffers: [world * n] of what goes in, [n] of what comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`output_tensor` [n] = the sum over ranks of row `rank` of `input_tensor` [world * n].

        After `finish`. On the current stream. What is not finite arrives as NaN. Raises UsageError
        where `op` is another one.
        """
        if op != dist.ReduceOp.SUM:
            raise UsageError(
                f"FSDP2 asks for a reduce-scatter by {op}",
                "call set_force_sum_reduction_for_comms(True) on each FSDPModule",
            )
        whole = output_tensor.numel() == self.unit.numel
        if not whole and not self._odd:
            self._odd = True
            logger.info(
                "%s: %d of %d gradient entries came, so some of its parameters were not used; "
                "such a step is sent exact",
                self.unit.name,
                output_tensor.numel(),
                self.unit.numel,
            )
        form = wires.suitable(self.form, self.unit.bucket) if whole else "exact"
        if form == "exact" and (self.residual is None or not whole):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
            return None
        self.way.wait()
        rows = self._in_node(input_tensor)
        factor, self.rescale = self.rescale, 1.0
        if self.residual is not None and not (isinstance(factor, float) and factor == 1.0):
            self.residual.mul_(factor.to(rows.device) if torch.is_tensor(factor) else factor)
        self._calls += 1
        self._send(rows, form)
        return None

    def _in_node(self, flat: torch.Tensor) -> torch.Tensor:
        """[nodes, n]: what this node adds to the shards of its place. A copy or a view."""
        route = self.communicators.route
        rows = flat.view(self.communicators.size, -1)
        if route.scatter is None:
            return rows
        if self._order is not None:
            rows = rows.index_select(0, self._order)
        found = torch.empty(self.nodes, rows.shape[1], dtype=rows.dtype, device=rows.device)
        dist.reduce_scatter_tensor(
            found.view(-1), rows.contiguous().view(-1), group=route.scatter.handle
        )
        return found

    def _send(self, rows: torch.Tensor, form: str) -> None:
        """Send each node its row; what is for this one is then on its way. Overwrites `rows`."""
        self._taken_over = False
        lay = self._layout(form, rows)
        code, start = lay.code, lay.code.size
        sent = torch.empty(self.nodes, lay.bytes, dtype=torch.uint8, device=rows.device)
        if self.unit.small:
            row_parts.take(rows, self.node, lay.small, sent, start)
        feeds = self.residual is not None or form == "int4"
        figures = []
        for at, node in enumerate(lay.others):
            row, message = rows[node], sent[node]
            kept = self._kept(rows)[at] if feeds else None
            left = None
            if kept is not None:
                # The guard is told what rounding took away before it is rounded once more.
                left = torch.empty_like(kept, dtype=torch.float32 if self.checked else None)
            key = int8.key(self._calls, self.unit.index, self.communicators.rank, node)
            code.write(row, kept, left, message, key)
            if self.checked:
                figures.append(_figures(row, left, code, message))
        if form in ("exact", "bf16"):
            self.residual = None  # it has been sent
        if figures:
            self.measured, self.checked = torch.stack(figures).sum(0), False
        got, there = self.way.all_to_all(sent)
        # Not a copy: the node's own row is as it came, and `finish` tells the allocator of it.
        self._flight = _Flight(lay, got, there, rows[self.node])

    def _layout(self, form: str, rows: torch.Tensor) -> _Layout:
        """Kept, because it takes the host longer to find out than to launch what it is for."""
        kind = form, rows.shape[1], rows.dtype
        lay = self._layouts.get(kind)
        if lay is None:
            code = _code(form, rows.shape[1])
            places = [torch.arange(p.offset, p.offset + p.numel) for p in self.unit.small]
            small = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
            norms = small.numel() * rows.element_size()
            others = [node for node in range(self.nodes) if node != self.node]
            size = code.size + padded(norms, 16)
            lay = self._layouts[kind] = _Layout(code, others, size, small.to(rows.device))
        return lay

    def finish(self, output: torch.Tensor) -> None:
        """`output` [n] <- the sum that the last call began, if it did, on the current stream."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        own, got, lay = flight.own, flight.got, flight.layout
        if flight.there is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(flight.there)
            for tensor in (got, own, output):
                tensor.record_stream(stream)
        # By views: a list of places would have the host wait for the device.
        parts = [part for part in (got[: self.node], got[self.node + 1 :]) if len(part)]
        came = parts[0] if len(parts) == 1 else torch.cat(parts)
        lay.code.add_up(came, output, own)
        if self.unit.small:
            row_parts.give(came, lay.code.size, lay.small, own, output)

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        """The residual, [nodes - 1, n]; zeros at first."""
        if self.residual is None:
            shape = (self.nodes - 1, rows.shape[1])
            self.residual = torch.zeros(shape, dtype=torch.bfloat16, device=rows.device)
        return self.residual

    # --- checkpoints ---

    def will_load(self) -> None:
        """Weights are loaded into the unit: what is kept is of others, unless it was loaded too."""
        if not self._taken_over:
            self.forget()

    def forget(self) -> None:
        """Nothing is kept. No rank need do so with another: zeros are sent all the same."""
        if self.residual is not None:
            self.residual.zero_()

    def divisor(self) -> float:
        """By what FSDP2 divides the sum."""
        dtype = self.unit.bucket.buffer.dtype
        return torch_names.fsdp_divides_after(self.group, dtype, self.communicators.size)

    def owed(self) -> torch.Tensor:
        """What all nodes have not sent yet of this rank's shard: [n] float32. Collective."""
        n, device = self.unit.numel, self.communicators.device
        parts = torch.zeros(self.nodes, n, dtype=torch.float32, device=device)
        if self.residual is not None:
            parts[[node for node in range(self.nodes) if node != self.node]] = self.residual.float()
        got = torch.empty_like(parts)
        self.communicators.route.outer.all_to_all(got.view(-1), parts.view(-1))
        return got.sum(0)

    def take_over(self, owed: torch.Tensor) -> None:
        """Have the other nodes owe this rank's shard `owed` [n], in equal parts. Collective."""
        share = owed.float() / (self.nodes - 1)
        every = torch.empty(self.nodes * share.numel(), dtype=share.dtype, device=share.device)
        self.communicators.route.outer.all_gather(every, share)
        others = [node for node in range(self.nodes) if node != self.node]
        self.residual = every.view(self.nodes, -1)[others].to(torch.bfloat16)
        self._taken_over = True


class _Blocks:
    """Rows as small integers in blocks (`wires.blocks`)."""

    def __init__(self, wire: type[BlockWire], n: int) -> None:
        self.wire, self.room = wire, wire.room(n)
        self.size = wire.size(self.room)
        codes = self.room * wire.bits // 8
        self.codes, self.scales = slice(codes), slice(codes, codes + 4 * self.room // wire.block)

    def write(
        self,
        row: torch.Tensor,
        kept: torch.Tensor | None,
        left: torch.Tensor | None,
        message: torch.Tensor,
        key: int,
    ) -> None:
        """`row` and what was `kept` [n] into bytes; `left` <- what rounding takes away.

        It is `kept` then, unless something is not finite.
        """
        scales = message[self.scales].view(torch.float32)
        self.wire.quantize(row, kept, message[self.codes], scales, key, left)
        if kept is not None and left is not None:
            row_parts.keep(left, scales, kept)

    def add_up(
        self, came: torch.Tensor, total: torch.Tensor, own: torch.Tensor | None = None
    ) -> None:
        """`total` [n] = the sum of what messages [ranks, bytes] say, and of `own`, in float32."""
        self.wire.add_up(*self.wire.views(came, self.room), 1.0, total, own)


class _Cast:
    """Rows in a floating dtype."""

    def __init__(self, dtype: torch.dtype, n: int) -> None:
        self.dtype, self.bytes = dtype, n * dtype.itemsize
        self.size = padded(self.bytes, 16)

    def write(
        self,
        row: torch.Tensor,
        kept: torch.Tensor | None,
        left: torch.Tensor | None,
        message: torch.Tensor,
        key: int,
    ) -> None:
        """See `_Blocks`; all of what was kept goes."""
        del key
        values = row if kept is None else row + kept.float()
        message[: self.bytes].view(self.dtype).copy_(values)
        if left is not None:
            left.zero_()

    def add_up(
        self, came: torch.Tensor, total: torch.Tensor, own: torch.Tensor | None = None
    ) -> None:
        """See `_Blocks`."""
        found = torch.zeros(total.numel(), dtype=torch.float32, device=total.device)
        for message in came:
            found += message[: self.bytes].view(self.dtype)
        total.copy_(found if own is None else found.add_(own))


def _code(form: str, n: int) -> _Blocks | _Cast:
    wire = wires.get(form)
    if issubclass(wire, BlockWire):
        return _Blocks(wire, n)
    return _Cast(wire.cast or torch.float32, n)


def _figures(
    row: torch.Tensor, left: torch.Tensor | None, code: _Blocks | _Cast, message: torch.Tensor
) -> torch.Tensor:
    """What the guard compares (`Figures.of`), as the sender sees it: nothing more is exchanged."""
    result = torch.empty(row.numel(), dtype=torch.float32, device=row.device)
    code.add_up(message.unsqueeze(0), result)
    dense, result = row.double(), result.double()
    owed = dense.new_zeros(()) if left is None else left.double().square().sum()
    gradient = dense.square().sum()
    return torch.stack([owed, gradient, result.dot(dense), result.square().sum(), gradient])
