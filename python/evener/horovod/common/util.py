"""What scripts and tests take from `horovod.common.util`: what is built, and a few small tools."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from evener.horovod.common.exceptions import (
    HorovodVersionMismatchError,
    NotServedError,
    get_version_mismatch_message,
)

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, called once for each set of (hashable) arguments."""
    return functools.lru_cache(maxsize=None)(function)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework `tensorflow`, `torch` or `mxnet` is served, and installed."""
    del verbose
    if ext_base_name not in ("torch", "tensorflow"):
        return False
    return importlib.util.find_spec(ext_base_name) is not None


def get_ext_suffix() -> str:
    """How the name of a compiled module ends here."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where upstream would have a compiled module: `args` beside the file `pkg_path`."""
    return str(Path(pkg_path).parent.joinpath(*args)) + get_ext_suffix()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError where framework `ext_name` ("horovod.torch") is not served.

    The other arguments say where upstream's compiled module would be; Evener has none.
    """
    del ext_env_var, pkg_path, args
    if not extension_available(ext_name.rpartition(".")[2]):
        raise NotServedError(
            f"{ext_name} is not part of Evener's Horovod",
            "use horovod.torch or horovod.tensorflow, and install that framework",
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Nothing: no version of a framework is built in."""
    del name, version, exception


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """A function (op, average) -> op for the time when `average` was a flag.

    reduce_ops: has Average and Sum. Raises ValueError where both were given.
    """

    def choose(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError("average and op were both given: op alone is enough")
        if average is not None:
            warnings.warn("`average` is deprecated: use `op`", DeprecationWarning, stacklevel=3)
            return int(reduce_ops.Average if average else reduce_ops.Sum)
        return int(reduce_ops.Average if op is None else op)

    return choose


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or newer. Raises ValueError for what is no version."""
    for given in (ver, target):
        if not isinstance(given, str):
            raise ValueError(f"{given!r} is not a version: give a string such as '1.2.3'")
    if len(target.split(".")) != 3:
        raise ValueError(f"target {target!r} is not of the form major.minor.patch")
    numbers = [[int(n) for n in re.findall(r"\d+", text)[:3]] for text in (ver, target)]
    return numbers[0] >= numbers[1]


def gloo_built(verbose: bool = False) -> bool:
    """True: data of CPUs goes by Gloo, which comes with torch, or by Evener's own transport."""
    del verbose
    return True


def mpi_built(verbose: bool = False) -> bool:
    """False: MPI may start a job, but carries no data."""
    del verbose
    return False


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number (2.28.9: 22809), 0 where torch is not used or has none."""
    if "torch" not in sys.modules:
        return 0
    from evener.horovod.torch.job import nccl_built as built

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
    del verbose
    if ext_base_name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    import torch

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


__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "_cache",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
