"""The job, and the operations as ops of TensorFlow with their gradients. (The name is upstream's.)

An operation of a graph belongs to that of the same name on the other ranks; in eager mode, where
one runs after the other, names do not matter. An op that the ranks do not agree on raises
tf.errors.FailedPreconditionError on all of them, a mistake that one rank sees by itself
tf.errors.InvalidArgumentError, a rank that is gone HorovodInternalError (in a graph, where only
TensorFlow's own errors can be raised, tf.errors.UnknownError).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from evener.base import settings
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from evener.horovod.common.reductions import Adasum, Average, Max, Min, Product, Sum
from evener.horovod.tensorflow._library import ops
from evener.horovod.tensorflow._state import STATE
from evener.horovod.tensorflow.util import _executing_eagerly

# --- the job -------------------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find the other ranks and start. Collective; does nothing where it is done already.

    comm: None, the list of all ranks, or an mpi4py communicator. process_sets: those that exist
    from the start, a list of ProcessSet; or "dynamic". Raises RendezvousError where the ranks do
    not find each other, or where some of them use another framework.
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
    """How many processes there are."""
    return STATE.ranks.size


def local_rank() -> int:
    """The place of this process among those of its node."""
    return int(STATE.ranks.local_rank or 0)


def local_size() -> int:
    """How many processes this node has."""
    return int(STATE.ranks.local_size or 1)


def cross_rank() -> int:
    """The number of this node among those that have a process of this local rank."""
    return int(STATE.ranks.cross_rank or 0)


def cross_size() -> int:
    """How many nodes have a process of this local rank."""
    return int(STATE.ranks.cross_size or 1)


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes."""
    return STATE.engine.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of the negotiation from now on; rank 0 does."""
    STATE.engine.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file."""
    STATE.engine.stop_timeline()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all processes of the set are here."""
    STATE.engine.barrier(_number(process_set))


def gloo_built(verbose: bool = False) -> bool:
    """True: data goes over TCP without MPI."""
    del verbose
    return True


def gloo_enabled() -> bool:
    """True."""
    return True


def _no(verbose: bool = False) -> bool:
    """False: not used."""
    del verbose
    return False


def nccl_built(verbose: bool = False) -> int:
    """0: TensorFlow's tensors go through the host's memory."""
    del verbose
    return 0


mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _no
cuda_built = rocm_built = _no


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether `num_rank` is 1, 2, 4, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The reduction, where a script may still say `average`. ValueError where both were given."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else op


# --- ops -----------------------------------------------------------------------------------------


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not in use: give it to hvd.init or add_process_set")
    if number != 0:
        STATE.engine.set_of(number)  # ValueError where it was removed, or never was
    return number


def _set(number: int) -> ProcessSet:
    """A process set by its number, for gradients."""
    if number == 0:
        return global_process_set
    made = ProcessSet(STATE.engine.set_of(number).ranks)
    made.process_set_id = number
    return made


def _normalize_name(name: str) -> str:
    """A name that TensorFlow takes."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _named(kind: str, name: str | None, tensors: Sequence[Any]) -> str | None:
    if name is not None:
        return _normalize_name(name)
    if _executing_eagerly() or not tensors:
        return None
    ends = tensors[:1] if len(tensors) == 1 else (tensors[0], tensors[-1])
    return _normalize_name("_".join([f"Horovod{kind}", *[tensor.name for tensor in ends]]))


def _op(kind: str, *inputs: Any, name: str | None, **attributes: Any) -> Any:
    """Run the op (eager), or put it into the graph."""
    eager = _executing_eagerly()
    function = getattr(ops(), f"evener_{kind}")
    if not eager:
        return function(*inputs, name=name, **attributes)
    try:
        # Whoever calls waits for it.
        return function(*inputs, name=name, urgent=True, **attributes)
    except tf.errors.UnknownError as error:
        raise HorovodInternalError(
            error.message,
            "look for the first error on the other ranks; call hvd.shutdown() and hvd.init() to "
            "begin anew",
        ) from None


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [tf.convert_to_tensor(value) for value in values]


def _of(op: Any) -> dict[str, Any]:
    """The attributes that a gradient's collective has from its op."""
    return {
        "ignore_name_scope": op.get_attr("ignore_name_scope"),
        "process_set": _set(op.get_attr("process_set_id")),
    }


