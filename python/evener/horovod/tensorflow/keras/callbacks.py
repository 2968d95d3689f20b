"""Callbacks for `fit`: the same beginning on all ranks, averaged metrics, learning rates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow.collectives import allreduce
from evener.horovod.tensorflow.functions import broadcast_variables

_Callback: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(_Callback):  # type: ignore[misc]
    """Gives the model and the optimizer the values of the rank `root_rank`, after the first batch.

    (By then all variables are there.) local_variables: those that stay as they are on each rank.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local = {id(variable) for variable in local_variables or []}

    def register_local_var(self, var: Any) -> None:
        """This variable stays as it is on each rank."""
        self._local.add(id(var))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, once."""
        del batch, logs
        if self.broadcast_done:
            return
        with tf.device(self.device):
            found = list(self.model.variables)
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None:
                found += optimizer.variables
            broadcast_variables([v for v in found if id(v) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(_Callback):  # type: ignore[misc]
    """Averages metrics over the ranks at the end of an epoch. Before callbacks that use them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the values in `logs`."""
        del epoch
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if not logs or not names or mpi_ops.size() == 1:
            return
        with tf.device(self.device):
            values = tf.constant([float(logs[name]) for name in names], tf.float64)
            means = allreduce(values, name="MetricAverageCallback").numpy()
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):  # type: ignore[misc]
    """The rate is `initial_lr` times `multiplier(epoch)`, from `start_epoch` to `end_epoch`.

    multiplier: a function, or a number. staircase: by whole epochs, else by batches (their number
    must be known: `fit` says it, or steps_per_epoch). momentum_correction: an SGD's
    momentum is scaled for the step in which the rate changes (Goyal et al., 2017).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            # A number is a decay by epochs.
            decay = float(multiplier)
            self.staircase = True
            self.multiplier = lambda epoch: decay ** (epoch - start_epoch)

    def _rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer, before = self.model.optimizer, self._rate()
        now = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, float) and momentum and before:
            self._momentum = momentum
            optimizer.momentum = momentum * now / before

    def _restore(self) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        del logs
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "the number of batches of an epoch is not known: give "
                    f"{type(self).__name__} steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        del logs
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate."""
        del logs
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            self._adjust(epoch + float(batch) / float(self.steps_per_epoch or 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Put the momentum back."""
        del batch, logs
        self._restore()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Show the rate among the metrics."""
        del epoch
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The rate grows from `initial_lr` / size to `initial_lr` over `warmup_epochs` epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Whole epochs come out round.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            size = mpi_ops.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr=initial_lr,
            multiplier=multiplier,
            start_epoch=0,
            end_epoch=int(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say where the rate has come to."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch and epoch == self.end_epoch - 1 and self.verbose > 0:
            tf.print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {self._rate():g}")


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model in a file. `filepath` may be set later; without one nothing is kept."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | os.PathLike[str] = "best.keras",
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )
