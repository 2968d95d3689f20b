"""How a Horovod operation runs: one thread, one order, and agreement before data moves.

The caller's thread puts a request into a queue and gets a handle; the engine's thread takes the
requests one by one. Before a request's data moves, all ranks exchange what they are about to do
(name, kind, shape, dtype, ...) on a Gloo group of their own. Where they differ, every rank gets the
same HorovodInternalError and the next request goes on: torch.distributed by itself would abort one
process, hang, or return garbage.

Requests run in the order in which they were submitted, which must therefore be the same on all
ranks; another order is found out by the names and refused. (Upstream allows any order; a
negotiation that does, and that costs nothing in steady state, is planned.)

Gradients do not come this way: the optimizer's go through `evener.comm.reducer`.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.ranks import Ranks
from evener.horovod.common.exceptions import HorovodInternalError

# What a rank says about a request fits into this many bytes; longer ones take a second exchange.
_ROOM = 512

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """One operation of one rank.

    agree: what must be equal on all ranks. tell: what the others must know, but may differ.
    run(group, told): moves the data; `told` holds every rank's `tell`. Returns the result.
    tensor: decides the device on which `run` works; None for the CPU.
    """

    kind: str
    name: str
    agree: Fields
    tell: Fields
    run: Callable[[dist.ProcessGroup, Sequence[Fields]], Any]
    tensor: torch.Tensor | None = None


class Engine:
    """The thread and its groups, from `hvd.init()` to `hvd.shutdown()`."""

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        """Collective over the default group. timeout: seconds a collective may wait."""
        self._ranks, self._timeout = ranks, timeout
        limit = timedelta(seconds=timeout)
        self.control = _new_group("gloo", limit)
        self.cuda = (
            _new_group("nccl", limit)
            if torch.cuda.is_available() and dist.is_nccl_available()
            else self.control
        )
        self._queue: queue.SimpleQueue[tuple[Request, Future[Any], Any] | None]
        self._queue = queue.SimpleQueue()
        self._handles: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._counters: dict[str, itertools.count[int]] = {}
        self._in_flight: set[str] = set()
        self._lock = threading.Lock()
        self._broken: HorovodInternalError | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._work, name="evener-horovod", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue `request`; gives its handle. Raises ValueError for a name that is in flight."""
        future: Future[Any] = Future()
        with self._lock:
            key = f"{request.kind}.{request.name}"
            if key in self._in_flight:
                raise ValueError(
                    f"{request.kind} of {request.name!r} is still in flight; synchronize it first, "
                    "or give the second one another name"
                )
            self._in_flight.add(key)
            handle = next(self._numbers)
            self._handles[handle] = future
        ready = None
        if request.tensor is not None and request.tensor.is_cuda:
            ready = torch.cuda.current_stream(request.tensor.device).record_event()
        self._queue.put((request, future, ready))
        return handle

    def automatic_name(self, kind: str) -> str:
        """The next name of an operation that was given none; the same sequence on all ranks."""
        with self._lock:
            counter = self._counters.setdefault(kind, itertools.count(1))
            return f"noname.{next(counter)}"

    def poll(self, handle: int) -> bool:
        """Whether the operation has ended; True for a handle that is not known (any more)."""
        future = self._handles.get(handle)
        return future is None or future.done()

    def synchronize(self, handle: int) -> Any:
        """Wait, and give the result; None for a handle that is not known (any more)."""
        with self._lock:
            future = self._handles.pop(handle, None)
        return None if future is None else future.result()

    def close(self) -> None:
        """Finish what is queued, end the thread, drop the groups."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            for group in {self.control, self.cuda}:
                dist.destroy_process_group(group)

    # --- the engine's thread ---

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            request, future, ready = item
            try:
                result = self._one(request, ready)
            except BaseException as error:  # noqa: BLE001 - handed to whoever synchronizes
                outcome: BaseException | None = error
            else:
                outcome = None
            with self._lock:
                self._in_flight.discard(f"{request.kind}.{request.name}")
            if outcome is None:
                future.set_result(result)
            else:
                future.set_exception(outcome)

    def _one(self, request: Request, ready: torch.cuda.Event | None) -> Any:
        if self._broken is not None:
            raise HorovodInternalError(
                f"{request.kind} of {request.name!r}: an earlier operation failed "
                f"({self._broken.problem})",
                "call hvd.shutdown() and hvd.init() to begin anew",
            )
        try:
            told = self._agree(request)
            with torch.no_grad():
                if ready is None or request.tensor is None:
                    return request.run(self.control, told)
                device = request.tensor.device
                stream = self._streams.setdefault(device, torch.cuda.Stream(device))
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    result = request.run(self.cuda, told)
                    # This thread waits, so that a handle that is done is done for every stream.
                    stream.synchronize()
                    return result
        except HorovodInternalError:
            raise
        except RuntimeError as error:  # torch's own; which peers got how far is unknown from here
            self._broken = HorovodInternalError(
                f"rank {self._ranks.rank} of {self._ranks.size}: {request.kind} of "
                f"{request.name!r} failed: {str(error).strip() or type(error).__name__}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within EVENER_TIMEOUT={self._timeout:g} s",
            )
            raise self._broken from error

    def _agree(self, request: Request) -> list[Fields]:
        """Every rank's `tell`; the same HorovodInternalError on all where `agree` differs."""
        mine = {"kind": request.kind, "name": request.name, **request.agree}
        said = [json.loads(text) for text in self._exchange(json.dumps([mine, dict(request.tell)]))]
        for rank, (theirs, _) in enumerate(said):
            for key, value in said[0][0].items():
                other = theirs.get(key)
                if other == value:
                    continue
                what = f"{said[0][0]['kind']} of {said[0][0]['name']!r}"
                if key in ("kind", "name"):
                    raise HorovodInternalError(
                        f"rank 0 submitted {what}, rank {rank} {theirs['kind']} of "
                        f"{theirs['name']!r}",
                        "submit operations in the same order on all ranks; any order is planned",
                    )
                raise HorovodInternalError(
                    f"mismatched {key} in {what}: rank 0 has {value}, rank {rank} has {other}",
                    "give the operation the same tensors and arguments on every rank",
                )
        return [tell for _, tell in said]

    def _exchange(self, text: str) -> list[str]:
        data = text.encode()
        room = _ROOM
        while True:
            packed = torch.zeros(room, dtype=torch.uint8)
            part = data[: room - 8]
            header = len(data).to_bytes(8, "little") + part
            packed[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            everyone = torch.empty(self._ranks.size * room, dtype=torch.uint8)
            dist.all_gather_into_tensor(everyone, packed, group=self.control)
            rows = [bytes(row.tolist()) for row in everyone.view(self._ranks.size, room)]
            lengths = [int.from_bytes(row[:8], "little") for row in rows]
            if max(lengths) <= room - 8:  # all ranks see the same lengths: all stop or none
                pairs = zip(rows, lengths, strict=True)
                return [row[8 : 8 + length].decode() for row, length in pairs]
            room = max(lengths) + 8


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.new_group(backend=backend, timeout=timeout)
    assert group is not None  # all ranks are in it
    return group
