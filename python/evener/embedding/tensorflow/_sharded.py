"""Tables whose rows are spread over the ranks of a Horovod job.

Each key has one owner, by its hash, as for torch (`evener.embedding.parts`). A lookup takes any
number of tables, and crosses the network twice, whatever their number and dims: keys go to their
owners, how many there are of each table ahead of them in the same message, and rows come back. The
gradient crosses once: TensorFlow goes back through the same operations, the exchange of rows sends
gradients the other way, and the owner's own lookup gives the anchor what it owns, as slices.

So an optimizer sees the sum over all ranks of the gradients of its own rows, and steps them in its
own store. Horovod's tapes and optimizers know these slices: they divide them by the number of
ranks and send them nowhere. Sums are those of one process with all batches, where a key that comes
several times in a lookup counts once: per rank in the order of ids, then in the order of ranks.

Whether a step is finite all ranks must decide alike, so they ask each other once per step, for all
tables together (`agree`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from evener.base import settings
from evener.embedding import parts
from evener.embedding.tensorflow import _gradients, _library
from evener.errors import UsageError

_SUM, _RANK, _SIZE = 1, 0, 1  # Horovod's number of a sum; what `evener_place` is asked for


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job; each owns the keys whose hash names it."""

    rank: int
    size: int

    @classmethod
    def found(cls, name: str) -> Ranks:
        """Those of the job. Raises UsageError where Horovod does not run, or may change them."""
        if settings.EVENER_ELASTIC.get():
            raise UsageError(
                f"embedding {name!r} cannot be spread over the ranks of an elastic job: rows would "
                "go with a rank",
                "leave shard=True out: each rank then has the whole table",
            )
        ops = _library.ops()
        try:
            with tf.init_scope():
                rank, size = (int(ops.evener_place(what=what)) for what in (_RANK, _SIZE))
        except tf.errors.FailedPreconditionError:
            raise UsageError(
                f"embedding {name!r} has shard=True, and Horovod is not initialized",
                "call hvd.init() of horovod.tensorflow first",
            ) from None
        return cls(rank, size)

    def owner(self, keys: Any) -> Any:
        """The rank of each key, int64 [n]: an array's in numpy, a tensor's in TensorFlow."""
        if isinstance(keys, np.ndarray):
            return parts.hashes(keys) % self.size
        keys = tf.convert_to_tensor(keys, tf.int64)
        shift = tf.bitwise.right_shift
        return parts.hashes(keys, lambda x, by: shift(x, tf.constant(by, tf.int64))) % self.size

    def swap(self, data: Any, sizes: Any) -> tuple[Any, Any]:
        """All-to-all of [n], `sizes` (int32 [size]) to each rank: what came, and how much of each.

        Collective.
        """
        with tf.device("CPU:0"):
            found, came = _library.ops().evener_alltoall(data, sizes, urgent=tf.executing_eagerly())
        return found, tf.ensure_shape(came, [self.size])

    def agree(self, fine: Any) -> Any:
        """Whether `fine` (a bool) holds on all ranks. Collective."""
        with tf.device("CPU:0"):
            bad = _library.ops().evener_allreduce(
                tf.cast(tf.logical_not(fine), tf.int32),
                reduce_op=_SUM,
                urgent=tf.executing_eagerly(),
            )
        return tf.equal(bad, 0)

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers (below 2^62). Collective."""
        own = tf.fill([self.size], tf.constant(number, tf.int64))
        return int(tf.reduce_max(self.swap(own, tf.ones([self.size], tf.int32))[0]))


class Table(Protocol):
    """What a lookup uses of a `DynamicVariable`."""

    name: str
    dim: int
    value_dtype: Any
    ranks: Ranks | None

    def lookup_keys(self, keys: Any, *, insert: bool | None = None) -> Any:
        """Rows of keys, wherever they are."""

    def rows_here(self, keys: Any, adds: bool) -> Any:
        """float32 rows of this process's store."""


@dataclass(frozen=True)
class Asked:
    """Keys of one lookup, int64 [n]. `adds`: whether keys without a row get one."""

    table: Table
    keys: Any
    adds: bool


