"""Kernels of Triton that a model launches itself, while it runs without memory.

A traced step has fake tensors, and what looks for token-wise parts has those of the meta device. To
torch such a tensor is one as any other. A kernel that is launched past the dispatcher gets its
address, which is 0: on a GPU that is an illegal access, after which the process can do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from evener.zero.meter import tensors


@contextlib.contextmanager
def seen(launched: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """Inside, a kernel that is given a tensor without memory is not launched: `launched` gets its
    name and its tensors. Other launches are as ever."""
    if "triton" not in sys.modules and not (
        torch.cuda.is_available() and importlib.util.find_spec("triton")
    ):
        yield
        return
    from triton import KernelInterface

    before = KernelInterface.__getitem__

    def launch(kernel: Any, grid: Any) -> Any:
        run = before(kernel, grid)

        def launched_or_not(*args: Any, **kwargs: Any) -> Any:
            given = list(tensors((args, tuple(kwargs.values()))))
            if any(x.is_meta or isinstance(x, FakeTensor) for x in given):
                return launched(_name(kernel), given)
            return run(*args, **kwargs)

        return launched_or_not

    KernelInterface.__getitem__ = launch
    try:
        yield
    finally:
        KernelInterface.__getitem__ = before


def _name(kernel: Any) -> str:
    """The name of the compiled function, which a tuner wraps."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))
