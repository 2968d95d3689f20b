"""Weights come to the accelerator shortly before their unit runs and leave after it.

The order in which a pass enters units is recorded; the next pass of its kind asks for the weights
of `depth` units ahead. A thread brings chunks in the order in which they were asked for, so that
waiting for a chunk's optimizer step, copying and gathering never hold up the training loop, except
where it needs the chunk now. A pass that goes another way loads what it needs when it needs it, and
its order is the one to expect next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from evener.errors import EvenerError
from evener.zero import exits
from evener.zero.chunk import Chunk
from evener.zero.device import Device, Event
from evener.zero.ranks import Ranks
from evener.zero.spans import Spans


class Loading:
    """See the head of this file. `units`: each one's chunks; of the training thread but for
    `_loader`. `late`: raises where a unit must not be entered any more, for a chunk of it."""

    def __init__(
        self,
        units: list[list[Chunk]],
        device: Device,
        ranks: Ranks,
        spans: Spans,
        *,
        depth: int,
        stale_updates: bool,
        late: Callable[[Chunk], None] = lambda _: None,
    ) -> None:
        self._units = units
        self._always = list(units[0])
        self._device = device
        self._ranks = ranks
        self._spans = spans
        self.depth = depth
        self.order = 0
        """A number for the chunks asked for; ranks that gather weights must have the same."""
        self._stale_updates = stale_updates
        self._late = late
        self._traces: dict[bool, list[int]] = {True: [], False: []}
        self._training = True
        """The kind of this pass: evaluation has an order of its own."""
        self._recording: list[int] = []
        self._place = 0
        self._freed: list[tuple[int, int, Event]] = []
        self._freed_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loader, name="evener-load", daemon=True)
        self._thread.start()
        exits.opened(self)

    @property
    def _trace(self) -> list[int]:
        """The units in the order in which the last pass of this kind entered them."""
        return self._traces[self._training]

    def begin(self) -> None:
        """Before a forward pass."""
        self._place = 0
        self._recording = []
        self._training = torch.is_grad_enabled()
        self._renew()
        for chunk in self._always:
            self._acquire(chunk)

    def _renew(self) -> None:
        """Ask for the new weights of what stays here. Several ranks do it in one order: a rank may
        leave out what others run."""
        if self._ranks.world == 1:
            return
        for chunks in self._units:
            for chunk in chunks:
                if chunk.keeps:
                    self._request(chunk)

    def enter(self, unit: int) -> None:
        """Before a unit runs, forward or backward: its weights are there, the next ones asked
        for."""
        place = self._place
        self._place += 1
        self._recording.append(unit)
        if place >= len(self._trace) or self._trace[place] != unit:
            self._traces[self._training] = []  # another order: no guess, and learn it anew
        for chunk in self._units[unit]:
            self._late(chunk)
            self._request(chunk)
        for index in self._trace[place + 1 : place + 1 + self.depth]:
            for chunk in self._units[index]:
                if not chunk.ahead:
                    self._request(chunk)
        for chunk in self._units[unit]:
            self._acquire(chunk)

    def leave(self, unit: int) -> None:
        """After it ran: its weights go, unless they are needed again soon."""
        if unit not in self._trace[self._place : self._place + self.depth]:
            for chunk in self._units[unit]:
                self._free(chunk)

    def keep(self, chunk: Chunk) -> None:
        """This chunk's weights stay from now on, also where its states leave the accelerator later;
        between two passes."""
        if not chunk.stays:
            self._acquire(chunk)
            chunk.keeps = chunk.stays = True
            self._always.append(chunk)

    def end(self) -> None:
        """After a pass: nothing stays that need not."""
        if self._recording:
            self._traces[self._training] = self._recording
        self._recording = []
        self._training = True
        self._place = len(self._trace)
        for chunks in self._units:
            for chunk in chunks:
                self._free(chunk)

    def ahead(self) -> None:
        """Ask for what the next forward pass needs first."""
        self._renew()
        for index in self._trace[: self.depth]:
            for chunk in self._units[index]:
                self._request(chunk)

    def close(self) -> None:
        """Finish what was asked for, then stop the thread."""
        exits.closed(self)
        self._queue.put(None)
        self._thread.join()

    def _request(self, chunk: Chunk) -> None:
        if chunk.loaded or chunk.requested or (chunk.keeps and not chunk.stale):
            return
        chunk.requested = True
        # A number that tells two orders apart.
        self.order = (self.order * 31 + chunk.index + 1) % 32749
        chunk.ready.clear()
        self._queue.put(chunk)

    def _acquire(self, chunk: Chunk) -> None:
        if chunk.loaded:
            return
        self._request(chunk)
        if chunk.requested:
            with self._spans.host("wait", "training for weights", chunk.group.name):
                chunk.ready.wait()
            chunk.requested = False
            if chunk.error is not None:
                error, chunk.error = chunk.error, None
                if isinstance(error, torch.OutOfMemoryError):
                    raise error  # the pass may be run again, see `boundary`
                fix = "lower the batch or the prefetch depth, or raise the GPU budget"
                if self._ranks.world > 1 and not chunk.keeps:
                    fix = (
                        "at stage 3 all ranks run the same blocks in the same order: where one may "
                        "leave a block out (layerdrop, routing), use stage 2"
                    )
                raise EvenerError(
                    f"chunk {chunk.group.name} could not be brought to {self._device.device}: "
                    f"{error}",
                    fix,
                ) from error
            assert chunk.load_event is not None
            self._device.wait("compute", chunk.load_event)
        chunk.bind()
        chunk.loaded, chunk.stale = True, False

    def _free(self, chunk: Chunk) -> None:
        if chunk.requested:
            try:
                self._acquire(chunk)
            except torch.OutOfMemoryError:
                return  # it did not come, and is not needed
        if chunk.keeps or not chunk.loaded:
            return
        # What is loaded next may get this memory, and must come after what still computes with it.
        # Only that: a wait here would also hold up copies that were asked for before.
        place = chunk.flat.data_ptr()
        with self._freed_lock:
            entry = (place, place + chunk.bytes, self._device.record("compute"))
            self._freed = [*(e for e in self._freed if not e[2].query()), entry]
        chunk.unbind()
        chunk.empty()
        self._device.reading("compute", "h2d")
        self._device.book(-chunk.bytes)
        chunk.loaded = False

    def _loader(self) -> None:
        self._device.attach()
        while (chunk := self._queue.get()) is not None:
            self._load(chunk)

    def _load(self, chunk: Chunk) -> None:
        device = self._device
        try:
            if not self._stale_updates:
                with self._spans.host("wait", "loader for the optimizer", chunk.group.name):
                    chunk.updated.wait()
                if chunk.updated_event is not None:
                    device.wait("h2d", chunk.updated_event)
            with torch.no_grad(), device.on("h2d"):
                if not chunk.keeps:
                    self._device.book(chunk.bytes)
                    chunk.allocate()
                    self._reuse(chunk)
                weights = chunk.states.weights
                begin = self._ranks.rank * weights.numel()
                mine = chunk.flat[begin : begin + weights.numel()]
                with self._spans.device("copy", "h2d", chunk.group.name):
                    mine.copy_(weights, non_blocking=True)
                if self._ranks.world > 1:
                    with self._spans.device("communication", "h2d", f"gather {chunk.group.name}"):
                        self._ranks.gather(chunk.flat, mine)
                chunk.load_event = device.record("h2d")
        except BaseException as error:  # noqa: BLE001  # raised again where the chunk is needed
            chunk.error = error
        chunk.ready.set()

    def _reuse(self, chunk: Chunk) -> None:
        """The copy into a chunk's new memory waits for those who computed in it before."""
        begin = chunk.flat.data_ptr()
        with self._freed_lock:
            before = [e for e in self._freed if e[0] < begin + chunk.bytes and begin < e[1]]
        for _, _, event in before:
            self._device.wait("h2d", event)
