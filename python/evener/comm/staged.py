"""The outer level without NCCL: device, pinned host memory, Evener's engine, and back.

NCCL moves data by kernels. Between nodes on a slow network they mostly wait, and hold
multiprocessors while they do: a kernel of cuDNN that was laid out for one block on each then runs
in two rounds and takes twice as long. Here copy engines move the data, streams wait for words in
host memory (`cuStreamWaitValue32`), and one thread of Rust keeps the network busy
(`crates/staging`); a collective is enqueued whole, and nothing of Python runs until it is over.

The same exchange serves CPU tensors, where it blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from evener._native import StagedExchange
from evener.comm.errors import CommError
from evener.comm.scratch import stream_of

# A piece on its way needs about a millisecond in a 25 Gb/s network; the pump has a few in the air.
_SLOT, _SLOTS = 4 << 20, 16


class _Lane:
    """One exchange, its slots and words, and on a GPU its two streams."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float) -> None:
        gpu = device.type == "cuda"
        room = _SLOT * _SLOTS
        self.device = device
        self._memory = torch.empty(2 * room, dtype=torch.uint8, pin_memory=gpu)
        self._words = torch.zeros(StagedExchange.WORDS // 4, dtype=torch.int32, pin_memory=gpu)
        base = self._memory.data_ptr()
        self.exchange = StagedExchange(
            rank, size, base, base + room, self._words.data_ptr(), _SLOT, _SLOTS, timeout
        )
        if gpu:
            self.out = torch.cuda.Stream(device, priority=-1)
            self.back = torch.cuda.Stream(device, priority=-1)
            self._streams = self.out.cuda_stream, self.back.cuda_stream
            with torch.cuda.device(device):
                self.exchange.try_device(self.out.cuda_stream)

    def run(self, parts: bool, received: torch.Tensor, payload: torch.Tensor, size: int) -> None:
        """`size`: bytes of what one rank has for another."""
        source, target = payload.data_ptr(), received.data_ptr()
        if self.device.type != "cuda":
            self.exchange.run_on_host(parts, size, source, target)
            return
        self.exchange.enqueue(parts, size, source, target, stream_of(self.device), *self._streams)

    def close(self) -> None:
        self.exchange.close()
        if self.device.type == "cuda":
            # The streams run on, over the words and slots: they must live until they are done.
            self.out.synchronize()
            self.back.synchronize()


class StagedTransport:
    """A group's way through host memory: `evener.comm.transport.Transport`.

    All ranks of the group make the same calls in the same order. On a GPU they enqueue on the
    current stream; on a CPU they block.
    """

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Makes what peers connect to: `connect` below does the rest. RuntimeError: no network."""
        self.rank, self.size, self.device = rank, size, device
        # Among more than two a sum is an all-to-all and then an all-gather; on one lane the next
        # sum's all-to-all would wait until this one's has been added up.
        count = 1 if size == 2 else 2
        self.lanes = [_Lane(rank, size, device, timeout) for _ in range(count)]

    def all_gather(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """`received` [size * n], by rank, of every rank's `payload` [n]: contiguous, one dtype."""
        self._run(False, received, payload, payload.nbytes)

    def all_to_all(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """Part r of `payload` [size * n] goes to rank r; part r of `received` came from there."""
        self._run(True, received, payload, payload.nbytes // self.size)

    def _run(self, parts: bool, received: torch.Tensor, payload: torch.Tensor, size: int) -> None:
        wanted = size * self.size if parts else size
        if (
            payload.nbytes != wanted
            or received.nbytes != size * self.size
            or not (received.is_contiguous() and payload.is_contiguous())
            or {received.device, payload.device} != {self.device}
        ):
            raise ValueError(
                f"payload of {payload.nbytes} bytes on {payload.device} and result of "
                f"{received.nbytes} bytes on {received.device} do not fit {self.size} ranks on "
                f"{self.device}, or are not contiguous"
            )
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CommError(
                "a CUDA graph is being captured, and the staged transport between nodes cannot be "
                "replayed: a thread of the host has a part in it",
                "set EVENER_OUTER=nccl, or leave backward out of the graph",
            )
        try:
            self.lanes[-1 if parts else 0].run(parts, received, payload, size)
        except RuntimeError as error:
            raise _failed(str(error)) from error

    def handle(self) -> list[bytes]:
        """What peers need to connect, lane by lane."""
        return [bytes(lane.exchange.handle()) for lane in self.lanes]

    def join(self, handles: Sequence[Sequence[bytes]], timeout: float) -> None:
        """Connects to all; `handles` by rank. RuntimeError where a rank does not come."""
        for place, lane in enumerate(self.lanes):
            lane.exchange.connect([handle[place] for handle in handles], timeout)

    def check(self) -> None:
        """Raises CommError when the network has failed: what was received since is garbage."""
        for lane in self.lanes:
            why = lane.exchange.failure()
            if why is not None:
                raise _failed(why)

    def close(self) -> None:
        """Ends it. Collectives that are under way end with garbage. From any thread, or twice."""
        for lane in self.lanes:
            lane.close()


def _failed(why: str) -> CommError:
    return CommError(
        f"the staged transport between nodes failed: {why}",
        "look at the log of the ranks that are gone; EVENER_OUTER=nccl goes without it",
    )


def unavailable(device: torch.device) -> str | None:
    """Why there is no such transport for `device`; None where `connect` may be tried."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "streams are made to wait by CUDA's driver, and this torch is for ROCm"
    return None if device.type in ("cpu", "cuda") else f"there is none for {device.type}"


def connect(
    rank: int, size: int, control: dist.ProcessGroup, device: torch.device, timeout: float
) -> StagedTransport:
    """The transport of a group of `size` ranks, of which this is `rank`. Collective over `control`.

    `control` has the same ranks in the same order. Raises RuntimeError, on all ranks or none, where
    a rank cannot be reached or its device cannot do it.
    """
    made: StagedTransport | None = None
    problem = ""
    try:
        made = StagedTransport(rank, size, device, timeout)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    found: list[tuple[list[bytes], str]] = [([], "")] * size
    mine = ([] if made is None else made.handle(), problem)
    dist.all_gather_object(found, mine, group=control)
    _agree([why for _, why in found], made)
    assert made is not None
    try:
        made.join([handle for handle, _ in found], timeout)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    reasons = [""] * size
    dist.all_gather_object(reasons, problem, group=control)
    _agree(reasons, made)
    return made


def _agree(reasons: list[str], made: StagedTransport | None) -> None:
    for rank, why in enumerate(reasons):
        if why:
            if made is not None:
                made.close()
            raise RuntimeError(f"rank {rank} of the group: {why}")
