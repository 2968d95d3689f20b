"""Tensors in the host arena: one map, whole pages, registered with CUDA once where there is a GPU.

torch's allocator of pinned memory rounds every tensor up to a power of two; a 2.7B model would
take 1.5 times its size. Here a tensor takes whole pages of 4 MiB.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref

import torch

from evener import _native
from evener.errors import EvenerError

logger = logging.getLogger("evener.zero")

PAGE = 4 << 20


class HostMemory:
    """An arena of `size` bytes; `tensor` cuts tensors out of it. They keep it alive."""

    def __init__(self, size: int, *, page: int = PAGE, pin: bool = False) -> None:
        """Raises EvenerError where the machine cannot give so much."""
        threads = min(16, len(os.sched_getaffinity(0)))
        try:
            self._arena = _native.HostArena(size, page, threads)
        except MemoryError as error:
            raise EvenerError(
                f"host memory of {size / 1e9:.2f} GB: {error}", "lower the host budget"
            ) from None
        self.pinned = pin and self._register()

    def _register(self) -> bool:
        total = self._arena.usage()[0]
        if not total or not torch.cuda.is_available():
            return False
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(self._arena.address, total, 0)
        if int(code) != 0:
            logger.warning(
                "host arena of %.2f GB stays pageable: cudaHostRegister said %s; copies will be "
                "slower (is `ulimit -l` too low?)",
                total / 1e9,
                code,
            )
            return False
        weakref.finalize(self._arena, runtime.cudaHostUnregister, self._arena.address)
        return True

    def usage(self) -> tuple[int, int, int]:
        """Bytes in all, in use, and the most that were in use."""
        return self._arena.usage()

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in pages of its own; zeros, since no page is ever given back. Raises
        EvenerError where there is no room."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        try:
            offset, length = self._arena.take(size)
        except MemoryError as error:
            raise EvenerError(f"the host arena is full: {error}", "raise the host budget") from None
        buffer = (ctypes.c_char * length).from_address(self._arena.address + offset)
        buffer._arena = self._arena  # type: ignore[attr-defined]  # keeps the map alive
        return torch.frombuffer(buffer, dtype=dtype, count=numel)


def pages(numel: int, itemsize: int, page: int = PAGE) -> int:
    """Bytes that a tensor takes: whole pages."""
    return -(-numel * itemsize // page) * page
