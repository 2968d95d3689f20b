"""What scripts and tests take from `horovod.common.util`: what is built, and a few small tools."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, called once for each set of (hashable) arguments."""
    return functools.lru_cache(maxsize=None)(function)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework `tensorflow`, `torch` or `mxnet` is served. Only torch is, so far."""
    del verbose
    return ext_base_name == "torch"


def gloo_built(verbose: bool = False) -> bool:
    """True: it comes with torch."""
    del verbose
    return True


def mpi_built(verbose: bool = False) -> bool:
    """False: MPI may start a job, but carries no data."""
    del verbose
    return False


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number (2.28.9: 22809), 0 where torch has none."""
    from evener.horovod.torch.mpi_ops import nccl_built as built

    del verbose
    return built()


def ddl_built(verbose: bool = False) -> bool:
    """False: not used."""
    del verbose
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: not used."""
    del verbose
    return False


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    import torch

    del verbose
    return ext_base_name == "torch" and torch.cuda.is_available()


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Environment variables for the time of a `with` block; None leaves one as it is."""
    before = {name: os.environ.get(name) for name, value in variables.items() if value is not None}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether `num_rank` is 1, 2, 4, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """`items` cut into `parts` runs whose lengths differ by at most one, longer ones first."""
    short, longer = divmod(len(items), parts)
    ends = [short * (i + 1) + min(i + 1, longer) for i in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def is_iterable(value: Any) -> bool:
    """Whether `value` can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True
