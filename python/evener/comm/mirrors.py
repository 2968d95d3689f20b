"""All-gather of sharded weights that sends what changed: FSDP2's `AllGather`, exact.

Between two optimizer steps FSDP2 gathers the same weights again and again: in each forward pass, in
each backward pass, for each micro-batch. And a step moves most bf16 weights by a few units in the
last place. So each rank keeps a *mirror*: what every rank has sent last. An all-gather then is

1. compare: the own shard with the mirror's own row;
2. announce: one number per rank (words of its message, 0 where nothing changed), and a checksum;
3. exchange messages of differences (`codecs.differences`), none where no rank has any;
4. apply them to the mirror's rows, which are then the weights, and check them against the checksum.

Nobody has to know when weights change, so nothing can be missed: an optimizer, a loaded checkpoint
or a hand that writes into a parameter all look the same. Where a message would be no smaller than
the weights, all ranks send them whole, as they do the first time; they see it in the same numbers.

A rank knows how much it will send when its GPU has compared, and what it receives when all have
announced. FSDP2's thread must not wait for that: behind it the next layer's kernels would wait too.
So all gathers of a model run in one thread (`Lane`), in order, on a stream and a communicator of
their own, and FSDP2 gets a `Work` to wait for where it uses the weights.

The mirror lies on the GPU or in pinned host memory, as large as the whole model in the dtype that
is gathered. A weight of 32 bits is not coded: it goes whole where any rank's changed.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from evener.comm.codecs import differences
from evener.comm.errors import CommError

# A message that is not at least this much smaller than the weights is not worth its decoding.
WORTH = 0.8
_WHOLE = -1


@dataclass
class Traffic:
    """What the gathers of a model have moved; bytes are those that this rank received."""

    gathers: int = 0
    unchanged: int = 0
    whole: int = 0
    received: int = 0
    plain: int = 0

    def share(self) -> float:
        """Bytes received of those that plain FSDP2 would have received."""
        return self.received / self.plain if self.plain else 1.0


@dataclass
class _Mirror:
    """What all ranks sent last of one unit: [world, n]."""

    rows: torch.Tensor
    # Counts rows that did not match their checksum, on the device: read at the next gather.
    wrong: torch.Tensor
    filled: bool = False


_Jobs = queue.SimpleQueue["tuple[Callable[[], None], Any, Future[Any]] | None"]
# Communicators that no lane has at present, by the group whose ranks they have. torch names a new
# one by its ranks: made again after it was destroyed, it would read the old one's addresses.
_FREE: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]]
_FREE = weakref.WeakKeyDictionary()


def free(group: dist.ProcessGroup) -> int:
    """How many communicators lanes of `group` have given back: the same number on all ranks."""
    return len(_FREE.get(group, ()))


class Lane:
    """The thread, stream and communicator of a model's gathers. Made by all of its ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._of = group
        self.group: Any = (
            _FREE[group].pop()
            if free(group)
            else dist.new_group(ranks, use_local_synchronization=True)
        )
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="evener gathers", daemon=True)
        self._thread.start()
        # Python ends under a thread that is still in torch's code by ending the process, aborted.
        self._end = weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, job: Callable[[], None]) -> dist.Work:
        """Run `job` after what is on the current stream, and after the jobs before it."""
        ready = None if self._stream is None else torch.cuda.current_stream().record_event()
        done: Future[Any] = Future()
        self._jobs.put((job, ready, done))
        return _Pending(done)

    def close(self) -> None:
        """End the thread behind its last job, and give the communicator back."""
        self._end.detach()
        _stop(self._jobs, self._thread, None)
        _FREE.setdefault(self._of, []).append(self.group)

    def _serve(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        while (taken := self._jobs.get()) is not None:
            job, ready, done = taken
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):
                    if self._stream is not None:
                        self._stream.wait_event(ready)
                    job()
                    event = None if self._stream is None else self._stream.record_event()
                done.set_result(event)
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                done.set_exception(error)
            del taken, job, done  # their tensors are as large as the unit


def _stop(jobs: _Jobs, thread: threading.Thread, seconds: float | None = 10.0) -> None:
    """End a lane's thread behind its last job; `seconds`: no longer, for a peer may be gone."""
    jobs.put(None)
    thread.join(seconds)


