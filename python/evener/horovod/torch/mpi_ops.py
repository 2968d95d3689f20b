"""The operations of `horovod.torch`. (The name is upstream's: scripts import from it.)

Tensors: any shape, contiguous, CPU or CUDA, the same dtype on all ranks. Integer averages truncate
toward zero. Where a backend has no reduction for a dtype (int16, bool) or a poor one (float16 and
bfloat16 of Gloo) a wider one is used and the result rounded once.

A function without `async` waits and gives the result; one with it gives a handle for `poll` and
`synchronize`; a trailing underscore means in place; `grouped` ones take a list, which is agreed on
and done as one. Functions that make a new tensor and wait are differentiable (`gradients`). Ranks
may submit in any order; `name` says which operations belong together, and by default the n-th of
its kind in its process set goes with the other ranks' n-th.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import torch

from evener.base.given import ArgumentError
from evener.horovod import dtypes, kinds
from evener.horovod.common import util
from evener.horovod.common.basics import HorovodBasics
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from evener.horovod.common.reductions import Adasum, Average, Max, Min, Product, Sum
from evener.horovod.entry import Entry
from evener.horovod.state import STATE
from evener.horovod.torch import start
from evener.horovod.torch.compression import Compression, Compressor, check_compression
from evener.horovod.torch.gradients import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
)
from evener.horovod.torch.job import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

Tensors = Sequence[torch.Tensor]
P = ParamSpec("P")
R = TypeVar("R")


def _of_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises ArgumentError where its first argument is no tensor, or no sequence
    of tensors where that is what it takes."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        value: Any = args[0] if args else kwargs.get(first, ())
        each = value if first == "tensors" and isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(x, torch.Tensor) for x in each) and (args or first in kwargs):
            kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in each))
            raise ArgumentError(
                f"hvd.{function.__name__}() was given a {kinds} as {first}",
                "give a list of tensors" if first == "tensors" else "give a tensor",
            )
        return function(*args, **kwargs)

    return checked


# --- process sets and the timeline ---------------------------------------------------------------


# What scripts and tests of upstream's reach.
_basics = HorovodBasics()


# --- all-reduce ----------------------------------------------------------------------------------


@_of_tensors
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """Start to reduce `tensor` in place over all ranks; gives a handle for poll and synchronize.

    op: Average (default), Sum, Min, Max, Product or Adasum. The tensor is multiplied by
    prescale_factor before, the result by postscale_factor after. Shape and dtype must be equal on
    all ranks. A rank that has joined contributes zeros, and an average divides by all ranks.
    """
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    outputs = [tensor]
    return start.allreduce([tensor], outputs, False, name, op, factors, process_set)


@_of_tensors
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """As `allreduce_async_`; the result is a new tensor, which synchronize gives."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    outputs = [torch.empty_like(t, requires_grad=False) for t in [tensor]]
    return start.allreduce([tensor], outputs, False, name, op, factors, process_set)


@_of_tensors
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place and give it."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    return start.allreduce_now(tensor, tensor, name, op, factors, process_set)


@_of_tensors
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, as a new tensor. Differentiable."""
    op = _op(op, average)
    check_compression(compression)
    small, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    if torch.is_grad_enabled() and small.requires_grad:
        reduced = AllReduce.apply(name, False, op, factors, process_set, small)
    else:
        reduced = torch.empty_like(small)
        start.allreduce_now(small, reduced, name, op, factors, process_set)
    return compression.decompress(reduced, context)


@_of_tensors
def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """Start to reduce all `tensors` in place, as one operation."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    outputs = tensors
    return start.allreduce(tensors, outputs, True, name, op, factors, process_set)


@_of_tensors
def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """Start to reduce all `tensors`, as one operation, into new ones."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    outputs = [torch.empty_like(t, requires_grad=False) for t in tensors]
    return start.allreduce(tensors, outputs, True, name, op, factors, process_set)


@_of_tensors
def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """Reduce all `tensors` in place and give them."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = start.allreduce(tensors, tensors, True, name, op, factors, process_set, urgent=True)
    return cast("list[torch.Tensor]", synchronize(handle))