def _scaled(op: Any) -> dict[str, Any]:
    names = ("prescale_factor", "postscale_factor")
    return {
        "op": op.get_attr("reduce_op"),
        **{name: op.get_attr(name) for name in names},
        **_of(op),
    }


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient: int = 0,
) -> Any:
    """The reduction of all ranks' tensors of one shape and type. Differentiable.

    gradient: its mark, see `light`.
    """
    tensor = tf.convert_to_tensor(tensor)
    return _op(
        "allreduce",
        tensor,
        name=_named("Allreduce", name, [tensor]),
        reduce_op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
        gradient=gradient,
    )


@tf.RegisterGradient("EvenerAllreduce")  # type: ignore[untyped-decorator]
def _allreduce_grad(op: Any, grad: Any) -> Any:
    return _allreduce(grad, **_scaled(op))


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient: int = 0,
) -> list[Any]:
    """The reductions of several tensors of one type, which are done as one operation."""
    tensors = _tensors(tensors)
    return list(
        _op(
            "grouped_allreduce",
            tensors,
            name=_named("GroupedAllreduce", name, tensors),
            reduce_op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            ignore_name_scope=ignore_name_scope,
            process_set_id=_number(process_set),
            gradient=gradient,
        )
    )


@tf.RegisterGradient("EvenerGroupedAllreduce")  # type: ignore[untyped-decorator]
def _grouped_allreduce_grad(op: Any, *grads: Any) -> Any:
    return _grouped_allreduce(list(grads), **_scaled(op))


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All ranks' tensors, one after the other along the first dimension, which may differ."""
    tensor = tf.convert_to_tensor(tensor)
    return _op(
        "allgather",
        tensor,
        name=_named("Allgather", name, [tensor]),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def _own_part(grad: Any, tensor: Any, ignore_name_scope: bool, process_set: ProcessSet) -> Any:
    """The rows of an average over the ranks that came from this one."""
    options: dict[str, Any] = {"ignore_name_scope": ignore_name_scope, "process_set": process_set}
    grad = _allreduce(grad, op=Average, **options)
    rows = allgather(tf.reshape(tf.shape(tensor)[0], [1]), **options)
    place = process_set.rank()
    if place is None:
        raise ValueError(f"this rank is not in {process_set}")
    return tf.split(grad, tf.reshape(rows, [process_set.size()]), axis=0)[place]


@tf.RegisterGradient("EvenerAllgather")  # type: ignore[untyped-decorator]
def _allgather_grad(op: Any, grad: Any) -> Any:
    return _own_part(grad, op.inputs[0], **_of(op))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors of one type, as one operation."""
    tensors = _tensors(tensors)
    return list(
        _op(
            "grouped_allgather",
            tensors,
            name=_named("GroupedAllgather", name, tensors),
            ignore_name_scope=ignore_name_scope,
            process_set_id=_number(process_set),
        )
    )


@tf.RegisterGradient("EvenerGroupedAllgather")  # type: ignore[untyped-decorator]
def _grouped_allgather_grad(op: Any, *grads: Any) -> Any:
    return [
        _own_part(grad, tensor, **_of(op)) for grad, tensor in zip(grads, op.inputs, strict=True)
    ]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of the (global) rank `root_rank`."""
    tensor = tf.convert_to_tensor(tensor)
    return _op(
        "broadcast",
        tensor,
        name=_named("Broadcast", name, [tensor]),
        root_rank=root_rank,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


@tf.RegisterGradient("EvenerBroadcast")  # type: ignore[untyped-decorator]
def _broadcast_grad(op: Any, grad: Any) -> Any:
    reduced = _allreduce(grad, op=Average, **_of(op))
    return reduced if rank() == op.get_attr("root_rank") else reduced * 0


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give variables the values that they have on the rank `root_rank`; the variables."""
    values = [
        broadcast(
            variable,
            root_rank,
            name=None if name is None else f"{name}_{index}",
            process_set=process_set,
        )
        for index, variable in enumerate(variables)
    ]
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, `splits` (int32) of them or all alike, and get theirs.

    Gives the rows; where splits were given (rows, how many came from each rank).
    """
    tensor = tf.convert_to_tensor(tensor)
    given = [] if splits is None else splits
    output, received = _op(
        "alltoall",
        tensor,
        tf.cast(
            tf.convert_to_tensor(given, dtype=None if len_known(given) else tf.int32), tf.int32
        ),
        name=_named("Alltoall", name, [tensor]),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )
    return output if splits is None else (output, received)


def len_known(value: Any) -> bool:
    """Whether it has elements, or is a tensor, so that its type is known."""
    return isinstance(value, tf.Tensor | tf.Variable) or len(value) > 0


@tf.RegisterGradient("EvenerAlltoall")  # type: ignore[untyped-decorator]
def _alltoall_grad(op: Any, grad: Any, _received: Any) -> Any:
    back, _ = alltoall(grad, splits=op.outputs[1], **_of(op))
    return [back, None]


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction; the first ranks get those that are left over."""
    _scattered(op)
    tensor = tf.convert_to_tensor(tensor)
    return _op(
        "reducescatter",
        tensor,
        name=_named("Reducescatter", name, [tensor]),
        reduce_op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def _scattered(op: int) -> None:
    if op == Adasum:
        raise NotImplementedError("The Adasum reduction does not support reducescatter.")


def _whole(op: Any, grad: Any) -> Any:
    """The gradient of a reduce-scatter: an all-gather, times what the reduction did."""
    options = _of(op)
    factor = op.get_attr("prescale_factor") * op.get_attr("postscale_factor")
    if op.get_attr("reduce_op") == Sum:
        factor *= options["process_set"].size()
    if factor != 1.0:
        grad = grad * tf.cast(factor, grad.dtype)
    return allgather(grad, **options)


@tf.RegisterGradient("EvenerReducescatter")  # type: ignore[untyped-decorator]
def _reducescatter_grad(op: Any, grad: Any) -> Any:
    return _whole(op, grad)


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`_reducescatter` of several tensors of one type, as one operation."""
    _scattered(op)
    tensors = _tensors(tensors)
    return list(
        _op(
            "grouped_reducescatter",
            tensors,
            name=_named("GroupedReducescatter", name, tensors),
            reduce_op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            ignore_name_scope=ignore_name_scope,
            process_set_id=_number(process_set),
        )
    )


@tf.RegisterGradient("EvenerGroupedReducescatter")  # type: ignore[untyped-decorator]
def _grouped_reducescatter_grad(op: Any, *grads: Any) -> Any:
    return [_whole(op, grad) for grad in grads]


def join() -> Any:
    """This rank has no more data: wait until all have joined, as if with zeros in each all-reduce.

    Gives the rank that joined last.
    """
    return _op("join", name=None)


def _place(what: int, process_set_id: int = 0, name: str | None = None) -> Any:
    return ops().evener_place(what=what, process_set_id=process_set_id, name=name)


def rank_op(name: str | None = None) -> Any:
    """`rank()` when the op runs."""
    return _place(0, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The size of a process set when the op runs."""
    return _place(1, process_set_id, name)


def local_rank_op(name: str | None = None) -> Any:
    """`local_rank()` when the op runs."""
    return _place(2, name=name)


def local_size_op(name: str | None = None) -> Any:
    """`local_size()` when the op runs."""
    return _place(3, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this rank is in the process set when the op runs, else 0."""
    return _place(4, process_set_id, name)


def elastic_job() -> bool:
    """Whether sizes may change while the process lives."""
    return bool(settings.EVENER_ELASTIC.get())


_basics = SimpleNamespace(
    init=init,
    shutdown=shutdown,
    is_initialized=is_initialized,
    rank=rank,
    size=size,
    local_rank=local_rank,
    local_size=local_size,
    cross_rank=cross_rank,
    cross_size=cross_size,
    is_homogeneous=is_homogeneous,
    start_timeline=start_timeline,
    stop_timeline=stop_timeline,
    mpi_built=mpi_built,
    gloo_built=gloo_built,
    nccl_built=nccl_built,
    _get_process_set_ids_and_ranks=get_process_set_ids_and_ranks,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "grouped_allgather",
    "init",
    "join",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
