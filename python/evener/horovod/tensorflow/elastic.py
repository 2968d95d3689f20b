"""`hvd.elastic`: training that goes on while ranks come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from evener.horovod.common.elastic import ObjectState, State, run_fn
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.tensorflow import mpi_ops
from evener.horovod.tensorflow._state import STATE
from evener.horovod.tensorflow.functions import broadcast_object, broadcast_variables
from evener.horovod.tensorflow.util import _executing_eagerly


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `func(state, ...)` is called again, on all ranks, whenever these have changed.

    The state is synchronised before.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as error:
            # A graph can only raise TensorFlow's own errors.
            if "Horovod" in error.message:
                raise HorovodInternalError(error.message) from error
            raise

    return run_fn(wrapper, _reset)


def _reset() -> None:
    mpi_ops.shutdown()
    STATE.leave()  # where an earlier init came only half of its way
    mpi_ops.init()


class TensorFlowState(ObjectState):
    """Variables (default: all of the v1 graph), and attributes of any type that can be pickled."""

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._values: list[Any] = []
        self._read()
        super().__init__(
            functools.partial(broadcast_object, session=session), mpi_ops.rank, **kwargs
        )

    def save(self) -> None:
        self._read()
        super().save()

    def restore(self) -> None:
        if _executing_eagerly():
            for variable, value in zip(self.variables, self._values, strict=True):
                variable.assign(value)
        else:
            session = self._session()
            for variable, value in zip(self.variables, self._values, strict=True):
                variable.load(value, session)
        super().restore()

    def sync(self) -> None:
        synced = broadcast_variables(self.variables, root_rank=0)
        if not _executing_eagerly():
            self._session().run(synced)
        self._read()
        super().sync()

    def _session(self) -> Any:
        return self.session or tf.compat.v1.get_default_session()

    def _read(self) -> None:
        if _executing_eagerly():
            self._values = [variable.numpy() for variable in self.variables]
        else:
            self._values = list(self._session().run(self.variables))


class TensorFlowKerasState(ObjectState):
    """A Keras model and its optimizer, and attributes of any type that can be pickled."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built:
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`, or call it once."
            )
        self._weights: list[Any] = []
        self._slots: list[Any] | None = None
        self._read()
        super().__init__(broadcast_object, mpi_ops.rank, **kwargs)

    def save(self) -> None:
        self._read()
        super().save()

    def restore(self) -> None:
        self.model.set_weights(self._weights)
        variables = self._optimizer_variables()
        for variable, value in zip(variables, self._slots or [], strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        # An optimizer has its variables when it is built, which one rank may be and another not.
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(self.model.trainable_variables)
        broadcast_variables([*self.model.variables, *self._optimizer_variables()], root_rank=0)
        self._read()
        super().sync()

    def _optimizer_variables(self) -> list[Any]:
        found = getattr(self.optimizer, "variables", [])
        return list(found() if callable(found) else found)

    def _read(self) -> None:
        self._weights = self.model.get_weights()
        self._slots = [tf.identity(v).numpy() for v in self._optimizer_variables()]


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