def look(asked: Sequence[Asked]) -> list[Any]:
    """Rows float32 [n, dim] of each. All must be spread. Collective.

    Raises UsageError in branches and loops.
    """
    if not tf.executing_eagerly() and _gradients.outside() is not None:
        raise UsageError(
            f"a lookup of embedding {asked[0].table.name!r} is inside of a branch or loop, which "
            "other ranks may not come to",
            "look rows up outside of tf.cond and loops; in Keras leave steps_per_execution out",
        )
    # Lookups of one table are one: a key counts once.
    merged: dict[tuple[int, bool], list[int]] = {}
    for i, each in enumerate(asked):
        merged.setdefault((id(each.table), each.adds), []).append(i)
    found: list[Any] = [None] * len(asked)
    firsts, wanted, places, sizes = [], [], [], []
    for members in merged.values():
        sizes.append([tf.size(asked[i].keys) for i in members])
        unique, place = tf.unique(tf.concat([asked[i].keys for i in members], 0))
        firsts.append(asked[members[0]])
        wanted.append(unique)
        places.append(place)
    ranks = firsts[0].table.ranks
    assert ranks is not None
    if ranks.size == 1:
        rows = [e.table.rows_here(keys, e.adds) for e, keys in zip(firsts, wanted, strict=True)]
    else:
        rows = _exchange(ranks, firsts, wanted)
    for members, part, place, long in zip(merged.values(), rows, places, sizes, strict=True):
        each = tf.split(tf.gather(part, place), long, num=len(members))
        for i, mine in zip(members, each, strict=True):
            found[i] = mine
    return found


def _exchange(ranks: Ranks, asked: Sequence[Asked], keys: Sequence[Any]) -> list[Any]:
    """Rows of keys, once each, of each table."""
    n, size = len(asked), ranks.size
    owners = tf.split(
        tf.cast(ranks.owner(tf.concat(keys, 0)), tf.int32), [tf.size(k) for k in keys], num=n
    )
    orders = [tf.argsort(owner, stable=True) for owner in owners]
    # [rank, table]: how many keys go there.
    counts = tf.stack(
        [tf.math.unsorted_segment_sum(tf.ones_like(o), o, size) for o in owners], axis=1
    )
    going = [
        tf.split(tf.gather(each, order), counts[:, t], num=size)
        for t, (each, order) in enumerate(zip(keys, orders, strict=True))
    ]
    # A message: which tables these are, how many keys of each, the keys.
    sign = tf.constant([_sign(asked)], tf.int64)
    data, came = ranks.swap(
        tf.concat(
            [
                part
                for r in range(size)
                for part in (sign, tf.cast(counts[r], tf.int64), *(g[r] for g in going))
            ],
            0,
        ),
        1 + n + tf.reduce_sum(counts, 1),
    )
    heads = tf.cumsum(came, exclusive=True)
    same = tf.debugging.Assert(
        tf.reduce_all(tf.equal(tf.gather(data, heads), sign)),
        ["ranks look up other embeddings, or in another order; here: " + _names(asked)],
    )
    with tf.control_dependencies([] if same is None else [same]):
        told = tf.cast(tf.gather(data, heads[:, None] + 1 + tf.range(n)), tf.int32)
    cuts = tf.concat([tf.fill([size, 1], 1 + n), told], 1)
    pieces = tf.split(data, tf.reshape(cuts, [-1]), num=size * (n + 1))
    # The owner's part: each key once, in the order of ranks.
    dims = [each.table.dim for each in asked]
    answers = []
    for t, each in enumerate(asked):
        mine, back = tf.unique(tf.concat(pieces[t + 1 :: n + 1], 0))
        rows = tf.gather(each.table.rows_here(mine, each.adds), back)
        answers.append(tf.split(tf.reshape(rows, [-1]), told[:, t] * dims[t], num=size))
    sent, due = told * tf.constant(dims), counts * tf.constant(dims)
    received = _swap_rows(
        ranks,
        tf.concat([answer[r] for r in range(size) for answer in answers], 0),
        tf.reduce_sum(sent, 1),
        tf.reduce_sum(due, 1),
    )
    parts_of = tf.split(received, tf.reshape(due, [-1]), num=size * n)
    return [
        tf.gather(
            tf.reshape(tf.concat(parts_of[t::n], 0), [-1, dims[t]]),
            tf.math.invert_permutation(orders[t]),
        )
        for t in range(n)
    ]


def _swap_rows(ranks: Ranks, rows: Any, sent: Any, due: Any) -> Any:
    """`swap` of float32 [n]; gradients go the other way."""

    @tf.custom_gradient
    def run(data: Any) -> Any:
        def gradient(given: Any) -> Any:
            return ranks.swap(given, due)[0]

        return ranks.swap(data, sent)[0], gradient

    return run(rows)


def _sign(asked: Sequence[Asked]) -> int:
    return zlib.crc32(repr([(e.table.name, e.table.dim, e.adds) for e in asked]).encode())


def _names(asked: Sequence[Asked]) -> str:
    return ", ".join(each.table.name for each in asked)
