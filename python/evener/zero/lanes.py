"""The optimizer beside the next forward pass: two lanes that take slices from one queue.

The host lane updates a slice with the cores. The streaming lane brings a slice's states to the
accelerator, updates them there and brings them back: it uses PCIe and what host memory can give
beyond what the cores reach. Whichever lane is free takes the next slice, in the order of the next
forward pass, so the work is shared by what each lane reaches at this moment, with no ratio to set.
The bits do not depend on who took a slice: the kernels do the same operations, and random bits
depend on an element's index alone. What has its states on the SSD is the host lane's: it takes such
a chunk block by block, while the next ones come and the last ones go home (`ssd.Ring`).

A rule that takes whole matrices is the streaming lane's alone, so it is there for them also where
nothing else streams: a slice is then a matrix, and slots have room for the largest. What such a
matrix has on the SSD is read and written by that lane, between its copies. Of several ranks each
has a part of every matrix: then a job is one piece of work, whose parts pass through the slots
twice, before and after what ranks exchange (`matrices`). A lane that fails there leaves the other
ranks waiting, so no later job is begun: the others' collectives end by the group's timeout.

# Who may touch what
A slice belongs to the lane that took it. A chunk's `updated` is set when its last slice is done, or
(streamed) on its way: then `updated_event` ends it on the accelerator, and who copies the weights
makes its stream wait for that. The streaming lane's slots are reused when the event that brought
their last slice home has passed.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from evener.base import optimizers as _optimizers
from evener.zero import exits
from evener.zero.chunk import Chunk, Run
from evener.zero.device import Device, Event
from evener.zero.matrices import GRADIENT, MOMENTUM, Shared, sliced
from evener.zero.ranks import Ranks
from evener.zero.slots import SLOTS
from evener.zero.spans import Spans
from evener.zero.ssd import BUFFERS, Ring, Ssd
from evener.zero.states import BLOCK, SLICE, Noise, States, part, stride
from evener.zero.states import of as states_named


@dataclass
class Update:
    """An optimizer step of one chunk: of the `runs` in this rank's share; `moving`: the places of
    all that move, on any rank."""

    chunk: Chunk
    hyper: dict[str, Any]
    scale: float
    runs: list[Run]
    moving: Set[int] = frozenset()
    done: Callable[[Chunk], None] = lambda _: None
    """Called when the chunk is updated, or (streamed) that is on its way."""


@dataclass
class _Slice:
    """`runs`: what is updated; one, unless `block` is the number of a block on the SSD, or ranks
    share matrices."""

    job: Update
    runs: list[Run]
    block: int | None = None

    @property
    def whole(self) -> bool:
        """A matrix, for the streaming lane alone."""
        return self.job.chunk.group.rule.whole


@dataclass
class _Slot:
    """Room on the accelerator for one slice. `empty`: when its last slice is home."""

    tensors: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    empty: Event | None = None

    def room(
        self, name: str, like: torch.Tensor, numel: int, device: Device, most: int
    ) -> torch.Tensor:
        """Room for `numel` elements of the dtype of `like`; allocated once, for `most`. In the
        stream that fills it: memory that the training loop has freed may still be computed with."""
        key = (name, like.dtype)
        if key not in self.tensors:
            count = most // stride(name)
            with device.on("states in"):
                self.tensors[key] = torch.empty(count, dtype=like.dtype, device=device.device)
        return self.tensors[key][:numel]


def threads_for(cpus: int) -> int:
    """Threads of the host lane: on many CPUs two are left to the training loop and the loader,
    which must be there when the accelerator waits for them."""
    return cpus - 2 if cpus >= 8 else cpus


class Lanes:
    """See the head of this file. `streaming`: whether there is the second lane for all. `largest`:
    elements that matrices bring through a slot at a time; 0: there are none."""

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 0,
        ranks: Ranks | None = None,
        streaming: bool = False,
        largest: int = 0,
        slice_numel: int = SLICE,
        spans: Spans | None = None,
        ssd: Ssd | None = None,
    ) -> None:
        self.device = device
        self._ring = None if ssd is None else Ring(ssd)
        self.threads = threads_for(_optimizers.threads())
        self.streaming = streaming
        self.spans = spans or Spans(device)
        self.done = {"host": 0, "stream": 0}
        """Elements that each lane has updated."""
        self._seed = seed
        self._ranks = ranks or Ranks()
        # Whole blocks: a block of moments has one scale.
        self._slice = max(BLOCK, min(slice_numel, SLICE) // BLOCK * BLOCK)
        self._queue: collections.deque[_Slice] = collections.deque()
        self._state = threading.Condition()
        self._left: dict[int, int] = {}
        self._busy = 0
        self._failed: BaseException | None = None
        self._closed = False
        self._arrived: Event | None = None
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._turn = 0
        self._apart: BaseException | None = None
        """What failed in an update that ranks share: from then on they would exchange for different
        chunks."""
        self._most = max(SLICE if streaming else 0, largest)
        lanes = [self._host_lane, *([self._streaming_lane] if self._most else [])]
        self._threads = [
            threading.Thread(target=lane, name=f"evener{lane.__name__}", daemon=True)
            for lane in lanes
        ]
        for thread in self._threads:
            thread.start()
        exits.opened(self)

    def put(self, jobs: Iterable[Update]) -> None:
        """Begin these updates, in this order. `chunk.updated` must be clear."""
        with self._state:
            for job in jobs:
                slices = self._cut(job)
                self._left[job.chunk.index] = len(slices)
                self._queue.extend(slices)
                if not slices:  # all that moves is in the other ranks' shares
                    job.done(job.chunk)
                    job.chunk.updated.set()
            self._state.notify_all()

    def _cut(self, job: Update) -> list[_Slice]:
        if job.chunk.group.rule.whole:
            if self._ranks.world > 1:  # also where this rank has nothing: all exchange
                return [_Slice(job, job.runs)]
            return [_Slice(job, [run]) for run in job.runs]
        if job.chunk.away is None:
            return [
                _Slice(job, [Run(begin, min(begin + self._slice, run.end), run.step)])
                for run in job.runs
                for begin in range(run.begin, run.end, self._slice)
            ]
        size = job.chunk.away.layout.block
        blocks: dict[int, list[Run]] = {}
        for run in job.runs:
            for block in range(run.begin // size, -(-run.end // size)):
                low, high = max(run.begin, block * size), min(run.end, (block + 1) * size)
                blocks.setdefault(block, []).append(Run(low, high, run.step))
        return [_Slice(job, runs, block) for block, runs in sorted(blocks.items())]

    def wait(self) -> BaseException | None:
        """Until all that was put is done, also on the accelerator and on the SSD. What failed,
        once; but what failed on the SSD, or where ranks exchange, always: states are lost."""
        with self._state:
            self._state.wait_for(
                lambda: not self._queue and not self._busy and not self._unwritten()
            )
        for slot in self._slots:
            if slot.empty is not None:
                slot.empty.synchronize()
        failed, self._failed = self._failed, None
        return failed or self._apart or (self._ring.failed if self._ring else None)

    def _unwritten(self) -> bool:
        return self._ring is not None and self._ring.writing

    @property
    def failed(self) -> bool:
        """Whether an update has failed."""
        lost = self._apart or (self._ring and self._ring.failed)
        return (self._failed or lost) is not None

    def close(self) -> None:
        """Finish what was put, then stop."""
        exits.closed(self)
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()
        self._slots.clear()

    def _next(self, streaming: bool) -> int | None:
        """The place in the queue of what a lane takes next."""
        if not streaming:
            return next((i for i, piece in enumerate(self._queue) if not piece.whole), None)
        found = next((i for i, piece in enumerate(self._queue) if piece.whole), None)
        if found is not None or not self.streaming:
            return found
        return next((i for i, piece in enumerate(self._queue) if piece.block is None), None)

    def _take(self, streaming: bool = False) -> _Slice | None:
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: (
                        self._next(streaming) is not None
                        or self._closed
                        or (not streaming and self._unwritten())
                    )
                )
                place = self._next(streaming)
                if place is not None:
                    self._busy += 1
                    piece = self._queue[place]
                    del self._queue[place]
                    return piece
                if streaming or not self._unwritten():
                    return None
                self._busy += 1
            self._flush()

    def _flush(self) -> None:
        """Nothing else is to do: until the SSD has all."""
        assert self._ring is not None
        try:
            with self.spans.host("wait", "host lane for the SSD", "flush"):
                self._ring.flush()
        except BaseException as error:  # noqa: BLE001  # raised again by the engine's drain()
            self._failed = error
        with self._state:
            self._busy -= 1
            self._state.notify_all()

    def _finish(self, piece: _Slice, lane: str) -> None:
        with self._state:
            self._busy -= 1
            self.done[lane] += sum(run.end - run.begin for run in piece.runs)
            chunk = piece.job.chunk
            self._left[chunk.index] -= 1
            if self._left[chunk.index] == 0:
                piece.job.done(chunk)
                chunk.updated.set()
            self._state.notify_all()

    def _noise(self, chunk: Chunk, begin: int) -> Noise:
        return Noise(self._seed, chunk.index * self._ranks.world + self._ranks.rank, begin)

    def _host_lane(self) -> None:
        self.device.attach()
        while (piece := self._take()) is not None:
            try:
                self._on_ssd(piece) if piece.block is not None else self._on_host(piece)
            except BaseException as error:  # noqa: BLE001  # raised again by the engine's drain()
                self._failed = error
            self._finish(piece, "host")

    def _on_host(self, piece: _Slice) -> None:
        job, chunk = piece.job, piece.job.chunk
        assert chunk.gradient is not None
        if chunk.gradient_event is not None:
            chunk.gradient_event.synchronize()
        chunk.saved.wait()
        for run in piece.runs:
            self._update(job, run, part(chunk.states, run.begin, run.end))

    def _update(self, job: Update, run: Run, states: States) -> None:
        """One run by the cores."""
        chunk = job.chunk
        assert chunk.gradient is not None
        noise = self._noise(chunk, run.begin)
        with self.spans.host("optimizer", "host lane", chunk.group.name):
            chunk.group.rule.on_host(
                states,
                chunk.gradient[run.begin : run.end],
                job.hyper,
                run.step,
                job.scale,
                _optimizers.Run(
                    threads=self.threads, seed=noise.seed, stream=noise.stream, offset=noise.offset
                ),
            )

    def _on_ssd(self, piece: _Slice) -> None:
        job, chunk, ring = piece.job, piece.job.chunk, self._ring
        assert ring is not None and chunk.away is not None and piece.block is not None
        with self._state:
            ahead = [p for p in self._queue if p.block is not None][:BUFFERS]
        wanted = [(p.job.chunk.away, p.block) for p in [piece, *ahead]]
        ring.ahead([(away, block) for away, block in wanted if away and block is not None])
        if chunk.gradient_event is not None:
            chunk.gradient_event.synchronize()
        chunk.saved.wait()
        with self.spans.host("wait", "host lane for the SSD", chunk.group.name):
            held = ring.take(chunk.away, piece.block)
        for run in piece.runs:
            low, high = run.begin - held.begin, run.end - held.begin
            there = {name: tensor[low:high] for name, tensor in held.tensors.items()}
            here = part(chunk.states, run.begin, run.end).tensors()
            self._update(job, run, states_named({**here, **there}))
        ring.give(held)

    def _streaming_lane(self) -> None:
        self.device.attach()
        while True:
            # Before the next slice is taken: it may be the host's until there is room.
            slot = self._free()
            piece = self._take(streaming=True)
            if piece is None:
                return
            try:
                if piece.whole and self._ranks.world > 1:
                    self._shared(piece, slot)
                else:
                    self._through(piece, slot)
            except BaseException as error:  # noqa: BLE001  # raised again by drain()
                self._failed = error
                if piece.job.chunk.away is not None and self._ring is not None:
                    self._ring.failed = self._ring.failed or error  # half is new, half is old
            self._finish(piece, "stream")

    def _free(self) -> _Slot:
        """The next slot, when it is empty."""
        slot = self._slots[self._turn % SLOTS]
        self._turn += 1
        if slot.empty is not None:
            slot.empty.synchronize()
        return slot

    def _through(self, piece: _Slice, slot: _Slot) -> None:
        job, (run,) = piece.job, piece.runs
        rule = job.chunk.group.rule.of_shape(run.shape)

        def update(there: dict[str, torch.Tensor]) -> None:
            gradient, noise = there.pop(GRADIENT), self._noise(job.chunk, run.begin)
            rule.on_device(states_named(there), gradient, job.hyper, run.step, job.scale, noise)

        self._carry(job.chunk, run, slot, {*job.chunk.formats(), GRADIENT}, update)

    def _shared(self, piece: _Slice, slot: _Slot) -> None:
        """Matrices of which each rank has a part."""
        if self._apart is not None:
            raise self._apart
        job, chunk, device = piece.job, piece.job.chunk, self.device
        slots = itertools.chain([slot], iter(self._free, None))
        names = {*chunk.formats()}
        try:
            chunk.saved.wait()
            with device.on("optimizer"):
                shared = Shared(
                    chunk, job.moving, job.hyper, job.scale, self._ranks, self._seed, device.device
                )
            runs = sliced(piece.runs, min(self._slice, self._most))
            for run in runs:
                half = partial(shared.first, run)
                self._carry(chunk, run, next(slots), names & {MOMENTUM} | {GRADIENT}, half)
            said = f"matrices {chunk.group.name}"
            with (
                self.spans.device("communication", "optimizer", said),
                device.on("optimizer"),
            ):
                shared.exchange()
            for run in runs:
                half = partial(shared.last, run)
                self._carry(chunk, run, next(slots), names - {MOMENTUM}, half)
        except BaseException as error:
            self._apart = error
            raise

    @torch.no_grad()
    def _carry(
        self,
        chunk: Chunk,
        run: Run,
        slot: _Slot,
        names: set[str],
        compute: Callable[[dict[str, torch.Tensor]], None],
    ) -> None:
        """Bring what `names` says of a run to the accelerator, `compute` with it, and bring it home
        again, but for the gradient."""
        device = self.device
        assert chunk.gradient is not None
        chunk.saved.wait()
        home = part(chunk.states, run.begin, run.end).tensors()
        home = {each: tensor for each, tensor in home.items() if each in names}
        name = chunk.group.name
        away = [] if chunk.away is None else [each for each in chunk.away.names if each in names]
        if away:
            with self.spans.host("wait", "streaming lane for the SSD", name):
                home |= {each: chunk.read(each, run.begin, run.end) for each in away}
        moving = dict(home)
        if GRADIENT in names:
            moving[GRADIENT] = chunk.gradient[run.begin : run.end]
            if chunk.gradient_event is not None:
                device.wait("states in", chunk.gradient_event)
        most = self._most
        there = {each: slot.room(each, x, x.numel(), device, most) for each, x in moving.items()}
        # A copy engine serves one stream for as long as it has something queued, and weights for
        # the next forward pass come by another: so there is never more than one slice queued, and
        # when that one is through, what waits elsewhere gets its turn.
        if self._arrived is not None:
            self._arrived.synchronize()
        with self.spans.device("copy", "states in", name), device.on("states in"):
            for key, tensor in moving.items():
                if key != "weights" or chunk.states.master is None:
                    there[key].copy_(tensor, non_blocking=True)
            self._arrived = device.record("states in")
        device.wait("optimizer", self._arrived)
        with self.spans.device("optimizer", "optimizer", name), device.on("optimizer"):
            compute(dict(there))
        device.wait("states out", device.record("optimizer"))
        with self.spans.device("copy", "states out", name), device.on("states out"):
            for key, tensor in home.items():
                tensor.copy_(there[key], non_blocking=True)
        slot.empty = chunk.updated_event = device.record("states out")
        if away:
            with self.spans.host("wait", "streaming lane for the SSD", name):
                slot.empty.synchronize()
                for each in away:
                    chunk.write(each, run.begin, home[each])


def measure(lanes: Lanes, jobs: list[Update], repeats: int = 3) -> tuple[float, float]:
    """Parameters/s of these updates by the cores and by the streaming lane: the fastest of some
    repeats after a warm-up."""
    best, share = float("inf"), 0.0
    for number in range(repeats + 1):
        for job in jobs:
            job.chunk.updated.clear()
        before, start = dict(lanes.done), time.perf_counter()
        lanes.put(jobs)
        failed = lanes.wait()
        if failed is not None:
            raise failed
        took = time.perf_counter() - start
        done = {lane: count - before[lane] for lane, count in lanes.done.items()}
        if number and took < best:
            best, share = took, done["stream"] / max(1, sum(done.values()))
    rate = sum(job.chunk.states.weights.numel() for job in jobs) / best
    return rate * (1 - share), rate * share
