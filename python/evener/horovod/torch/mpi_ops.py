"""The operations of `horovod.torch`. (The name is upstream's: scripts import from it.)

Tensors: any shape, contiguous, CPU or CUDA, the same dtype on all ranks. Integer averages truncate
toward zero. Where Gloo has no reduction for a dtype (int16, bool) or a poor one (float16, bfloat16)
a wider one is used on the CPU and the result rounded once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from evener.horovod.common.exceptions import HorovodInternalError, NotBuiltError
from evener.horovod.engine import Fields, Request
from evener.horovod.state import STATE
from evener.horovod.torch.compression import Compression, Compressor

Average, Sum, Adasum, Min, Max, Product = range(6)

_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

_WIDER_ON_CPU = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.int32,
}


# --- the job -------------------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find the other ranks and start. Collective; does nothing where it is done already.

    comm: None or the list of all ranks; process_sets: None. Raises NotBuiltError for others,
    RendezvousError where the ranks do not find each other, SettingError for a bad variable.
    """
    STATE.init(comm, process_sets)


def shutdown() -> None:
    """End what `init` began. `init` may follow again."""
    STATE.shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not after it."""
    return STATE.initialized


def rank() -> int:
    """The place of this process among all, 0 .. size()-1."""
    return STATE.ranks.rank


def size() -> int:
    """The number of processes."""
    return STATE.ranks.size


def local_rank() -> int:
    """The place of this process among those of its node."""
    return cast(int, STATE.ranks.local_rank)


def local_size() -> int:
    """The number of processes on this node."""
    return cast(int, STATE.ranks.local_size)


def cross_rank() -> int:
    """The place of this process among those of all nodes that have the same local rank."""
    return cast(int, STATE.ranks.cross_rank)


def cross_size() -> int:
    """The number of processes that have the same local rank."""
    return cast(int, STATE.ranks.cross_size)


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes."""
    ranks = STATE.ranks
    told = _collect("is_homogeneous", STATE.engine.automatic_name("homogeneous"), ranks.local_size)
    return len(set(told)) == 1


def mpi_threads_supported() -> bool:
    """False: no MPI is used."""
    _ = STATE.ranks
    return False


def mpi_enabled() -> bool:
    """False: collectives are NCCL's and Gloo's, also under mpirun."""
    return False


def mpi_built() -> bool:
    """False: collectives are NCCL's and Gloo's, also under mpirun."""
    return False


def gloo_enabled() -> bool:
    """True."""
    return True


def gloo_built() -> bool:
    """True: it comes with torch."""
    return True


def nccl_built() -> int:
    """NCCL's version as a number (2.28.9: 22809), 0 where torch has none."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> int:
    """0: not used."""
    return 0


def ccl_built() -> int:
    """0: not used."""
    return 0


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


class ProcessSet:
    """The processes of an operation. Only `global_process_set` exists; others are planned."""

    process_set_id: int | None = None

    def __init__(self, *_args: Any) -> None:
        raise NotBuiltError("hvd.ProcessSet")

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(size()))

    def rank(self) -> int:
        """This process's place."""
        return rank()

    def size(self) -> int:
        """The number of processes."""
        return size()

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return True


global_process_set = ProcessSet.__new__(ProcessSet)
global_process_set.process_set_id = 0


# --- all-reduce ----------------------------------------------------------------------------------


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

    op: Average (default), Sum, Min, Max or Product. The tensor is multiplied by prescale_factor
    before, the result by postscale_factor after. Shape and dtype must be equal on all ranks.
    """
    return _allreduce(
        tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )


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
    out = torch.empty_like(tensor, requires_grad=False)
    return _allreduce(
        tensor, out, average, name, op, prescale_factor, postscale_factor, process_set
    )


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
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return cast(torch.Tensor, synchronize(handle))


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
    small, context = compression.compress(tensor)
    reduced = _AllReduce.apply(small, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


class _AllReduce(torch.autograd.Function):
    """The gradient of a reduction is the same reduction of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *arguments: Any) -> Any:
        ctx.arguments = arguments
        op, prescale, postscale, process_set = arguments
        handle = allreduce_async(tensor, None, name, op, prescale, postscale, process_set)
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        grad = grads[0].contiguous()
        handle = allreduce_async(grad, None, None, op, prescale, postscale, process_set)
        return (synchronize(handle), *[None] * 5)


def _allreduce(
    tensor: torch.Tensor,
    out: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: Any,
) -> int:
    op = _op(op, average)
    source, target = _check(tensor, process_set), out.detach()

    def run(group: dist.ProcessGroup, told: Sequence[Fields]) -> torch.Tensor:
        target.copy_(_reduced(source, op, prescale, postscale, len(told), group))
        return out

    agree = {
        "tensor shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": tensor.device.type,
        "reduction": _OP_NAMES[op],
        "prescale factor": prescale,
        "postscale factor": postscale,
    }
    return _submit("allreduce", name, agree, {}, run, source)


