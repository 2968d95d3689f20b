"""An optimizer of Keras 3 whose gradients are those of all ranks.

The wrapped optimizer's class gets a subclass of the same name, so that a model that is saved with
it loads where there is no Horovod. `apply` is where all gradients come by, in `fit` and in loops of
one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.errors import UsageError
from evener.horovod.common.reductions import Min
from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow.gradients import Reduction, key


class Distributed:
    """Mixed in before the optimizer's class."""

    _HAS_AGGREGATE_GRAD = True
    _evener: tuple[Reduction, int, bool]

    def register_local_var(self, var: Any) -> None:
        """Gradients of this variable stay on their rank."""
        self._evener[0].local.add(key(var))

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """As of the optimizer, with the gradients of all ranks."""
        reduction, passes, _ = self._evener
        this: Any = self
        step = super().apply  # type: ignore[misc]
        if trainable_variables is None:
            variables = list(this._trainable_variables)
        else:
            variables = list(trainable_variables)
        if passes == 1:
            return step(reduction(list(grads), variables), trainable_variables)
        if not this.built:
            with tf.init_scope():
                this.build(variables)
        return self._accumulate(list(grads), variables, step)

    def _accumulate(self, grads: list[Any], variables: list[Any], step: Any) -> Any:
        """Sum the gradients, and take a step in every n-th pass."""
        reduction, passes, average = self._evener
        store: Any = self.__dict__.get("_evener_sums")
        if store is None:
            with tf.init_scope():
                sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]
                store = {"sums": sums, "count": tf.Variable(0, trainable=False)}
            # Not an attribute that Keras would track, and save.
            object.__setattr__(self, "_evener_sums", store)
        sums, count = store["sums"], store["count"]
        for total, gradient in zip(sums, grads, strict=True):
            if gradient is not None:
                total.assign_add(tf.convert_to_tensor(gradient))

        def update() -> Any:
            totals = [
                None if gradient is None else total / passes if average else tf.identity(total)
                for total, gradient in zip(sums, grads, strict=True)
            ]
            step(reduction(totals, variables), variables)
            for total in sums:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        return tf.cond(
            tf.equal(count.assign_add(1) % passes, 0), update, lambda: tf.constant(False)
        )


def _agree_on_overflows() -> None:
    """A LossScaleOptimizer around a distributed optimizer asks all ranks what is finite.

    `compile` puts one there under mixed_float16. It leaves a step out where its gradients are not
    finite, and would do so on that rank alone: the others' gradients of this step would then meet
    this rank's of the next one.
    """
    kind: Any = tf.keras.optimizers.LossScaleOptimizer
    here = getattr(kind, "check_finite", None)
    if getattr(here, "_evener", False):
        return
    if here is None:
        raise UsageError(
            "this Keras' LossScaleOptimizer has no check_finite, and ranks could not agree on "
            "steps that overflow",
            "use Keras 3, or report this version",
        )

    def check_finite(self: Any, grads: Sequence[Any]) -> Any:
        finite = here(self, grads)
        if not isinstance(self.inner_optimizer, Distributed):
            return finite
        process_set = self.inner_optimizer._evener[0].process_set
        if process_set.included() is False:
            return finite
        whole = tf.cast(finite, tf.int32)
        return tf.cast(mpi_ops._allreduce(whole, op=Min, process_set=process_set), tf.bool)

    check_finite._evener = True  # type: ignore[attr-defined]
    kind.check_finite = check_finite


def wrap(
    optimizer: Any,
    name: str | None,
    reduction: Reduction,
    passes: int,
    average_aggregated_gradients: bool,
) -> Any:
    """A distributed optimizer of the same settings and, where it has begun, state."""
    if not hasattr(optimizer, "get_config") or not hasattr(optimizer, "apply"):
        raise ValueError(
            f"{type(optimizer).__name__} is neither an optimizer of Keras 3 nor one of "
            "tf.compat.v1.train"
        )
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is distributed already")
    _agree_on_overflows()
    kind = type(optimizer)
    made = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__})
    config = optimizer.get_config()
    if name:
        config["name"] = name
    new: Any = made.from_config(config)  # type: ignore[attr-defined]
    object.__setattr__(new, "_evener", (reduction, passes, average_aggregated_gradients))
    if getattr(optimizer, "built", False):
        new.build(optimizer._trainable_variables)
        for variable, old in zip(new.variables, optimizer.variables, strict=True):
            variable.assign(old)
    return new
