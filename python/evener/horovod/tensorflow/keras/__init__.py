"""`import horovod.tensorflow.keras as hvd` (and `horovod.keras`): for models of Keras 3."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Average
from evener.horovod.tensorflow import collectives, functions, light
from evener.horovod.tensorflow import mpi_ops as _mpi_ops
from evener.horovod.tensorflow.compression import Compression
from evener.horovod.tensorflow.gradients import options
from evener.horovod.tensorflow.keras import callbacks, elastic
from evener.horovod.tensorflow.keras.old import accept_old_arguments
from evener.horovod.tensorflow.keras.optimizer import wrap
from evener.horovod.tensorflow.mpi_ops import (
    Adasum,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    barrier,
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
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from evener.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from evener.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    local_variables,
)


def DistributedOptimizer(  # noqa: N802 - upstream's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of Keras whose gradients are those of all ranks.

    The other arguments as of `horovod.tensorflow.DistributedOptimizer`.
    """
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    accept_old_arguments()
    reduction = options(
        f"Distributed{type(optimizer).__name__}",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    reduction.linear = light.is_linear(optimizer)
    return wrap(optimizer, name, reduction, backward_passes_per_step, average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: N802 - upstream's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """As `DistributedOptimizer`; gradients of `local_layers` stay on their rank.

    The layers must be built. Raises ValueError for what is no layer, or has no weights yet.
    """
    variables = local_variables(local_layers)
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables:
        made.register_local_var(variable)
    return made


def _value(tensor: Any) -> Any:
    """A tensor, or in a v1 graph what the session says."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tensor
    return functions._evaluated(tensor, None)


def broadcast_global_variables(root_rank: int) -> Any:
    """For v1 graphs: see `horovod.tensorflow`."""
    return functions.broadcast_global_variables(root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """The reduction of a number or array over the ranks, a tensor; default: the average."""
    return _value(
        collectives.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            op=op,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The arrays of all ranks, one after the other, a tensor."""
    return _value(_mpi_ops.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The array of the rank `root_rank`, a tensor."""
    return _value(_mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the reduction, a tensor."""
    return _value(collectives.reducescatter(tf.convert_to_tensor(value), name=name, op=op))


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model whose optimizer, with its state, is distributed from now on."""
    del legacy_opts  # Keras 3 has none
    names = {kind.__name__: kind for kind in custom_optimizers or []}
    model = tf.keras.models.load_model(
        filepath, custom_objects={**names, **(custom_objects or {})} or None
    )
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
