"""Ranks on GPUs: NCCL's own calls, streams of torch, graphs of the CUDA runtime.

One carrier drives the GPUs of one thread. Its calls are made ready once a size; inside the time
`evener._native` repeats them and waits, without the interpreter and without its lock, so threads
(-t) run side by side. Setting up, graphs and events are calls by ctypes.

As in nccl-tests, each call works on the next piece of the buffers, so that small messages are not
measured out of the GPU's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from evener._native import Launcher, Streams
from evener.errors import EvenerError
from evener.tools.bench.collectives.buffers import Buffers, needed
from evener.tools.bench.collectives.clock import Ready
from evener.tools.bench.collectives.nccl import OPERATIONS, TYPES, Nccl, NcclError, calls
from evener.tools.bench.collectives.options import TYPES as TYPE_BYTES
from evener.tools.bench.collectives.options import Options
from evener.tools.bench.collectives.shapes import Collective, Shape
from evener.tools.bench.collectives.values import MULTIPLIER

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_NON_BLOCKING = 1  # cudaStreamNonBlocking


class CudaCarrier:
    """The GPUs `devices` of this process as ranks `first`, `first` + 1, ..."""

    def __init__(
        self,
        options: Options,
        nccl: Nccl,
        devices: list[int],
        first: int,
        ranks: int,
        comms: list[ctypes.c_void_p],
    ) -> None:
        """`comms`: one of `communicators` a device."""
        self.options, self.nccl, self.devices, self.ranks = options, nccl, devices, ranks
        self.first, self.comms = first, comms
        self._cuda = _runtime()
        self._handles = [self._stream(device) for device in devices]
        self._pointers: list[ctypes.c_void_p] = []  # of ncclMemAlloc
        self.memory = [self._allocate(device) for device in devices]
        self._registered: list[ctypes.c_void_p] = []
        self._register()
        self.buffers = [
            Buffers(*memory, first + i, ranks, options.unalign)
            for i, memory in enumerate(self.memory)
        ]
        self._waiting = Streams(
            _address(self._cuda.cudaStreamQuery),
            nccl.address("ncclCommGetAsyncError"),
            _address(self._cuda.cudaSetDevice),
            [
                (device, stream.value or 0, comm.value or 0)
                for device, stream, comm in zip(devices, self._handles, comms, strict=True)
            ],
        )
        self._scaled: dict[tuple[int, str], int] = {}
        self._graphs: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        self._marks: list[list[ctypes.c_void_p]] = []
        torch.cuda.set_device(devices[0])

    def check(self, status: int, what: str) -> None:
        """Raise NcclError unless `status` is success."""
        self.nccl.check(status, what)

    def _stream(self, device: int) -> ctypes.c_void_p:
        """A stream of its own: torch makes streams by the dozen."""
        stream = ctypes.c_void_p()
        if not self.options.stream_null:
            torch.cuda.set_device(device)
            make = self._cuda.cudaStreamCreateWithFlags
            _cuda_check(make(ctypes.byref(stream), _NON_BLOCKING), "create a stream")
        return stream

    def _allocate(self, device: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = needed(self.options.maxbytes, self.options.unalign)
        torch.cuda.set_device(device)
        free, _ = torch.cuda.mem_get_info(device)
        if 2 * size > free:
            raise EvenerError(
                f"-e {self.options.maxbytes} needs two buffers of {size} bytes, GPU {device} has "
                f"{free} free",
                f"give -e {max(free // 2 - (64 << 20), 0)} or less",
            )
        pair = []
        for _ in range(2):
            pointer = ctypes.c_void_p()
            if getattr(self.nccl, "ncclMemAlloc", None) is None:
                pair.append(torch.zeros(size, dtype=torch.uint8, device=device))
                continue
            self.check(self.nccl.ncclMemAlloc(ctypes.byref(pointer), size), "ncclMemAlloc")
            tensor = torch.as_tensor(_Memory(pointer.value or 0, size), device=f"cuda:{device}")
            self._pointers.append(pointer)
            tensor.zero_()
            pair.append(tensor)
        torch.cuda.synchronize(device)  # the collectives' streams do not wait for torch's
        return pair[0], pair[1]

    def _register(self) -> None:
        """-R 1: each buffer with its communicator; -R 2: as windows, collectively."""
        how = self.options.local_register
        if not how:
            return
        name = "ncclCommRegister" if how == 1 else "ncclCommWindowRegister"
        function = getattr(self.nccl, name, None)
        if function is None:
            raise NcclError(
                f"-R {how}: NCCL {self.nccl.version()} has no {name}",
                "leave -R out, or update NCCL",
            )
        self.check(self.nccl.ncclGroupStart(), "ncclGroupStart")
        # NCCL writes the handles when the group ends.
        self._registered = [ctypes.c_void_p() for pair in self.memory for _ in pair]
        handles = iter(self._registered)
        for comm, device, pair in zip(self.comms, self.devices, self.memory, strict=True):
            torch.cuda.set_device(device)
            for tensor in pair:
                where = ctypes.byref(next(handles))
                flags = (_SYMMETRIC,) if how == 2 else ()
                self.check(function(comm, tensor.data_ptr(), tensor.numel(), where, *flags), name)
        self.check(self.nccl.ncclGroupEnd(), name)

    def _operation(self, number: int, kind: str, op: str) -> int:
        if op != "mulsum":
            return OPERATIONS.get(op, 0)
        key = (number, kind)
        if key not in self._scaled:
            from evener.tools.bench.collectives.values import DTYPES

            scalar = torch.tensor([MULTIPLIER], dtype=torch.float64).to(DTYPES[kind])
            handle = ctypes.c_int()
            self.check(
                self.nccl.ncclRedOpCreatePreMulSum(
                    ctypes.byref(handle),
                    ctypes.c_void_p(scalar.data_ptr()),
                    TYPES[kind],
                    1,  # ncclScalarHostImmediate
                    self.comms[number],
                ),
                "ncclRedOpCreatePreMulSum",
            )
            self._scaled[key] = handle.value
        return self._scaled[key]

    def start(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int, in_place: bool
    ) -> Ready:
        ranks = []
        for number, (buffers, comm, stream) in enumerate(
            zip(self.buffers, self.comms, self._handles, strict=True)
        ):
            groups = calls(
                collective.name,
                buffers.send(shape, kind, in_place).data_ptr(),
                buffers.receive(shape, kind, in_place).data_ptr(),
                shape.count,
                TYPE_BYTES[kind],
                TYPES[kind],
                self._operation(number, kind, op),
                root,
                self.first + number,
                self.ranks,
                self.nccl.has,
            )
            own = (comm.value or 0, stream.value or 0)
            ranks.append([[(call, own) for call in group] for group in groups])
        # One group over all GPUs of the thread, step by step: rank by rank would wait for itself.
        steps = [
            [
                (
                    self.nccl.address(call.function),
                    [*call.buffers],
                    call.elements,
                    [*call.numbers],
                    *own,
                )
                for group in groups
                for call, own in group
            ]
            for groups in zip(*ranks, strict=True)
        ]
        piece = max(shape.send, shape.receive) * TYPE_BYTES[kind]
        pieces = self.options.maxbytes // piece if piece else 1
        begin, end = (self.nccl.address(f"ncclGroup{which}") for which in ("Start", "End"))
        launcher = Launcher(begin, end, steps, piece, max(pieces, 1))

        def run(first: int, count: int, together: int) -> None:
            status, number = launcher.run(first, count, together)
            self.check(status, f"{collective.name}, call {number}")

        def timed(count: int, together: int) -> tuple[float, float]:
            status, number, told, started, done = launcher.timed(
                self._waiting, count, together, self.options.timeout
            )
            self.check(status, f"{collective.name}, call {number}")
            self._look(told)
            return started, done

        return Ready(run, timed)

    def wait(self) -> None:
        """Ask the streams in turn, as nccl-tests does, and NCCL for errors of other ranks."""
        self._look(self._waiting.wait(self.options.timeout))

    def _look(self, told: tuple[int, int, int] | None) -> None:
        """Raise for what `Streams.wait` said, None if all is done."""
        if told is None:
            return
        number, cuda, status = told
        if cuda:
            _cuda_check(cuda, f"finish the work of rank {self.first + number}")
        self.check(status, f"rank {self.first + number}")
        raise EvenerError(
            f"-T {self.options.timeout}: rank {self.first + number} is not done",
            "look at the other ranks; NCCL_DEBUG=INFO shows who is connected",
        )

    # --- single iterations (-I) ---

    def mark(self) -> None:
        events = []
        for device, handle in zip(self.devices, self._handles, strict=True):
            torch.cuda.set_device(device)
            event = ctypes.c_void_p()
            _cuda_check(self._cuda.cudaEventCreate(ctypes.byref(event)), "create an event")
            _cuda_check(self._cuda.cudaEventRecord(event, handle), "record an event")
            events.append(event)
        self._marks.append(events)

    def between(self) -> list[float]:
        seconds = []
        for begin, end in zip(self._marks[::2], self._marks[1::2], strict=True):
            each = []
            for device, first, last in zip(self.devices, begin, end, strict=True):
                torch.cuda.set_device(device)
                passed = ctypes.c_float()
                status = self._cuda.cudaEventElapsedTime(ctypes.byref(passed), first, last)
                _cuda_check(status, "read an event's time")
                each.append(passed.value / 1e3)
                for event in (first, last):
                    self._cuda.cudaEventDestroy(event)
            seconds.append(max(each))
        self._marks = []
        return seconds

    # --- graphs ---

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        cuda = self._cuda
        self._forget_graphs()
        for device, stream in zip(self.devices, self._handles, strict=True):
            torch.cuda.set_device(device)
            _cuda_check(cuda.cudaStreamBeginCapture(stream, _THREAD_LOCAL), "begin capture")
        record()
        graphs = []
        for device, stream in zip(self.devices, self._handles, strict=True):
            torch.cuda.set_device(device)
            graph = ctypes.c_void_p()
            _cuda_check(cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)), "end capture")
            graphs.append(graph)
        # Not before every capture has ended: while this thread captures on one GPU, CUDA refuses
        # it what making a graph runnable needs on another.
        for device, graph in zip(self.devices, graphs, strict=True):
            torch.cuda.set_device(device)
            executable = ctypes.c_void_p()
            status = cuda.cudaGraphInstantiateWithFlags(
                ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
            )
            _cuda_check(status, "instantiate graph")
            self._graphs.append((graph, executable))
        launches = [
            (ctypes.c_int(device), executable, stream)
            for device, (_, executable), stream in zip(
                self.devices, self._graphs, self._handles, strict=True
            )
        ]

        def launch() -> None:
            for device, executable, stream in launches:
                status = cuda.cudaSetDevice(device) or cuda.cudaGraphLaunch(executable, stream)
                if status:
                    _cuda_check(status, "launch graph")

        return launch

    def _forget_graphs(self) -> None:
        for graph, executable in self._graphs:
            self._cuda.cudaGraphExecDestroy(executable)
            self._cuda.cudaGraphDestroy(graph)
        self._graphs = []

    # --- checking ---

    def fill(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> None:  # fmt: skip
        for device, buffers in zip(self.devices, self.buffers, strict=True):
            with torch.cuda.device(device):
                buffers.fill(collective, shape, kind, op, in_place, repetition)
                torch.cuda.synchronize(device)

    def wrong(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> int:  # fmt: skip
        total = 0
        for device, buffers in zip(self.devices, self.buffers, strict=True):
            with torch.cuda.device(device):
                total += buffers.wrong(collective, shape, kind, op, root, in_place, repetition)
        return total

    def close(self) -> None:
        """Destroy graphs and communicators, give memory back. The carrier is of no use after."""
        self._forget_graphs()
        name = (
            "ncclCommDeregister" if self.options.local_register == 1 else "ncclCommWindowDeregister"
        )
        owners = [comm for comm in self.comms for _ in range(2)]
        for comm, handle in zip(owners, self._registered, strict=False):
            self.check(getattr(self.nccl, name)(comm, handle), name)
        for comm in self.comms:
            self.check(self.nccl.ncclCommDestroy(comm), "ncclCommDestroy")
        self.buffers, self.memory = [], []
        for pointer in self._pointers:
            self.check(self.nccl.ncclMemFree(pointer), "ncclMemFree")
        self._pointers = []
        for stream in self._handles:
            if stream.value:
                _cuda_check(self._cuda.cudaStreamDestroy(stream), "destroy a stream")


def communicators(
    nccl: Nccl, devices: list[int], first: int, ranks: int, unique: bytes
) -> list[ctypes.c_void_p]:
    """Communicators of ranks `first`, `first` + 1, ... on these devices, in one group."""
    nccl.check(nccl.ncclGroupStart(), "ncclGroupStart")
    comms = []
    for number, device in enumerate(devices):
        torch.cuda.set_device(device)
        comms.append(nccl.communicator(ranks, unique, first + number))
    nccl.check(nccl.ncclGroupEnd(), "ncclCommInitRank")
    return comms


def _runtime() -> Any:
    """The CUDA runtime that torch loaded."""
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise NcclError(
            f"libcudart.so.{major} cannot be loaded: {error}", "install torch with CUDA"
        ) from None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _cuda_check(status: int, what: str) -> None:
    if status:
        text = _runtime().cudaGetErrorString
        text.restype = ctypes.c_char_p
        name = (text(status) or b"").decode("utf-8", "replace")
        raise EvenerError(
            f"CUDA could not {what}: {name} ({status})",
            "run again without -G, -m and -I to see which of them it is",
        )


class _Memory:
    """GPU memory as torch takes it in (CUDA array interface, version 3)."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
