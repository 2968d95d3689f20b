"""All-reduces and reduce-scatters as scripts call them: averages, sparse tensors, compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Adasum, Average, Sum
from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow.compression import Compression
from evener.horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility
from evener.horovod.tensorflow.slices import gather_together


def _members(process_set: ProcessSet, dtype: Any) -> Any:
    """How many ranks the set has: a number, or in an elastic job what it is when the op runs."""
    if mpi_ops.elastic_job():
        return tf.cast(mpi_ops.size_op(mpi_ops._number(process_set)), dtype)
    return tf.cast(process_set.size(), dtype)


def _checked(op: int, sparse: bool, factors: tuple[float, float], process_set: ProcessSet) -> None:
    if sparse and op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not take tf.IndexedSlices: give sparse_as_dense=True"
        )
    if sparse and op not in (Sum, Average):
        raise NotImplementedError("Only Sum and Average are supported with tf.IndexedSlices")
    if sparse and factors != (1.0, 1.0):
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if not mpi_ops.check_num_rank_power_of_2(mpi_ops.size()):
            raise NotImplementedError("Adasum needs a number of ranks that is a power of 2.")


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    *,
    _gradient: int = 0,
) -> Any:
    """The reduction of all ranks' tensors, of one shape and type; default: their average.

    tensor: a tensor, a variable, or tf.IndexedSlices, whose rows are gathered. Differentiable.
    """
    op = handle_average_backwards_compatibility(op, average)
    sparse = isinstance(tensor, tf.IndexedSlices)
    _checked(op, sparse, (prescale_factor, postscale_factor), process_set)
    if sparse:
        with tf.device(device_sparse):
            (gathered,) = _gathered([tensor], op, process_set, ignore_name_scope)
        return gathered
    with tf.device(device_dense):
        packed, ctx = compression.compress(tf.convert_to_tensor(tensor))
        reduced = mpi_ops._allreduce(
            packed,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            ignore_name_scope=ignore_name_scope,
            process_set=process_set,
            gradient=_gradient,
        )
        return compression.decompress(reduced, ctx)


def _gathered(
    slices: Sequence[Any], op: int, process_set: ProcessSet, ignore_name_scope: bool
) -> list[Any]:
    """All ranks' slices, of each of `slices` by itself; Average divides them."""
    options: dict[str, Any] = {"process_set": process_set, "ignore_name_scope": ignore_name_scope}
    # The sizes of an elastic job are not known where the graph is made.
    if len(slices) > 1 and not mpi_ops.elastic_job():
        found = gather_together(slices, options)
    else:
        found = [
            (mpi_ops.allgather(each.values, **options), mpi_ops.allgather(each.indices, **options))
            for each in slices
        ]
    result = []
    for each, (values, indices) in zip(slices, found, strict=True):
        if op == Average:
            values = values / _members(process_set, values.dtype)
        result.append(tf.IndexedSlices(values, indices, dense_shape=each.dense_shape))
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    _gradient: int = 0,
) -> Any:
    """`allreduce` of several, agreed on and done as one (one for each type, two for the sparse)."""
    if not tensors:
        return tensors
    op = handle_average_backwards_compatibility(op, average)
    results: list[Any] = [None] * len(tensors)
    sparse = [i for i, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)]
    _checked(op, bool(sparse), (prescale_factor, postscale_factor), process_set)
    with tf.device(device_sparse):
        slices = _gathered([tensors[i] for i in sparse], op, process_set, ignore_name_scope)
        for index, gathered in zip(sparse, slices, strict=True):
            results[index] = gathered
    with tf.device(device_dense):
        by_type: dict[Any, list[tuple[int, Any, Any]]] = {}
        for index, each in enumerate(tensors):
            if index not in sparse:
                packed, ctx = compression.compress(tf.convert_to_tensor(each))
                by_type.setdefault(packed.dtype, []).append((index, packed, ctx))
        for number, (dtype, group) in enumerate(by_type.items()):
            reduced = mpi_ops._grouped_allreduce(
                [packed for _, packed, _ in group],
                name=name if name is None or number == 0 else f"{name}_{dtype.name}",
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                ignore_name_scope=ignore_name_scope,
                process_set=process_set,
                gradient=_gradient,
            )
            for (index, _, ctx), result in zip(group, reduced, strict=True):
                results[index] = compression.decompress(result, ctx)
    return results


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction of all ranks' tensors. Differentiable."""
    with tf.device(device_dense):
        packed, ctx = compression.compress(tf.convert_to_tensor(tensor))
        reduced = mpi_ops._reducescatter(
            packed,
            name=name,
            op=op,
            ignore_name_scope=ignore_name_scope,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return compression.decompress(reduced, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """`reducescatter` of several tensors of one type, as one operation."""
    if not tensors:
        return tensors
    with tf.device(device_dense):
        packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
        reduced = mpi_ops._grouped_reducescatter(
            [tensor for tensor, _ in packed],
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(reduced, packed, strict=True)
        ]