class _Pending(dist.Work):
    """What FSDP2 waits for before it uses the weights; raises what the gather raised."""

    def __init__(self, done: Future[Any]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits for the gather, and the host until it is enqueued."""
        event = self._done.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return True


class MirroredGather(AllGather):
    """The all-gather of one FSDP2 unit; give it to `FSDPModule.set_custom_all_gather`.

    `name`: the unit, for messages. `group`: the ranks over which it is sharded; a gather of other
    ranks is left as it is. `lane`: the model's. `host`: keep the mirror in pinned host memory.

    Waiting for a gather raises CommError, on every rank, where a mirror did not match before it,
    and torch's RuntimeError where memory ends.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, lane: Lane, traffic: Traffic, host: bool
    ) -> None:
        self.name, self.group, self.lane = name, group, lane
        self.traffic, self.host = traffic, host
        self._mirror: _Mirror | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's staging buffer, [world * n]."""
        return torch.empty(*size, dtype=dtype, device=device)

    def forget(self) -> None:
        """Drop the mirror: the next gather sends all weights. Collective in effect."""
        self._mirror = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` [n] of all ranks into `output_tensor` [world * n], in rank order.

        Returns before it is done. `input_tensor` may be this rank's part of the output.
        """
        if group.group_name != self.group.group_name:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return None
        return self.lane.submit(lambda: self._gather(output_tensor, input_tensor))

    def _gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        group = self.lane.group
        world, rank, n = group.size(), group.rank(), own.numel()
        rows = output.view(world, n)
        if own.data_ptr() != rows[rank].data_ptr():
            rows[rank].copy_(own)
        self.traffic.gathers += 1
        self.traffic.plain += (world - 1) * n * own.element_size()
        mirror = self._kept(rows)
        coded = mirror.filled and differences.supports(own.dtype)
        before = mirror.rows[rank].to(own.device, non_blocking=True) if mirror.filled else None
        headers = differences.plan(own, before) if coded and before is not None else None
        announced = self._announce(mirror, own, before, headers, group)
        words = [int(row[0]) for row in announced]
        if all(count == 0 for count in words):
            self.traffic.unchanged += 1
            self._copy_others(mirror.rows, rows, rank)
            return
        if _WHOLE in words or before is None or headers is None:
            self._whole(rows, own, group, mirror)
            return
        self._differences(rows, own, before, headers, words, group, mirror)
        sums = torch.stack([checksum(row) for row in rows])
        stated = torch.tensor([row[1] for row in announced], device=sums.device)
        mirror.wrong += (sums != stated).sum()

    def _kept(self, rows: torch.Tensor) -> _Mirror:
        """The mirror; a new one where the unit is of another size or dtype than it was."""
        found = self._mirror
        if found is None or found.rows.shape != rows.shape or found.rows.dtype != rows.dtype:
            pinned = self.host and rows.is_cuda
            place = "cpu" if pinned else rows.device
            kept = torch.empty(rows.shape, dtype=rows.dtype, device=place, pin_memory=pinned)
            wrong = torch.zeros((), dtype=torch.int64, device=rows.device)
            found = self._mirror = _Mirror(kept, wrong)
        return found

    def _announce(
        self,
        mirror: _Mirror,
        own: torch.Tensor,
        before: torch.Tensor | None,
        headers: torch.Tensor | None,
        group: dist.ProcessGroup,
    ) -> list[list[int]]:
        """What each rank has to send: (words, checksum, rows found wrong so far). Waits for it."""
        mine = torch.zeros(3, dtype=torch.int64, device=own.device)
        if before is None:
            mine[0] = _WHOLE
        else:
            bits = _bits(own)
            if headers is None:
                mine[0] = torch.where((bits != _bits(before)).any(), _WHOLE, 0)
            else:
                size = differences.size(headers)
                most = int(WORTH * own.numel() * own.element_size() / 4)
                size = torch.where(size > most, _WHOLE, size)
                # Headers alone say that nothing changed.
                mine[0] = torch.where(size == headers.numel(), 0, size)
        mine[1] = checksum(own)
        mine[2] = mirror.wrong
        every = torch.empty(group.size() * 3, dtype=torch.int64, device=own.device)
        dist.all_gather_into_tensor(every, mine, group=group)
        announced: list[list[int]] = every.view(-1, 3).tolist()
        wrong = [rank for rank, row in enumerate(announced) if row[2]]
        if wrong:
            self.forget()
            raise CommError(
                f"the weights of {self.name} that rank {wrong[0]} put together do not match what "
                "was sent: a step with wrong weights may lie behind you. Go back to the last "
                "checkpoint, and report this; mirror='off' gathers as plain FSDP2 does"
            )
        return announced

    def _copy_others(self, source: torch.Tensor, target: torch.Tensor, rank: int) -> None:
        """Rows of all ranks but this one, whose row is in the output already."""
        for part in (slice(0, rank), slice(rank + 1, None)):
            target[part].copy_(source[part], non_blocking=True)

    def _whole(
        self, rows: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, mirror: _Mirror
    ) -> None:
        self.traffic.whole += 1
        self.traffic.received += (rows.shape[0] - 1) * own.numel() * own.element_size()
        dist.all_gather_into_tensor(rows.view(-1), own, group=group)
        mirror.rows.copy_(rows, non_blocking=True)
        mirror.filled = True

    def _differences(
        self,
        rows: torch.Tensor,
        own: torch.Tensor,
        before: torch.Tensor,
        headers: torch.Tensor,
        words: list[int],
        group: dist.ProcessGroup,
        mirror: _Mirror,
    ) -> None:
        """Exchange messages, in buffers of the longest one, and apply them."""
        rank, longest = group.rank(), max(words)
        message = torch.empty(longest, dtype=torch.int32, device=own.device)
        if words[rank]:
            differences.write(own, before, headers, message)
        every = torch.empty(len(words) * longest, dtype=torch.int32, device=own.device)
        dist.all_gather_into_tensor(every, message, group=group)
        self.traffic.received += (len(words) - 1) * longest * 4
        self._copy_others(mirror.rows, rows, rank)
        for other, (count, coded) in enumerate(
            zip(words, every.view(len(words), longest), strict=True)
        ):
            if count and other != rank:
                differences.read(coded[:count], rows[other])
            if count:
                mirror.rows[other].copy_(rows[other], non_blocking=True)


def _bits(weights: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return weights.view(kinds[weights.element_size()])


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """An int64 scalar that differs where bits do, but for luck: a weighted sum that wraps."""
    flat = weights.reshape(-1)
    each = 8 // flat.element_size()
    if flat.storage_offset() % each:
        flat = flat.clone()
    words = flat[: flat.numel() // each * each].view(torch.int64)
    rest = _bits(flat[words.numel() * each :]).to(torch.int64)
    # Odd factors, so that no bit of a word is lost.
    factors = torch.arange(1, 2 * words.numel() + 1, 2, device=flat.device)
    return (words * factors).sum() + (
        rest * torch.arange(3, 3 + rest.numel(), device=flat.device)
    ).sum()
