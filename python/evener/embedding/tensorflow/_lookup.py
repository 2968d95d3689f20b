"""The lookups of `tf.nn`, on dynamic embeddings: same names, arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from evener.embedding.tensorflow._sharded import Asked, look
from evener.embedding.tensorflow._variable import DynamicVariable
from evener.errors import UsageError

_COMBINERS = ("sum", "mean", "sqrtn")


def embedding_lookup(
    params: DynamicVariable | Sequence[DynamicVariable],
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: bool | None = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
    insert: bool | None = None,
) -> Any:
    """The rows of `ids`: their shape, then dim. As `tf.nn.embedding_lookup`.

    `max_norm`: rows with a larger Euclidean norm are scaled down to it. `return_trainable`: gives
    (rows, the variable whose gradient they make). `insert`: whether ids without a row get one
    (default: if `params` is trainable and this is not inside `inference()`).
    `partition_strategy` and `validate_indices` are taken and not used: any id is valid.

    Raises UsageError for ids that are sparse, ragged or of another type than the keys.
    """
    table = _one(params)
    rows = _clipped(table.lookup(ids, insert=insert, name=name), max_norm)
    return (rows, table.anchor) if return_trainable else rows


def embedding_lookup_unique(
    params: DynamicVariable | Sequence[DynamicVariable],
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: bool | None = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
    insert: bool | None = None,
) -> Any:
    """`embedding_lookup` that asks for each id once per call, and counts it once."""
    table = _one(params)
    keys = table.keys(ids, insert)
    with tf.name_scope(name or "embedding_lookup_unique"):
        rows = _once([Asked(table, tf.reshape(keys, [-1]), table.adds(insert))])[0]
        rows = tf.reshape(_clipped(rows, max_norm), tf.concat([tf.shape(keys), [table.dim]], 0))
        rows.set_shape(keys.shape.concatenate([table.dim]))
    return (rows, table.anchor) if return_trainable else rows


def embedding_lookup_sparse(
    params: DynamicVariable | Sequence[DynamicVariable],
    sp_ids: Any,
    sp_weights: Any = None,
    partition_strategy: str | None = None,
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
    insert: bool | None = None,
) -> Any:
    """For each line of the sparse [n, m] ids, their rows combined: [n, dim].

    `sp_weights`: None or sparse like the ids, one weight per id. `combiner`: "sum", "mean" (the
    default; by the sum of weights) or "sqrtn" (by the root of the sum of their squares). As
    `tf.nn.embedding_lookup_sparse`; a line without ids between others gives zeros, and lines after
    the last one with ids give zeros too.
    """
    table = _one(params)
    with tf.name_scope(name or "embedding_lookup_sparse"):
        asked, pooled = _sparse_lines(table, sp_ids, sp_weights, combiner, max_norm, insert)
        rows = pooled(_once([asked])[0])
    return (rows, table.anchor) if return_trainable else rows


def safe_embedding_lookup_sparse(
    embedding_weights: DynamicVariable | Sequence[DynamicVariable],
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str = "mean",
    default_id: Any = None,
    name: str | None = None,
    partition_strategy: str | None = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
    insert: bool | None = None,
) -> Any:
    """`embedding_lookup_sparse` for ids of any rank and lines that may be empty.

    `sparse_ids`: [d0, ..., dn]; the result is [d0, ..., dn-1, dim]. A line without ids gives the
    row of `default_id`, or zeros without one. Ids whose weight is not positive are left out, except
    for "sum". Every id is valid, negative ones too.
    """
    table = _one(embedding_weights)
    with tf.name_scope(name or "safe_embedding_lookup_sparse"):
        asked, pooled = safe_lines(
            table, sparse_ids, sparse_weights, combiner, default_id, max_norm, insert
        )
        rows = pooled(_once([asked])[0])
    return (rows, table.anchor) if return_trainable else rows


def group_embedding_lookup_sparse(
    params: Sequence[DynamicVariable],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    sp_weights: Sequence[Any] | None = None,
    partition_strategy: str = "mod",
    is_sequence: bool = False,
    params_num_per_group: int | None = None,
    name: str | None = None,
    insert: bool | None = None,
) -> list[Any]:
    """`embedding_lookup_sparse` for several tables: a list of [n, dim], in order. As in DeepRec.

    Tables that are spread over ranks cross in one exchange. Raises UsageError where the lists
    differ in length, or for what this does not do (`is_sequence`).
    """
    if is_sequence:
        raise UsageError(
            "group_embedding_lookup_sparse(is_sequence=True) is not there",
            "look ragged sequences up one by one, with embedding_lookup of ids.to_tensor()",
        )
    weights = [None] * len(params) if sp_weights is None else list(sp_weights)
    for what, given in (("sp_ids", sp_ids), ("combiners", combiners), ("sp_weights", weights)):
        if len(given) != len(params):
            raise UsageError(
                f"{what} has {len(given)} entries for {len(params)} params",
                "give one of each per table",
            )
    with tf.name_scope(name or "group_embedding_lookup_sparse"):
        lines = [
            _sparse_lines(_one(table), ids, weight, combiner, None, insert)
            for table, ids, weight, combiner in zip(params, sp_ids, weights, combiners, strict=True)
        ]
        found = _once([asked for asked, _ in lines])
        return [pooled(rows) for (_, pooled), rows in zip(lines, found, strict=True)]


def _one(params: Any) -> DynamicVariable:
    """The table, out of what TensorFlow 1 programs give: it or a list of it."""
    found = params[0] if isinstance(params, list | tuple) and len(params) == 1 else params
    if isinstance(found, DynamicVariable):
        return found
    raise UsageError(
        f"params is {type(params).__name__}, not a dynamic embedding",
        "make it with get_variable; parts of it are one variable with partitioner=",
    )


def _sparse(table: DynamicVariable, ids: Any) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return ids.to_sparse()
    raise UsageError(
        f"the ids of embedding {table.name!r} are {type(ids).__name__}, not tf.SparseTensor",
        "use tf.sparse.from_dense(ids), or embedding_lookup for dense ids",
    )


def _combiner(combiner: str | None) -> str:
    if combiner is None:
        return "mean"
    if combiner not in _COMBINERS:
        raise UsageError(f"combiner {combiner!r} cannot be", f"use one of {', '.join(_COMBINERS)}")
    return combiner


def _match(table: DynamicVariable, ids: Any, weights: Any) -> None:
    if weights is None:
        return
    if not isinstance(weights, tf.SparseTensor):
        raise UsageError(
            f"the weights of embedding {table.name!r} are {type(weights).__name__}, not sparse",
            "give tf.SparseTensor(ids.indices, values, ids.dense_shape)",
        )
    if not ids.values.shape.is_compatible_with(weights.values.shape):
        raise UsageError(
            f"embedding {table.name!r}: {ids.values.shape[0]} ids and "
            f"{weights.values.shape[0]} weights",
            "give one weight per id, at the same indices",
        )


def _clipped(rows: Any, max_norm: float | None) -> Any:
    return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])


# Rows [n, dim], one per key that was asked for, to what a lookup gives.
Pooled = Callable[[Any], Any]


def _once(asked: Sequence[Asked]) -> list[Any]:
    """Rows [n, dim] of each, where a key that comes several times is looked up, and counts, once.

    Those of all tables that are spread over ranks come in one exchange.
    """
    found: list[Any] = [None] * len(asked)
    spread = [i for i, each in enumerate(asked) if each.table.ranks is not None]
    for i, each in enumerate(asked):
        if each.table.ranks is None:
            unique, places = tf.unique(each.keys)
            found[i] = tf.gather(each.table.lookup_keys(unique, insert=each.adds), places)
    if spread:
        for i, rows in zip(spread, lookup_spread([asked[i] for i in spread]), strict=True):
            found[i] = rows
    return found


def lookup_spread(asked: Sequence[Asked]) -> list[Any]:
    """Rows [n, dim] of each, of tables that are spread over ranks, in one exchange."""
    found = zip(look(asked), asked, strict=True)
    return [tf.cast(rows, each.table.value_dtype) for rows, each in found]


def _sparse_lines(
    table: DynamicVariable,
    ids: Any,
    weights: Any,
    combiner: str | None,
    max_norm: float | None,
    insert: bool | None,
) -> tuple[Asked, Pooled]:
    """What `embedding_lookup_sparse` asks for, and what it makes of the rows."""
    if not isinstance(ids, tf.SparseTensor):
        ids = _sparse(table, ids)
    kind = _combiner(combiner)
    _match(table, ids, weights)
    each = None if weights is None else tf.cast(weights.values, tf.float32)
    static = tf.get_static_value(ids.dense_shape)

    def pooled(rows: Any) -> Any:
        rows = _combine(
            table, _clipped(rows, max_norm), ids.indices[:, 0], each, ids.dense_shape[0], kind
        )
        rows.set_shape([None if static is None else int(static[0]), table.dim])
        return rows

    return Asked(table, table.keys(ids.values, insert), table.adds(insert)), pooled


def safe_lines(
    table: DynamicVariable,
    ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = None,
    default_id: Any = None,
    max_norm: float | None = None,
    insert: bool | None = None,
) -> tuple[Asked, Pooled]:
    """What `safe_embedding_lookup_sparse` asks for, and what it makes of the rows."""
    if not isinstance(ids, tf.SparseTensor):
        ids = _sparse(table, ids)
    kind = _combiner(combiner)
    _match(table, ids, sparse_weights)
    shape = tf.cast(ids.dense_shape, tf.int64)
    rank, static = ids.shape.rank, tf.get_static_value(ids.dense_shape)
    lines = tf.reduce_prod(shape[:-1])
    ids = tf.sparse.reshape(ids, tf.stack([lines, shape[-1]]))
    weights = None if sparse_weights is None else tf.cast(sparse_weights.values, tf.float32)
    if weights is not None and kind != "sum":
        kept = weights > 0
        ids, weights = tf.sparse.retain(ids, kept), tf.boolean_mask(weights, kept)
    keys, segments = table.keys(ids.values, insert), ids.indices[:, 0]
    if default_id is not None:
        seen = tf.math.unsorted_segment_sum(tf.ones_like(segments), segments, lines)
        empty = tf.where(tf.equal(seen, 0))[:, 0]
        default = table.keys(tf.reshape(tf.convert_to_tensor(default_id), [1]), insert)
        keys = tf.concat([keys, tf.tile(default, [tf.size(empty)])], 0)
        segments = tf.concat([segments, empty], 0)
        if weights is not None:
            weights = tf.concat([weights, tf.ones([tf.size(empty)])], 0)

    def pooled(rows: Any) -> Any:
        rows = _combine(table, _clipped(rows, max_norm), segments, weights, lines, kind)
        rows = tf.reshape(rows, tf.concat([shape[:-1], [table.dim]], 0))
        if rank is not None:
            known = [None] * (rank - 1) if static is None else [int(n) for n in static[:-1]]
            rows.set_shape([*known, table.dim])
        return rows

    return Asked(table, keys, table.adds(insert)), pooled


def _combine(
    table: DynamicVariable, rows: Any, segments: Any, weights: Any, lines: Any, combiner: str
) -> Any:
    """Rows [n, dim] combined by `segments`: [lines, dim]."""
    wide = tf.cast(rows, tf.float32)
    if weights is None:
        weights = tf.ones(tf.shape(segments))
    else:
        wide = wide * weights[:, None]
    total = tf.math.unsorted_segment_sum(wide, segments, lines)
    if combiner != "sum":
        share = weights if combiner == "mean" else weights * weights
        norm = tf.math.unsorted_segment_sum(share, segments, lines)
        norm = norm if combiner == "mean" else tf.sqrt(norm)
        total = tf.math.divide_no_nan(total, norm[:, None])
    return tf.cast(total, table.value_dtype)
