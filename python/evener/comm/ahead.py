"""FSDP2's all-gathers from mirrors, which are refreshed ahead of them: `AllGather`, exact.

A rank knows how much it will send when its GPU has compared, and what it receives when all have
announced. FSDP2's thread must not wait for that: behind it the next layer's kernels would wait too.
So all refreshes of a model run in one thread (`Lane`), on streams and communicators of their own.

    a forward pass of the root begins:  all units are refreshed, in order; while messages are on
                                        their way, the next units are compared: one, one, two, four
    a gather in that pass:              copies the mirror, once its unit is fresh
    a gather in a backward pass:        copies the mirror: nothing is asked
    any other gather:                   refreshes its unit first

Which of these a gather is follows from what all ranks do alike, never from what one rank sees: or
they would wait for each other. And nobody has to know when weights change. A copy is held against
what was announced, on the GPU, and the next comparison tells all ranks where they differ; weights
that change between a forward pass and its backward pass, which no training does, end it so.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from evener.base import torch_names
from evener.comm.mirrors import Found, Mirror, Traffic, announce

# Units that are compared together, at most: few at first, while nothing else is on its way. And the
# bytes of shards beyond which no further unit joins them: copies lie on the GPU until they land.
_RAMP, _TOGETHER = (1, 1, 2, 4), 128 << 20


@dataclass
class _Refresh:
    """One unit to be refreshed. `own`: gives this rank's weights [n], on the current stream."""

    gather: MirroredGather
    own: Callable[[], torch.Tensor]
    done: Future[Any] = field(default_factory=Future)
    after: list[Any] = field(default_factory=list)  # events of who still reads the mirror


_Batch = tuple[Sequence[_Refresh], Any]
_Batches = queue.SimpleQueue["_Batch | None"]


class Lane:
    """The thread and streams of a model's refreshes: in the same order on all of its ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        # To code, to send, to decode (and keep), to copy into FSDP2's buffers.
        self.codes, self.net, self.lands, self.late = (
            torch.cuda.Stream(device, priority=-1) if on_gpu else None for _ in range(4)
        )
        self._batches: _Batches = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="evener gathers", daemon=True)
        self._thread.start()
        # Python ends under a thread that is still in torch's code by ending the process, aborted.
        self._end = weakref.finalize(self, _stop, self._batches, self._thread)

    def submit(self, batch: Sequence[_Refresh]) -> None:
        """Refresh these units after what is on the current stream, and after those before them."""
        for each in batch:
            each.gather.settle()
            each.gather.fresh = each.done
            each.after, each.gather.reading = each.gather.reading, []
        ready = None if self.codes is None else torch.cuda.current_stream().record_event()
        self._batches.put((batch, ready))

    def close(self) -> None:
        """End the thread behind its last refresh."""
        self._end.detach()
        _stop(self._batches, self._thread, None)

    def _serve(self) -> None:
        if self.codes is not None:
            torch.cuda.set_device(self.device)
        while (taken := self._batches.get()) is not None:
            batch, ready = taken
            try:
                with torch.no_grad(), torch.cuda.stream(self.codes):
                    if self.codes is not None:
                        self.codes.wait_event(ready)
                    self._refresh(batch)
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(error)
            del taken, batch  # its tensors are as large as the unit

    def _refresh(self, batch: Sequence[_Refresh]) -> None:
        waiting, flying = deque(batch), deque[tuple[_Refresh, Found, Any]]()
        ramp = itertools.chain(_RAMP, itertools.repeat(_RAMP[-1]))
        while waiting:
            most = next(ramp)
            looked: list[tuple[_Refresh, Found]] = []
            size = 0
            # Equal on all ranks, as shards are.
            while waiting and len(looked) < most and size < _TOGETHER:
                each = waiting.popleft()
                for event in (*each.after, *each.gather.last()):
                    torch.cuda.current_stream().wait_event(event)
                found = each.gather.mirror.look(each.own())
                size += found.own.nbytes
                looked.append((each, found))
                if flying:
                    self._land(*flying.popleft())
            while flying:
                self._land(*flying.popleft())
            announce([(each.gather.mirror, found) for each, found in looked])
            for each, found in looked:
                mirror, sent = each.gather.mirror, None
                if not found.unchanged:
                    sent = self._send(mirror, found, mirror.write(found))
                flying.append((each, found, sent))
        while flying:
            self._land(*flying.popleft())

    def _send(self, mirror: Mirror, found: Found, payload: torch.Tensor) -> Any:
        """The message goes beside what is coded and decoded meanwhile. Returns what holds it."""
        if self.net is None or self.codes is None:
            mirror.send(found, payload)
            return payload, None
        self.net.wait_stream(self.codes)
        payload.record_stream(self.net)
        with torch.cuda.stream(self.net):
            mirror.send(found, payload)
            return payload, self.net.record_event()

    def _land(self, each: _Refresh, found: Found, sent: Any) -> None:
        mirror = each.gather.mirror
        if self.lands is None:
            if sent is not None:
                mirror.apply(found)
            each.done.set_result(None)
            return
        # On a stream of its own: what is coded next must not wait for what is in the network.
        if sent is not None:
            self.lands.wait_event(sent[1])
            with torch.cuda.stream(self.lands):
                mirror.apply(found)
            found.own.record_stream(self.lands)
            if found.stated is not None:
                found.stated.record_stream(self.lands)
            for row in (found.rows or [])[:1]:  # one buffer
                row.record_stream(self.lands)
            each.gather.landed = self.lands.record_event()
        else:
            each.gather.landed = torch.cuda.current_stream().record_event()
        each.done.set_result(each.gather.landed)


def _stop(batches: _Batches, thread: threading.Thread, seconds: float | None = 10.0) -> None:
    """End a lane's thread behind its last batch; `seconds`: no longer, for a peer may be gone."""
    batches.put(None)
    thread.join(seconds)


class Ahead:
    """All gathers of one model. A door calls `begins` and `ended` around the root's forward."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.gathers: list[MirroredGather] = []
        self.inside = False
        self._began = False

    def begins(self) -> None:
        """The root's forward begins: refresh all units of which the shards can be seen."""
        # Before FSDP2's first forward its shards are not what they will be.
        batch = [
            _Refresh(gather, own)
            for gather in self.gathers
            if self._began and gather.on and (own := torch_names.fsdp_own(gather.unit)) is not None
        ]
        known = {id(each.gather) for each in batch}
        for gather in self.gathers:
            gather.ahead = id(gather) in known
        self.inside = self._began = True
        if batch:
            self.lane.submit(batch)

    def ended(self) -> None:
        """It has ended, in whatever way."""
        self.inside = False


class MirroredGather(AllGather):
    """The all-gather of one FSDP2 unit; give it to `FSDPModule.set_custom_all_gather`.

    `unit`: FSDP2's parameter group. `group`: the ranks over which it is sharded; a gather of other
    ranks is left as it is. `on`: False leaves all to the collective library.

    Waiting for a gather raises CommError, on every rank, where a mirror did not match before it,
    and torch's RuntimeError where memory ends.
    """

    def __init__(self, unit: Any, group: dist.ProcessGroup, mirror: Mirror, of: Ahead) -> None:
        self.unit, self.group, self.mirror, self.of = unit, group, mirror, of
        self.on = True
        self.ahead = False
        self.fresh: Future[Any] | None = None
        self.reading: list[Any] = []
        self.landed: Any = None
        self._late: weakref.ref[_Late] | None = None
        of.gathers.append(self)

    @property
    def traffic(self) -> Traffic:
        """What the whole model has sent."""
        return self.mirror.traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's staging buffer, [world * n]."""
        return torch.empty(*size, dtype=dtype, device=device)

    def last(self) -> list[Any]:
        """The event of its last refresh, on a GPU."""
        return [] if self.landed is None else [self.landed]

    def settle(self) -> None:
        """Let a gather that nobody has waited for have the weights of its time."""
        late = None if self._late is None else self._late()
        if late is not None:
            late.copy()
        self._late = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` [n] of all ranks into `output_tensor` [world * n], in rank order.

        May return before it is done. `input_tensor` may be this rank's part of the output.
        """
        if not self.on or group.group_name != self.group.group_name:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return None
        self.traffic.gathers += 1
        self.traffic.plain += (group.size() - 1) * input_tensor.nbytes
        state = torch_names.fsdp_training_state(self.unit)
        forward = state == "FORWARD" and self.of.inside and self.ahead
        if self.fresh is None or not (forward or state == "PRE_BACKWARD"):
            own = input_tensor
            self.of.lane.submit([_Refresh(self, lambda: own)])
        assert self.fresh is not None
        late = _Late(self, output_tensor, input_tensor, self.fresh)
        if self.fresh.done() and self.fresh.exception() is None:
            late.wait()
            return None
        self._late = weakref.ref(late)
        return late


class _Late(dist.Work):
    """What FSDP2 waits for before it uses the weights; raises what the refresh raised."""

    def __init__(
        self, gather: MirroredGather, output: torch.Tensor, own: torch.Tensor, fresh: Future[Any]
    ) -> None:
        super().__init__()
        self._of: tuple[MirroredGather, torch.Tensor, torch.Tensor] | None = (gather, output, own)
        self._fresh, self._lane = fresh, gather.of.lane
        self._called: Any = None
        self._copied: Any = None
        if self._lane.late is not None:
            self._called = torch.cuda.current_stream().record_event()

    def copy(self) -> None:
        """Enqueue it, after both the call and the refresh; the host waits until that one is."""
        if self._of is None:
            return
        event = self._fresh.result()
        (gather, output, own), self._of = self._of, None
        if self._lane.late is None:
            gather.mirror.copy(output, own)
            return
        stream = self._lane.late
        stream.wait_event(self._called)
        stream.wait_event(event)
        with torch.no_grad(), torch.cuda.stream(stream):
            gather.mirror.copy(output, own)
            self._copied = stream.record_event()
        gather.reading.append(self._copied)

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits for the gather, and the host until it is enqueued."""
        self.copy()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        return True
