"""`DistributedOptimizer` for the optimizers of v1 graphs; Keras' go to `keras.optimizer`.

With `backward_passes_per_step` gradients are summed in variables of this rank, and reduced in
every n-th pass only; the passes between change no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Adasum, Average
from evener.horovod.tensorflow import light
from evener.horovod.tensorflow.collectives import allreduce
from evener.horovod.tensorflow.compression import Compression
from evener.horovod.tensorflow.gradients import Reduction, key, options
from evener.horovod.tensorflow.util import _executing_eagerly

v1: Any = tf.compat.v1
_V1: Any = v1.train.Optimizer


class _Passes:
    """Gradients summed over several passes of a graph."""

    def __init__(self, passes: int, average: bool, reduction: Reduction) -> None:
        self._passes, self._average, self._reduction = passes, average, reduction
        self._counter: Any = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced sums in every n-th pass; what it gives between is not applied."""
        local = v1.GraphKeys.LOCAL_VARIABLES
        with v1.variable_scope("evener_passes", reuse=v1.AUTO_REUSE):
            self._counter = v1.get_variable(
                "counter",
                [],
                tf.int32,
                v1.zeros_initializer(),
                trainable=False,
                collections=[local],
            )
            dense = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
            sums: list[Any] = [
                None
                if gradient is None
                else v1.get_variable(
                    f"sum_{index}",
                    gradient.shape,
                    gradient.dtype,
                    v1.zeros_initializer(),
                    trainable=False,
                    collections=[local],
                )
                for index, gradient in enumerate(dense)
            ]
        added: list[Any] = [
            None if total is None else total.assign_add(gradient, read_value=True)
            for total, gradient in zip(sums, dense, strict=True)
        ]
        present = [index for index, total in enumerate(added) if total is not None]
        with tf.control_dependencies([added[index] for index in present]):
            count = self._counter.assign_add(1, read_value=True)
        self._last = tf.equal(count % self._passes, 0)

        def reduced() -> list[Any]:
            totals = [added[index] for index in present]
            if self._average:
                totals = [total / self._passes for total in totals]
            found = self._reduction(totals, [variables[index] for index in present])
            with tf.control_dependencies(found):
                zeroed = [sums[index].assign(tf.zeros_like(sums[index])) for index in present]
            with tf.control_dependencies(zeroed):
                return [tf.identity(each) for each in found]

        values = tf.cond(self._last, reduced, lambda: [tf.identity(added[i]) for i in present])
        results: list[Any] = [None] * len(dense)
        for index, value in zip(present, values, strict=True):
            results[index] = value
        return results

    def apply(self, update: Any, gradients: Sequence[Any]) -> Any:
        """Run `update` in every n-th pass."""
        with tf.control_dependencies([g for g in gradients if g is not None]):
            return tf.cond(self._last, lambda: tf.group(update()), tf.no_op)


class _DistributedOptimizer(_V1):  # type: ignore[misc]
    """Reduces the gradients that another optimizer of v1 computes."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: Reduction,
        passes: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        if passes > 1 and _executing_eagerly():
            raise ValueError(
                "backward_passes_per_step > 1 is for graphs with an optimizer of tf.compat.v1: "
                "use a Keras optimizer in eager mode"
            )
        self._optimizer, self._reduction = optimizer, reduction
        self._passes = (
            _Passes(passes, average_aggregated_gradients, reduction) if passes > 1 else None
        )

    def register_local_var(self, var: Any) -> None:
        """Gradients of this variable stay on their rank."""
        self._reduction.local.add(key(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As of the wrapped optimizer, reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._passes is not None:
            found = self._passes.add(gradients, variables)
        else:
            found = self._reduction(gradients, variables)
        return list(zip(found, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As of the wrapped optimizer."""
        pairs = list(grads_and_vars)

        def update() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if self._passes is None:
            return update()
        # Slots must exist outside the condition.
        self._optimizer._create_slots([variable for _, variable in pairs])
        return self._passes.apply(update, [gradient for gradient, _ in pairs])

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedAdasumOptimizer(_V1):  # type: ignore[misc]
    """Lets each rank take its own step, and combines the steps by the Adasum rule."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, compression: Any
    ) -> None:
        super().__init__(
            name=name or f"DistributedDelta{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer, self._compression = optimizer, compression

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """The wrapped optimizer's step, and then the combination of all ranks' steps."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        used = [variable for gradient, variable in pairs if gradient is not None]
        before = [tf.identity(variable) for variable in used]
        with tf.control_dependencies(before):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([stepped] if stepped is not None else []):
            deltas = [
                variable.read_value() - start
                if hasattr(variable, "read_value")
                else variable - start
                for variable, start in zip(used, before, strict=True)
            ]
            combined = [
                allreduce(delta, op=Adasum, compression=self._compression) for delta in deltas
            ]
            assigned = [
                variable.assign(start + delta)
                for variable, start, delta in zip(used, before, combined, strict=True)
            ]
        return tf.group(*assigned)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802 - upstream's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer (of tf.compat.v1.train, or of Keras) whose gradients are those of all ranks.

    backward_passes_per_step: gradients of this many passes are summed before they are reduced
    (averaged, with average_aggregated_gradients). Raises ValueError for what does not fit together.
    """
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    reduction = options(
        name or f"Distributed{type(optimizer).__name__}",
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
    if isinstance(optimizer, v1.train.Optimizer):
        if op == Adasum:
            return _DistributedAdasumOptimizer(optimizer, name, use_locking, compression)
        return _DistributedOptimizer(
            optimizer,
            name,
            use_locking,
            reduction,
            backward_passes_per_step,
            average_aggregated_gradients,
        )
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    from evener.horovod.tensorflow.keras.optimizer import wrap

    return wrap(optimizer, name, reduction, backward_passes_per_step, average_aggregated_gradients)
