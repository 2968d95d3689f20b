"""`TorchState`: models, optimizers, samplers and plain objects that survive a change of the ranks.

A handler knows how a kind of value is saved, restored and synchronised; values of no known kind are
pickled. `set_handler_registry` adds kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from evener.comm import transport
from evener.comm.world import abort, elastic
from evener.horovod.common.elastic import ObjectState
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.torch.elastic.sampler import ElasticSampler
from evener.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    put_in_place,
)
from evener.horovod.torch.mpi_ops import rank


class StateHandler:
    """Keeps one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the value as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Back to what was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object in the value's place."""
        self.value = value
        self.save()


class _DictHandler(StateHandler):
    """Handles a value with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # load_state_dict of an optimizer takes over what it is given.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_DictHandler):
    """Handles a torch.nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_DictHandler):
    """Handles a torch.optim.Optimizer, wrapped or not."""

    def restore(self) -> None:
        # Not load_state_dict: a scheduler would go on to set the learning rate of groups that the
        # optimizer no longer has.
        put_in_place(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_DictHandler):
    """Handles an ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a type and its handler; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs."""
    global _handler_registry
    _handler_registry = list(registry)


def _get_handler(value: Any) -> StateHandler | None:
    """A handler for `value`; None where no kind fits."""
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """An attribute for each argument; models, optimizers and samplers are kept by their state."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers: dict[str, StateHandler] = {}
        for name, value in values.items():
            handler = _get_handler(value)
            if handler is not None:
                handlers[name] = handler
        self._handlers = handlers
        for name, handled in handlers.items():
            setattr(self, name, handled.value)
        rest = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def settle(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        # What NCCL or a transport left when it failed or was aborted must not be kept.
        if why := elastic.broken() or abort.nccl_error() or transport.failure():
            raise HorovodInternalError(why, "the last commit is restored")

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
