"""How the gradients of a step are reduced: what the tape and all optimizers have in common.

In a graph each gradient is an operation of its own (or each group, where groups are asked for). It
starts when it is computed, so that it overlaps with the rest of the backward pass; small ones are
fused by the engine. Slices of embeddings are two operations for however many tables. In eager mode,
where an operation ends before the next begins, all gradients of a type are one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from evener.embedding.tensorflow._variable import table_of
from evener.errors import UsageError
from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Adasum, Average, Sum
from evener.horovod.common.util import split_list
from evener.horovod.tensorflow import light, mpi_ops
from evener.horovod.tensorflow.collectives import _members, allreduce, grouped_allreduce
from evener.horovod.tensorflow.compression import Compression
from evener.horovod.tensorflow.util import _executing_eagerly, plain


def key(variable: Any) -> Any:
    """A variable as a key, TensorFlow's or Keras'."""
    inner = plain(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


@dataclass
class Reduction:
    """What a tape or an optimizer was asked to do with gradients.

    local: keys of variables whose gradients stay on this rank, divided by the number of ranks where
    `scale_local`. linear: whether the optimizer is linear in the gradients (`light.is_linear`);
    None where it is not known.
    """

    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    predivide: float = 1.0
    groups: Any = None
    process_set: ProcessSet = field(default_factory=lambda: global_process_set)
    scale_local: bool = True
    local: set[Any] = field(default_factory=set)
    linear: bool | None = None

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.groups is not None and not (isinstance(self.groups, list) or self.groups > 0):
            raise ValueError("groups: a positive number, or a list of lists of tf.Variable")

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], generic_names: bool = False
    ) -> list[Any]:
        """The reduced gradients, None where there was none. generic_names: by number."""
        results = list(gradients)
        todo = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if (table := table_of(variable)) is not None and table.ranks is not None:
                results[index] = self._owned(table, gradient)
            elif key(variable) in self.local:
                results[index] = self._local(gradient)
            else:
                self._refuse_filter(variable)
                if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                    gradient = tf.convert_to_tensor(gradient)
                todo.append((index, gradient))
        if self.process_set.included() is False:
            return results
        for number, group in enumerate(self._grouped(todo, variables)):
            name = f"grad_{number}" if generic_names else None
            of = [plain(variables[index]) for index, _ in group]
            for (index, _), reduced in zip(group, self._reduced(group, of, name), strict=True):
                results[index] = reduced
        return results

    def _owned(self, table: Any, gradient: Any) -> Any:
        """The gradient of a table's rows here, which is the sum over all ranks already."""
        if self.process_set is not global_process_set or self.op not in (Average, Sum):
            raise UsageError(
                f"embedding {table.name!r} is spread over all ranks, and its gradients are summed "
                "or averaged over them",
                "use op=Average or Sum, and no process set",
            )
        if self.op == Sum:
            return gradient
        return tf.IndexedSlices(
            gradient.values / table.ranks.size, gradient.indices, gradient.dense_shape
        )

    def _refuse_filter(self, variable: Any) -> None:
        """A filter counts what its own rank looks up, so a key would have a row on some alone."""
        table = table_of(variable)
        if table is None or not (mpi_ops.elastic_job() or (self.process_set.size() or 1) > 1):
            return
        kind = table.parts[0].options.get("admission", {}).get("kind", "none")
        if kind != "none":
            raise UsageError(
                f"embedding {table.name!r} has a filter ({kind}), which each rank counts by "
                "itself: the tables of the ranks would differ",
                "leave filter_option out, or drop rare ids before the ranks split the data",
            )

    def _grouped(
        self, todo: list[tuple[int, Any]], variables: Sequence[Any]
    ) -> list[list[tuple[int, Any]]]:
        if isinstance(self.groups, list):
            number_of = {
                key(variable): number
                for number, group in enumerate(self.groups)
                for variable in group
            }
            found: dict[Any, list[tuple[int, Any]]] = {}
            for index, gradient in todo:
                number = number_of.get(key(variables[index]), f"alone {index}")
                found.setdefault(number, []).append((index, gradient))
            return list(found.values())
        if self.groups:
            return [list(part) for part in split_list(todo, self.groups) if part]
        if _executing_eagerly():
            return [todo] if todo else []
        # Slices of several tables go together: each alone is two operations.
        sparse = [each for each in todo if isinstance(each[1], tf.IndexedSlices)]
        rest = [[each] for each in todo if not isinstance(each[1], tf.IndexedSlices)]
        return [*rest, sparse] if sparse else rest

    def _reduced(self, group: list[tuple[int, Any]], of: list[Any], name: str | None) -> list[Any]:
        everywhere = self.process_set is global_process_set
        mark, compression = light.marked(of, self.compression, self.op, everywhere, self.linear)
        options: dict[str, Any] = {
            "device_dense": self.device_dense,
            "device_sparse": self.device_sparse,
            "compression": compression,
            "_gradient": mark,
            "op": self.op,
            "name": name,
            "process_set": self.process_set,
            "ignore_name_scope": name is not None,
        }
        if self.predivide != 1.0:
            options["prescale_factor"] = 1.0 / self.predivide
            options["postscale_factor"] = self.predivide
        with tf.name_scope(f"{self.name}_Allreduce"):
            if len(group) == 1:
                return [allreduce(group[0][1], **options)]
            return list(grouped_allreduce([gradient for _, gradient in group], **options))

    def _local(self, gradient: Any) -> Any:
        if not self.scale_local:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / _members(self.process_set, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / _members(self.process_set, gradient.dtype)


def options(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> Reduction:
    """From the arguments that a tape and the optimizers share. Raises ValueError."""
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets yet")
    return Reduction(
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups if groups is not None else (num_groups or None),
        process_set,
        scale_local_gradients,
    )


__all__ = ["Reduction", "key", "mpi_ops", "options"]
