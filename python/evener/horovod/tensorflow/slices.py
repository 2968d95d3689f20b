"""tf.IndexedSlices of several variables, gathered from all ranks together.

One all-gather says how many rows each rank has of each variable, and one brings all of them as
bytes: of each variable its indices, then its values. What comes is cut by rank and variable, and
put together by variable, in the order of ranks. So the result is the same bits as an all-gather for
each, in two operations for however many variables, types and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.horovod.tensorflow import mpi_ops


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def gather_together(slices: Sequence[Any], options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(values, indices) of all ranks, for each of `slices`. Differentiable by the values.

    options: of `mpi_ops.allgather`. tf.errors.InvalidArgumentError where a rank has other types or
    shapes of rows; FailedPreconditionError where it has more or fewer slices.
    """
    indices = [tf.convert_to_tensor(each.indices) for each in slices]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*values: Any) -> Any:
        def gradient(*given: Any) -> list[Any]:
            scope, processes = options["ignore_name_scope"], options["process_set"]
            return [
                mpi_ops._own_part(each, value, scope, processes)
                for each, value in zip(given[: len(values)], values, strict=True)
            ]

        return _run(values, indices, options), gradient

    found = run(*[tf.convert_to_tensor(each.values) for each in slices])
    return list(zip(found[: len(slices)], found[len(slices) :], strict=True))


def _run(values: Sequence[Any], indices: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Values of each, then indices of each."""
    parts = [part for pair in zip(indices, values, strict=True) for part in pair]
    ranks, n = int(options["process_set"].size()), len(parts)
    rows = [tf.shape(part, tf.int64)[0] for part in parts]
    widths = [tf.reduce_prod(tf.shape(part, tf.int64)[1:]) * part.dtype.size for part in parts]
    types = [tf.constant(part.dtype.as_datatype_enum, tf.int64) for part in parts]
    told = mpi_ops.allgather(tf.stack([*rows, *widths, *types])[None], **options)
    same = tf.debugging.assert_equal(
        told[:, n:], tf.stack([*widths, *types])[None], "ranks have slices of other rows"
    )
    data = mpi_ops.allgather(tf.concat([_to_bytes(part) for part in parts], 0), **options)
    with tf.control_dependencies([] if same is None else [same]):
        cuts = tf.reshape(told[:, :n] * tf.stack(widths)[None], [ranks * n])
    pieces = tf.split(data, cuts)
    found = [_from_bytes(tf.concat(pieces[i::n], 0), part) for i, part in enumerate(parts)]
    return [*found[1::2], *found[::2]]


def _to_bytes(part: Any) -> Any:
    """uint8 [bytes]."""
    return tf.reshape(tf.bitcast(part, tf.uint8), [-1])


def _from_bytes(data: Any, like: Any) -> Any:
    """Rows as those of `like`, as many as there are."""
    size = like.dtype.size
    entry = [size] if size > 1 else []  # as `bitcast` wants it
    found = tf.bitcast(
        tf.reshape(data, tf.concat([[-1], tf.shape(like)[1:], entry], 0)), like.dtype
    )
    found.set_shape([None, *like.shape[1:]])
    return found
