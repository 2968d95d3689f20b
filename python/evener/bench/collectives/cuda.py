"""Ranks on GPUs: NCCL by ctypes, streams of torch, graphs of the CUDA runtime.

One carrier drives the GPUs of one thread. Its calls are made ready once a size; inside the time
there are only foreign calls, which release the interpreter's lock, so threads (-t) run side by
side.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from evener.bench.collectives.buffers import Buffers, needed
from evener.bench.collectives.nccl import OPERATIONS, TYPES, Call, Nccl, NcclError, calls
from evener.bench.collectives.options import Options
from evener.bench.collectives.shapes import Collective, Shape
from evener.bench.collectives.values import MULTIPLIER
from evener.errors import EvenerError

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class CudaCarrier:
    """The GPUs `devices` of this process as ranks `first`, `first` + 1, ..."""

    def __init__(
        self,
        options: Options,
        nccl: Nccl,
        devices: list[int],
        first: int,
        ranks: int,
        unique: bytes,
    ) -> None:
        self.options, self.nccl, self.devices, self.ranks = options, nccl, devices, ranks
        self.first = first
        self.comms: list[ctypes.c_void_p] = []
        self.check(nccl.ncclGroupStart(), "ncclGroupStart")
        for number, device in enumerate(devices):
            torch.cuda.set_device(device)
            self.comms.append(nccl.communicator(ranks, unique, first + number))
        self.check(nccl.ncclGroupEnd(), "ncclCommInitRank")
        self.streams = [self._stream(device) for device in devices]
        self.memory = [self._allocate(i, device) for i, device in enumerate(devices)]
        self.buffers = [
            Buffers(*memory, first + i, ranks, options.unalign)
            for i, memory in enumerate(self.memory)
        ]
        self._scaled: dict[tuple[int, str], int] = {}
        self._runtime: Any = None
        self._graphs: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []

    def check(self, status: int, what: str) -> None:
        """Raise NcclError unless `status` is success."""
        self.nccl.check(status, what)

    def _stream(self, device: int) -> Any:
        if self.options.stream_null:
            return torch.cuda.default_stream(device)
        return torch.cuda.Stream(device)

    def _allocate(self, number: int, device: int) -> tuple[torch.Tensor, torch.Tensor]:
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
            tensor.zero_()
            pair.append(tensor)
        if self.options.local_register:
            for tensor in pair:
                handle = ctypes.c_void_p()
                self.check(
                    self.nccl.ncclCommRegister(
                        self.comms[number], tensor.data_ptr(), size, ctypes.byref(handle)
                    ),
                    "ncclCommRegister",
                )
        return pair[0], pair[1]

    def _operation(self, number: int, kind: str, op: str) -> int:
        if op != "mulsum":
            return OPERATIONS.get(op, 0)
        key = (number, kind)
        if key not in self._scaled:
            from evener.bench.collectives.values import DTYPES

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
    ) -> Callable[[], None]:
        ranks: list[list[list[Call]]] = []
        for number, buffers in enumerate(self.buffers):
            send, receive = (
                buffers.send(shape, kind, in_place),
                buffers.receive(shape, kind, in_place),
            )
            ranks.append(
                calls(
                    self.nccl,
                    collective.name,
                    send.data_ptr(),
                    receive.data_ptr(),
                    shape.count,
                    send.element_size(),
                    TYPES[kind],
                    self._operation(number, kind, op),
                    root,
                    self.first + number,
                    self.ranks,
                    self.comms[number],
                    self.streams[number].cuda_stream,
                )
            )
        # One group over all GPUs of the thread, step by step: rank by rank would wait for itself.
        steps = [[call for rank in ranks for call in rank[i]] for i in range(len(ranks[0]))]
        begin, end = self.nccl.ncclGroupStart, self.nccl.ncclGroupEnd
        if len(steps) == 1 and len(steps[0]) == 1:
            function, arguments = steps[0][0]

            def one() -> None:
                if status := function(*arguments):
                    self.check(status, collective.name)

            return one

        def many() -> None:
            for step in steps:
                status = begin()
                for function, arguments in step:
                    status = function(*arguments) or status
                status = end() or status
                if status:
                    self.check(status, collective.name)

        return many

    def aggregate(self, begin: bool) -> None:
        """A group of calls: NCCL launches them together."""
        self.check(
            self.nccl.ncclGroupStart() if begin else self.nccl.ncclGroupEnd(), "group of calls"
        )

    def wait(self) -> None:
        """Ask the streams in turn, as nccl-tests does, and NCCL for errors of other ranks."""
        left = list(range(len(self.streams)))
        limit = time.monotonic() + self.options.timeout if self.options.timeout else None
        asked = 0
        while left:
            left = [i for i in left if not self.streams[i].query()]
            asked += 1
            if left and asked % 256 == 0:
                self._look(left[0])
                if limit is not None and time.monotonic() > limit:
                    raise EvenerError(
                        f"-T {self.options.timeout}: rank {self.first + left[0]} is not done",
                        "look at the other ranks; NCCL_DEBUG=INFO shows who is connected",
                    )

    def _look(self, number: int) -> None:
        status = ctypes.c_int()
        self.check(
            self.nccl.ncclCommGetAsyncError(self.comms[number], ctypes.byref(status)),
            "ncclCommGetAsyncError",
        )
        if status.value not in (0, 7):  # ncclInProgress
            self.check(status.value, f"rank {self.first + number}")

    # --- graphs ---

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        runtime = self._cuda()
        for graph, executable in self._graphs:
            runtime.cudaGraphExecDestroy(executable)
            runtime.cudaGraphDestroy(graph)
        self._graphs = []
        streams = [ctypes.c_void_p(stream.cuda_stream) for stream in self.streams]
        for device, stream in zip(self.devices, streams, strict=True):
            torch.cuda.set_device(device)
            self._cuda_check(runtime.cudaStreamBeginCapture(stream, _THREAD_LOCAL), "begin capture")
        record()
        for device, stream in zip(self.devices, streams, strict=True):
            torch.cuda.set_device(device)
            graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
            self._cuda_check(
                runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)), "end capture"
            )
            self._cuda_check(
                runtime.cudaGraphInstantiateWithFlags(
                    ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
                ),
                "instantiate graph",
            )
            self._graphs.append((graph, executable))
        launches = [
            (executable, s) for (_, executable), s in zip(self._graphs, streams, strict=True)
        ]

        def launch() -> None:
            for executable, stream in launches:
                if status := runtime.cudaGraphLaunch(executable, stream):
                    self._cuda_check(status, "launch graph")

        return launch

    def _cuda(self) -> Any:
        if self._runtime is None:
            major = (torch.version.cuda or "0").split(".")[0]
            try:
                self._runtime = ctypes.CDLL(f"libcudart.so.{major}")
            except OSError as error:
                raise NcclError(
                    f"-G needs libcudart.so.{major}: {error}", "install the CUDA runtime"
                ) from None
            for name in ("cudaGraphLaunch", "cudaStreamBeginCapture"):
                getattr(self._runtime, name).argtypes = [
                    ctypes.c_void_p,
                    ctypes.c_void_p if name == "cudaGraphLaunch" else ctypes.c_int,
                ]
        return self._runtime

    @staticmethod
    def _cuda_check(status: int, what: str) -> None:
        if status:
            raise EvenerError(f"CUDA could not {what}: error {status}", "leave -G out")

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
        """Destroy graphs and communicators."""
        for graph, executable in self._graphs:
            self._cuda().cudaGraphExecDestroy(executable)
            self._cuda().cudaGraphDestroy(graph)
        for comm in self.comms:
            self.nccl.ncclCommDestroy(comm)


class _Memory:
    """GPU memory as torch takes it in (CUDA array interface, version 3)."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
