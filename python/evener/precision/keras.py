"""The rules on a model of Keras 3 with TensorFlow: a callback for `fit`.

    model.fit(..., callbacks=[evener.precision.keras.FollowPrecision()])

There are two training functions over the same variables, one traced with the layers' policies as
they are and one with mixed ones; the callback chooses which runs next. Variables stay float32. The
half one also computes, where the loss looks wrong, the same batch's loss in both precisions (the
probe), and gives zero gradients where the loss is not finite, so no variable becomes so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evener.errors import UsageError
from evener.precision.journal import Journal
from evener.precision.rules import Event, Facts, Limits, Machine

_Callback: Any = keras.callbacks.Callback


class FollowPrecision(_Callback):
    """Half precision that follows the loss.

    dtype: "bfloat16"; "float16" has too small a range without a loss scale and is refused. limits:
    of the rules. agree: with several ranks, a function that gives the rows of all ranks for this
    rank's row of float64 [1, 2] (`hvd.allgather` of horovod.tensorflow.keras), so that all switch
    in the same step. rank: of this process, for the records.
    """

    def __init__(
        self,
        dtype: str = "bfloat16",
        limits: Limits | None = None,
        agree: Callable[[np.ndarray], Any] | None = None,
        rank: int = 0,
    ) -> None:
        """Raises UsageError for another dtype."""
        super().__init__()
        if dtype != "bfloat16":
            raise UsageError(f"dtype={dtype!r} has no loss scale here", 'give dtype="bfloat16"')
        self.machine = Machine(limits or Limits(), dtype)
        self._journal = Journal(self.machine)
        self._policy = keras.dtype_policies.get(f"mixed_{dtype}")
        self._agree, self._rank = agree, rank

    # --- begin and end ---

    def on_train_begin(self, logs: Any = None) -> None:
        """Put the two training functions in place. Raises UsageError for what has no float32."""
        del logs
        model = self.model
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"Keras computes with {keras.backend.backend()}",
                "set KERAS_BACKEND=tensorflow; for torch see evener.precision.follow",
            )
        if model.steps_per_execution != 1 or model.run_eagerly:
            raise UsageError(
                "FollowPrecision looks at each step of a compiled training function",
                "leave steps_per_execution and run_eagerly out of compile()",
            )
        self._layers = [
            layer
            for layer in model._flatten_layers()
            if layer.dtype_policy.name == "float32" and layer is not model
        ]
        if not self._layers:
            raise UsageError(
                "no layer of the model computes in float32",
                "leave mixed precision out: FollowPrecision chooses it",
            )
        self._full = self._layers[0].dtype_policy
        self._loss = tf.Variable(0.0, dtype=tf.float32, trainable=False)
        self._gap = tf.Variable(0.0, dtype=tf.float32, trainable=False)
        self._look = tf.Variable(False, trainable=False)
        self._tracing_half = False
        self._functions: dict[bool, Any] = {}
        self._journal.open(self._rank)
        self._step, self._apply = model.train_step, model.optimizer.apply
        object.__setattr__(model, "train_step", self._watched)
        object.__setattr__(model.optimizer, "apply", self._finite)
        model.make_train_function(force=True)
        self._functions[False] = model.train_function
        self._use(self.machine.half)

    def on_train_end(self, logs: Any = None) -> None:
        """The model is as before; its variables were float32 throughout."""
        del logs
        model = self.model
        object.__delattr__(model, "train_step")
        object.__delattr__(model.optimizer, "apply")
        self._policies(False)
        model.train_function = None
        self._journal.close()

    def _policies(self, half: bool) -> None:
        for layer in self._layers:
            layer.dtype_policy = self._policy if half else self._full

    def _use(self, half: bool) -> None:
        self._policies(half)
        self._tracing_half = half
        if half not in self._functions:
            self.model.make_train_function(force=True)
            self._functions[half] = self.model.train_function
        self.model.train_function = self._functions[half]

    # --- what is traced ---

    def _watched(self, data: Any) -> Any:
        """The model's own step; and its loss, which the model's tracker has in a sum."""
        tracker, half = self.model._loss_tracker, self._tracing_half
        total, count = tf.identity(tracker.total), tf.identity(tracker.count)
        others = [v for v in self.model.non_trainable_variables if "float" in v.dtype]
        before = [tf.identity(v) for v in others] if half else []
        logs = self._step(data)
        loss = (tracker.total - total) / (tracker.count - count)
        self._loss.assign(tf.cast(loss, tf.float32))
        if not half:
            return logs
        finite = tf.math.is_finite(loss)
        for variable, old in zip(others, before, strict=bool(before)):
            variable.assign(tf.where(finite, variable, old))
        tracker.total.assign(tf.where(finite, tracker.total, total))
        tracker.count.assign(tf.where(finite, tracker.count, count))
        gap = tf.cond(
            tf.logical_or(self._look, tf.logical_not(finite)),
            lambda: self._probe(data),
            lambda: tf.constant(0.0),
        )
        self._gap.assign(gap)
        return logs

    def _finite(self, grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer's `apply`; zeros where the gradients are not finite in half precision."""
        grads = list(grads)
        if self._tracing_half:
            dense = [g for g in grads if g is not None]
            flags = [tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(g))) for g in dense]
            fine = tf.reduce_all(tf.stack(flags))
            grads = [_zero_unless(fine, g) for g in grads]
        return self._apply(grads, trainable_variables)

    def _probe(self, data: Any) -> Any:
        """The relative difference of the loss in half and in full precision."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        losses = []
        for half in (True, False):
            self._policies(half)
            out = self.model(x, training=False)
            loss = self.model.compute_loss(x=x, y=y, y_pred=out, sample_weight=weight)
            losses.append(tf.cast(loss, tf.float32))
        self._policies(True)
        half_loss, full = losses
        gap = tf.abs(half_loss - full) / tf.maximum(tf.abs(full), 1e-12)
        gap = tf.where(tf.math.is_finite(gap), gap, np.inf)
        return tf.where(tf.math.is_finite(full), gap, 0.0)

    # --- after each step ---

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """What follows from the step."""
        del batch, logs
        row = np.array([[self._loss.numpy(), self._gap.numpy()]], np.float64)
        if self._agree is not None:
            # Infinite values do not survive every reduction; a gather keeps them.
            row = np.asarray(self._agree(row))
        loss, gap = float(row[:, 0].mean()), float(row[:, 1].max())
        before = self.machine.half
        self._journal.observe(Facts(loss), lambda: gap)
        if self.machine.half != before:
            self._use(self.machine.half)
        if bool(self._look.numpy()) != self.machine.suspects:
            self._look.assign(self.machine.suspects)

    @property
    def events(self) -> list[Event]:
        """All that was worth a line."""
        return self._journal.events

    def report(self) -> dict[str, Any]:
        """The state, the share of half steps, and the last events."""
        return self._journal.report()


def _zero_unless(fine: Any, gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.where(fine, gradient.values, tf.zeros_like(gradient.values))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(fine, gradient, tf.zeros_like(gradient))
