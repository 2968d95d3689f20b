"""`hvd.elastic` for Keras: the state of a model, and callbacks that keep it during `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from evener.horovod.tensorflow.elastic import TensorFlowKerasState, run

_Callback: Any = tf.keras.callbacks.Callback


class KerasState(TensorFlowKerasState):
    """A Keras model and its optimizer, and attributes of any type that can be pickled."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)


class CommitStateCallback(_Callback):  # type: ignore[misc]
    """Commits `state` after every `batches_per_commit` batches, and after an epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Ranks that came later count with the others."""
        del logs
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and commit."""
        del batch, logs
        self._left -= 1
        if self._left == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        del epoch, logs
        self._commit()

    def _commit(self) -> None:
        self.state.commit()
        self._left = self.batches_per_commit


class UpdateBatchStateCallback(_Callback):  # type: ignore[misc]
    """Keeps `state.batch`: how many batches of this epoch are done. `fit` then does the rest."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._steps: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Remember how many batches an epoch has."""
        del logs
        self._steps = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """After a restart, fewer batches are left."""
        del epoch, logs
        if self.params.get("steps"):
            if self._steps is None:
                self._steps = self.params["steps"]
            self.params["steps"] = self._steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        del logs
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its first batch."""
        del epoch, logs
        self.state.batch = 0


class UpdateEpochStateCallback(_Callback):  # type: ignore[misc]
    """Keeps `state.epoch`: how many epochs are done, over all restarts."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """`fit` counts from 0 again after a restart."""
        del logs
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        del logs
        self.state.epoch = self._first + epoch + 1


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
