"""Variables and objects of one rank, or of all, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from evener.embedding.tensorflow._variable import DynamicVariable, table_of
from evener.horovod.common import pickling
from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow.util import _executing_eagerly, plain


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give variables the values that they have on the rank `root_rank`; dynamic embeddings too.

    In a v1 graph: the op that does it, without the rows of dynamic embeddings. All are under way at
    the same time.
    """
    del inplace  # a variable's own memory is written in either case
    variables = [plain(variable) for variable in variables]
    if not _executing_eagerly():
        return tf.group(*mpi_ops.broadcast_(variables, root_rank, process_set=process_set))
    if variables:

        @tf.function  # type: ignore[untyped-decorator]
        def run() -> None:
            for index, variable in enumerate(variables):
                name = f"broadcast_variables_{index}"
                value = mpi_ops.broadcast(variable, root_rank, name=name, process_set=process_set)
                variable.assign(value)

        # Not `run()`: TensorFlow warns of a function that is traced in each call.
        run.get_concrete_function()()
    for variable in variables:
        # A table that is spread has the rows of a rank on that rank alone.
        if (table := table_of(variable)) is not None and table.ranks is None:
            _broadcast_rows(table, root_rank, process_set)
    return None


def _broadcast_rows(table: DynamicVariable, root_rank: int, process_set: ProcessSet) -> None:
    """Rows, slots and counts of the rank `root_rank` replace those of the others."""
    mine = mpi_ops.rank() == root_rank
    for part in table.parts:
        own = part._serialize_to_tensors() if mine else {}
        none = tf.zeros([0], tf.uint8)
        found = {
            what: mpi_ops.allgather(own.get(what, none), process_set=process_set)
            for what in ("snapshot", "made_with")
        }
        if not mine:
            part._restore_from_tensors(found)


def _evaluated(value: Any, session: Any) -> Any:
    if _executing_eagerly():
        return value.numpy()
    session = session or tf.compat.v1.get_default_session()
    return (session or tf.compat.v1.Session()).run(value)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of the rank `root_rank`, pickled on the way."""
    return broadcast_object_fn(root_rank, session, name, process_set)(obj)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object, whose ops are in a graph once."""
    name = name or "broadcast_object"

    def run(obj: Any) -> Any:
        mine = mpi_ops.rank() == root_rank
        data = np.frombuffer(pickling.dumps(obj), np.uint8) if mine else np.zeros(0, np.uint8)
        with tf.device("cpu"):
            length = mpi_ops.broadcast(
                tf.constant([data.size], tf.int64), root_rank, f"{name}.size", False, process_set
            )
            count = int(_evaluated(length, session)[0])
            whole = data if mine else np.zeros(count, np.uint8)
            sent = mpi_ops.broadcast(
                tf.constant(whole, tf.uint8), root_rank, f"{name}.data", False, process_set
            )
            found = _evaluated(sent, session)
        return obj if mine else pickling.loads(found.tobytes())

    return run


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks of the set, in their order."""
    name = name or "allgather_object"
    data = np.frombuffer(pickling.dumps(obj), np.uint8)
    with tf.device("cpu"):
        sizes = mpi_ops.allgather(
            tf.constant([data.size], tf.int64), f"{name}.size", False, process_set
        )
        whole = mpi_ops.allgather(tf.constant(data, tf.uint8), f"{name}.data", False, process_set)
        lengths, found = _evaluated(sizes, session), _evaluated(whole, session)
    ends = np.cumsum(lengths)
    return [
        pickling.loads(found[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def broadcast_global_variables(root_rank: int) -> Any:
    """The op that gives all global variables of a v1 graph the values of the rank `root_rank`."""
    if _executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for v1 graphs: use "
            "hvd.broadcast_variables(variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session of `MonitoredTrainingSession` begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """The graph is complete."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """The variables have values."""
        del coord
        session.run(self.bcast_op)