def _reduced(
    source: torch.Tensor,
    op: int,
    prescale: float,
    postscale: float,
    ranks: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """A new tensor, perhaps of a wider dtype than `source`."""
    wide = _WIDER_ON_CPU.get(source.dtype, source.dtype) if not source.is_cuda else source.dtype
    if source.is_cuda and source.dtype in (torch.int16, torch.bool):
        wide = torch.int32
    work = source.to(wide, copy=True, memory_format=torch.contiguous_format)
    work = _scaled(work, prescale)
    if work.numel():
        dist.all_reduce(work, _OPS[op], group=group)
    if op == Average and not work.is_floating_point() and not work.is_complex():
        if postscale == 1.0:
            return torch.div(work, ranks, rounding_mode="trunc")
        return (work.double() * postscale / ranks).trunc().to(work.dtype)
    if op == Average:
        work.div_(ranks)
    return _scaled(work, postscale)


def _scaled(work: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return work
    if work.is_floating_point() or work.is_complex():
        return work.mul_(factor)
    return (work.double() * factor).trunc().to(work.dtype)


def _op(op: int | None, average: bool | None) -> int:
    if average is not None:
        if op is not None:
            raise ValueError("average and op were both given: op alone is enough")
        warnings.warn("`average` is deprecated: use `op`", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op == Adasum:
        raise NotBuiltError("op=hvd.Adasum", "use op=hvd.Average")
    if op not in _OPS:
        raise ValueError(f"op={op!r} is not one of hvd.{', hvd.'.join(_OP_NAMES)}")
    return op


# --- all-gather ----------------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> int:
    """Start to concatenate all ranks' tensors along dimension 0, in which they may differ."""
    source = _check(tensor, process_set)
    rows = source.shape[0] if source.dim() else 1

    def run(group: dist.ProcessGroup, told: Sequence[Fields]) -> torch.Tensor:
        return _gathered(source, [int(fields["rows"]) for fields in told], group)

    agree = {
        "dimensions": source.dim(),
        "tensor shape behind the first dimension": list(source.shape[1:]),
        "dtype": str(source.dtype),
        "device": source.device.type,
    }
    return _submit("allgather", name, agree, {"rows": rows}, run, source)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, concatenated along dimension 0 in rank order. Differentiable."""
    return cast(torch.Tensor, _AllGather.apply(tensor, name, process_set))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: Any) -> Any:
        ctx.process_set = process_set
        ctx.rows = tensor.shape[0] if tensor.dim() else 1
        ctx.scalar = not tensor.dim()
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Upstream averages here, although the derivative is a sum; scripts were tuned with that.
        reduced = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set).tolist()
        mine = reduced.narrow(0, sum(rows[: rank()]), ctx.rows)
        return mine.reshape(()) if ctx.scalar else mine, None, None


def _gathered(source: torch.Tensor, rows: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Bytes travel, so that every dtype works; ragged parts are padded to the longest."""
    shape = source.shape[1:]
    if source.dim() == 0:
        source = source.reshape(1)
    row_bytes = source.element_size() * shape.numel()
    longest = max(rows) * row_bytes
    if longest == 0:
        return source.new_empty((sum(rows), *shape))
    part = torch.zeros(longest, dtype=torch.uint8, device=source.device)
    mine = source.reshape(-1).view(torch.uint8)
    part[: mine.numel()] = mine
    whole = torch.empty(longest * len(rows), dtype=torch.uint8, device=source.device)
    dist.all_gather_into_tensor(whole, part, group=group)
    table = whole.view(len(rows), longest)
    parts = [table[index, : count * row_bytes] for index, count in enumerate(rows)]
    return torch.cat(parts).view(source.dtype).view(sum(rows), *shape)


# --- broadcast -----------------------------------------------------------------------------------


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """Start to overwrite `tensor` with rank `root_rank`'s."""
    return _broadcast(_check(tensor, process_set), tensor, root_rank, name)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """Start to fetch rank `root_rank`'s tensor; the result is a new one."""
    copy = _check(tensor, process_set).clone()
    return _broadcast(copy, copy, root_rank, name)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with rank `root_rank`'s and give it."""
    return cast(torch.Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Rank `root_rank`'s tensor, as a new one. Differentiable."""
    return cast(torch.Tensor, _Broadcast.apply(tensor, root_rank, name, process_set))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # As upstream: the average of the gradients, which only the root keeps.
        reduced = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        return (reduced if rank() == ctx.root_rank else torch.zeros_like(reduced), *[None] * 3)


def _broadcast(work: torch.Tensor, out: torch.Tensor, root_rank: int, name: str | None) -> int:
    _check_root(root_rank)

    def run(group: dist.ProcessGroup, _told: Sequence[Fields]) -> torch.Tensor:
        if work.numel():
            dist.broadcast(work.view(-1).view(torch.uint8), root_rank, group=group)
        return out

    agree = {
        "tensor shape": list(work.shape),
        "dtype": str(work.dtype),
        "device": work.device.type,
        "root rank": root_rank,
    }
    return _submit("broadcast", name, agree, {}, run, work)


def broadcast_many(named: Sequence[tuple[str, torch.Tensor]], root_rank: int) -> None:
    """Overwrite all tensors with rank `root_rank`'s: one agreement, few large messages.

    Any strides; the tensors may be on several devices.
    """
    _check_root(root_rank)
    handles = []
    tensors = [(name, tensor.detach()) for name, tensor in named]
    for device in dict.fromkeys(tensor.device for _, tensor in tensors):
        mine = [(name, tensor) for name, tensor in tensors if tensor.device == device]
        agree: dict[str, Any] = {"root rank": root_rank, "number of tensors": len(mine)}
        for name, tensor in mine:
            agree[f"tensor {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
        run = _broadcasts([tensor for _, tensor in mine], root_rank)
        handles.append(_submit("broadcast of many", None, agree, {}, run, mine[0][1]))
    for handle in handles:
        synchronize(handle)


_FUSED = 32 << 20


def _broadcasts(
    tensors: list[torch.Tensor], root_rank: int
) -> Callable[[dist.ProcessGroup, Sequence[Fields]], None]:
    def send(chunk: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in chunk]
        packed = torch.cat(parts)
        dist.broadcast(packed, root_rank, group=group)
        if dist.get_rank() == root_rank:
            return
        offset = 0
        for tensor, part in zip(chunk, parts, strict=True):
            # Aligned for a view of any dtype only after a copy.
            piece = packed[offset : offset + part.numel()].clone()
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
            offset += part.numel()

    def run(group: dist.ProcessGroup, _told: Sequence[Fields]) -> None:
        chunk: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            if not tensor.numel():
                continue
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _FUSED:
                send(chunk, group)
                chunk, size = [], 0
        if chunk:
            send(chunk, group)

    return run


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < size():
        raise ValueError(f"root_rank={root_rank} is not a rank of this job of {size()}")


# --- the rest ------------------------------------------------------------------------------------


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all ranks are here."""
    _check_set(process_set)
    _collect("barrier", STATE.engine.automatic_name("barrier"), None)


def poll(handle: int) -> bool:
    """Whether the operation has ended: synchronize will not wait then."""
    return STATE.engine.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for the operation and give its result; None for an unknown or used handle.

    Raises HorovodInternalError where it failed or the ranks did not agree.
    """
    return STATE.engine.synchronize(handle)


def _planned(what: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotBuiltError(f"hvd.{what}")

    refuse.__name__ = what
    refuse.__doc__ = "Planned; raises NotBuiltError."
    return refuse


grouped_allreduce = _planned("grouped_allreduce")
grouped_allreduce_ = _planned("grouped_allreduce_")
grouped_allreduce_async = _planned("grouped_allreduce_async")
grouped_allreduce_async_ = _planned("grouped_allreduce_async_")
sparse_allreduce_async = _planned("sparse_allreduce_async")
grouped_allgather = _planned("grouped_allgather")
grouped_allgather_async = _planned("grouped_allgather_async")
alltoall = _planned("alltoall")
alltoall_async = _planned("alltoall_async")
reducescatter = _planned("reducescatter")
reducescatter_async = _planned("reducescatter_async")
grouped_reducescatter = _planned("grouped_reducescatter")
grouped_reducescatter_async = _planned("grouped_reducescatter_async")
join = _planned("join")
add_process_set = _planned("add_process_set")
remove_process_set = _planned("remove_process_set")
start_timeline = _planned("start_timeline")
stop_timeline = _planned("stop_timeline")


def _collect(kind: str, name: str, value: Any) -> list[Any]:
    """Every rank's `value` (JSON's types), in rank order."""

    def run(_group: dist.ProcessGroup, told: Sequence[Fields]) -> list[Any]:
        return [fields["value"] for fields in told]

    handle = STATE.engine.submit(Request(kind, name, {}, {"value": value}, run))
    return cast("list[Any]", STATE.engine.synchronize(handle))


def _submit(
    kind: str,
    name: str | None,
    agree: Fields,
    tell: Fields,
    run: Callable[[dist.ProcessGroup, Sequence[Fields]], Any],
    tensor: torch.Tensor,
) -> int:
    engine = STATE.engine
    name = engine.automatic_name(kind) if name is None else name
    return engine.submit(Request(kind, name, agree, tell, run, tensor))


def _check(tensor: torch.Tensor, process_set: Any) -> torch.Tensor:
    """The detached tensor. Raises ValueError for what no rank could ever submit."""
    _ = STATE.engine
    _check_set(process_set)
    if tensor.layout != torch.strided:
        raise NotBuiltError("a collective on a sparse tensor", "use a dense one")
    if tensor.is_complex():
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach()


def _check_set(process_set: Any) -> None:
    if process_set is not global_process_set and process_set is not None:
        raise NotBuiltError("a process set other than hvd.global_process_set")


__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
]