@_of_tensors
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """The reductions of all `tensors`, as new ones. Differentiable."""
    op = _op(op, average)
    factors = (prescale_factor, postscale_factor)
    check_compression(compression)
    small = [compression.compress(tensor) for tensor in tensors]
    reduced = AllReduce.apply(name, True, op, factors, process_set, *[t for t, _ in small])
    return _decompressed(compression, reduced, small)


def _decompressed(compression: Any, tensors: Any, small: Any) -> list[torch.Tensor]:
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(tensors, small, strict=True)
    ]


def _op(op: int | None, average: bool | None) -> int | None:
    if average is None:
        return op
    if op is not None:
        raise ValueError("average and op were both given: op alone is enough")
    warnings.warn("`average` is deprecated: use `op`", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


@_of_tensors
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: Any = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to average (or sum) a sparse COO tensor over all ranks.

    Gives a function that waits and gives the result, a sparse tensor: all ranks' entries, gathered,
    not coalesced. op: Average or Sum.
    """
    if op not in (Average, Sum):
        raise ValueError(f"op={op!r}: a sparse tensor can be reduced by hvd.Average and hvd.Sum")
    if not tensor.is_sparse:
        raise ValueError("sparse_allreduce_async is for sparse tensors; use allreduce_async")
    _, _, made = start.member(process_set)
    part = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    entries = tensor.detach()
    indices = entries._indices().t().contiguous()
    first = start.allgather([indices], False, part[0], process_set)
    second = start.allgather([entries._values().contiguous()], False, part[1], process_set)

    def wait() -> torch.Tensor:
        values, where = synchronize(second), synchronize(first)
        if op == Average:
            values = values / len(made.ranks)
        return torch.sparse_coo_tensor(
            where.t(), values.to(entries.dtype), entries.shape, device=entries.device
        )

    return wait


# --- all-gather ----------------------------------------------------------------------------------


@_of_tensors
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> int:
    """Start to concatenate all ranks' tensors along dimension 0, in which they may differ."""
    return start.allgather([tensor], False, name, process_set)


@_of_tensors
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, concatenated along dimension 0 in rank order. Differentiable."""
    return cast(torch.Tensor, AllGather.apply(name, False, process_set, tensor))


@_of_tensors
def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: Any = global_process_set
) -> int:
    """Start to gather each of `tensors`, as one operation."""
    return start.allgather(tensors, True, name, process_set)


@_of_tensors
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: Any = global_process_set
) -> list[torch.Tensor]:
    """All ranks' tensors, each concatenated along dimension 0. Differentiable."""
    return list(AllGather.apply(name, True, process_set, *tensors))


# --- broadcast -----------------------------------------------------------------------------------


@_of_tensors
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """Start to overwrite `tensor` with (global) rank `root_rank`'s."""
    work = start.detached(tensor)
    return start.broadcast([work], root_rank, name, process_set, result=tensor)


@_of_tensors
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """Start to fetch rank `root_rank`'s tensor; the result is a new one."""
    copy = start.detached(tensor).clone()
    return start.broadcast([copy], root_rank, name, process_set, result=copy)


@_of_tensors
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with rank `root_rank`'s and give it."""
    return cast(torch.Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


@_of_tensors
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Rank `root_rank`'s tensor, as a new one. Differentiable."""
    return cast(torch.Tensor, Broadcast.apply(tensor, root_rank, name, process_set))


def broadcast_many(
    named: Sequence[tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: Any = global_process_set,
) -> None:
    """Overwrite all tensors with rank `root_rank`'s: one agreement, few large messages.

    Any strides; the tensors may be on several devices. Raises HorovodInternalError where names,
    shapes or dtypes differ between ranks.
    """
    handles = []
    tensors = [(name, tensor.detach()) for name, tensor in named]
    for device in dict.fromkeys(tensor.device for _, tensor in tensors):
        mine = [(name, tensor) for name, tensor in tensors if tensor.device == device]
        for name, tensor in mine:
            if tensor.dtype not in dtypes.DTYPE_NUMBERS:
                raise ValueError(f"{name}: tensor type {tensor.type()} is not supported.")
        handles.append(
            start.broadcast(
                [tensor for _, tensor in mine],
                root_rank,
                None,
                process_set,
                labels=[name for name, _ in mine],
            )
        )
    for handle in handles:
        synchronize(handle)


# --- all-to-all ----------------------------------------------------------------------------------


@_of_tensors
def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """Start to send slice r of dimension 0 to rank r. See `alltoall`."""
    return start.alltoall(tensor, splits, name, process_set)


@_of_tensors
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """The slices that all ranks sent here, concatenated. Differentiable.

    splits: rows of each slice, int32 [ranks] or a list; without it all slices are equal. Where it
    is given, so are the received rows of each rank, int32, on its device: (tensor, received).
    """
    return AllToAll.apply(tensor, splits, name, process_set)


# --- reduce-scatter ------------------------------------------------------------------------------


@_of_tensors
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce over all ranks and keep this rank's rows of dimension 0.

    Where the number of ranks does not divide them, the first ranks get one more.
    """
    factors = (prescale_factor, postscale_factor)
    return start.reducescatter([tensor], False, name, op, factors, process_set)


@_of_tensors
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction. Differentiable."""
    check_compression(compression)
    small, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    reduced = ReduceScatter.apply(name, False, op, factors, process_set, small)
    return compression.decompress(reduced, context)


@_of_tensors
def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce and scatter each of `tensors`, as one operation."""
    factors = (prescale_factor, postscale_factor)
    return start.reducescatter(tensors, True, name, op, factors, process_set)


@_of_tensors
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """This rank's rows of each reduction. Differentiable."""
    check_compression(compression)
    small = [compression.compress(tensor) for tensor in tensors]
    factors = (prescale_factor, postscale_factor)
    given = [tensor for tensor, _ in small]
    reduced = ReduceScatter.apply(name, True, op, factors, process_set, *given)
    return _decompressed(compression, reduced, small)


# --- the rest ------------------------------------------------------------------------------------


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all ranks of the set are here.

    As upstream's it is announced at the end of a cycle (HOROVOD_CYCLE_TIME), together with what was
    submitted before it.
    """
    handle = start.submit(kinds.BARRIER, process_set, None, urgent=False, finish=None)
    STATE.engine.synchronize(handle, at_once=False)


def join(device: int = -1) -> int:
    """This rank has no more data: wait until all ranks have joined; gives the last one's rank.

    Meanwhile it takes part in the others' all-reduces, and in the steps of their
    DistributedOptimizers, with zeros, on GPU `device` where they are on GPUs (-1: the current one).
    Its own parameters stay as they are, as upstream's: broadcast them from the rank that is given.
    Other operations of theirs raise HorovodInternalError. Raises ValueError for a GPU that is not
    there: the others' operations, which would be the first to find out, wait for this rank.
    """
    engine = STATE.engine
    if torch.cuda.is_available() and device >= torch.cuda.device_count():
        raise ValueError(
            f"join(device={device}): this process has {torch.cuda.device_count()} GPU(s); give a "
            "number below that, or none for the current one"
        )
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    engine.join_device = device
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the steps that were begun are done, on all ranks
    entry = Entry(
        kinds.JOIN,
        "join",
        splits=[engine.steps.joins()],
        finish=lambda _outputs, answer: answer.value,
    )
    return cast(int, engine.synchronize(engine.submit(entry, urgent=True)))


def poll(handle: int) -> bool:
    """Whether the operation has ended: synchronize will not wait then."""
    return STATE.engine.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for the operation and give its result; None for an unknown or used handle.

    Raises HorovodInternalError where it failed or the ranks did not agree.
    """
    return STATE.engine.synchronize(handle)


# Upstream's names for its differentiable operations.
HorovodAllreduce = HorovodGroupedAllreduce = AllReduce
HorovodAllgather = HorovodGroupedAllgather = AllGather
HorovodBroadcast, HorovodAlltoall = Broadcast, AllToAll
HorovodReducescatter = HorovodGroupedReducescatter = ReduceScatter
handle_average_backwards_compatibility = util.get_average_backwards_compatibility_fun(
    SimpleNamespace(Average=Average, Sum=Sum)
)
check_installed_version = util.check_installed_version
get_average_backwards_compatibility_fun = util.get_average_backwards_compatibility_fun
gpu_available = util.gpu_available
num_rank_is_power_2 = util.num_rank_is_power_2

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
