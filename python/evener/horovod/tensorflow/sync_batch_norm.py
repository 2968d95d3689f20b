"""`SyncBatchNormalization`: batch statistics of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from evener.horovod.common.reductions import Sum
from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow.collectives import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' layer; mean and variance are of the batches of all ranks together.

    Ranks may have batches of different sizes. One operation in forward, one in backward.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True: leave it out")
        if not kwargs.get("name"):
            kwargs["name"] = "sync_batch_normalization"
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and variance over all axes but the channels', in float32 or wider."""
        if mask is not None:
            raise ValueError("SyncBatchNormalization does not take a mask")
        x = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else tf.convert_to_tensor(inputs)
        axes = list(self._reduction_axes)
        count = tf.cast(tf.size(x) / tf.shape(x)[self.axis], x.dtype)
        total, squares = tf.reduce_sum(x, axes), tf.reduce_sum(tf.square(x), axes)
        if mpi_ops.size() > 1:
            packed = tf.concat([total, squares, tf.reshape(count, [1])], 0)
            packed = allreduce(packed, op=Sum, name=f"sync_batch_norm_{self.name}")
            channels = tf.shape(total)[0]
            total, squares = packed[:channels], packed[channels : 2 * channels]
            count = packed[2 * channels]
        mean = total / count
        variance = tf.maximum(squares / count - tf.square(mean), 0.0)
        return mean, variance
