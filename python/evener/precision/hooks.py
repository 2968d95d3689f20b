"""Precision in a program that keeps its own loop: no `policy.step`, only hooks.

    the model's forward     runs under autocast while the state is half; its outputs are float32,
                            but not where the program has an autocast of its own around it
    Tensor.backward         says the loss (a mean, where a step has several backward passes)
    the optimizer's step    decides; a step whose loss is not finite in half precision is left out

The probe cannot compute the loss again here. It computes the outputs of the last batch in both
precisions, and the loss's difference from theirs by the gradient of the loss with respect to them,
to first order. That gradient is kept only from the step on in which the loss looks too high.
There is no loss scale, so this is for bfloat16 (whose range is float32's).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from evener.errors import UsageError
from evener.precision.aside import aside
from evener.precision.later import Later
from evener.precision.rules import Facts, Machine


class Policy(Protocol):
    """What is used of `evener.precision.torch.Policy`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    machine: Machine
    scaler: Any
    device: str

    @property
    def half(self) -> bool: ...
    def autocast(self, half: bool | None = None) -> Any: ...
    def agreed(self, loss: float) -> Facts: ...
    def agreed_probe(self, mine: float) -> float: ...
    def observe(
        self, facts: Facts, probe: Callable[[], float], zeros: Callable[[], float] | None
    ) -> None: ...


_active: weakref.WeakSet[Hooks] = weakref.WeakSet()
_backward: Callable[..., None] | None = None


class Hooks:
    """The hooks of one policy; `remove` takes them off.

    method: of the model, that is run in half precision. steps: whether the optimizer's `step`
    decides; if not, the caller of `decide` does.
    """

    def __init__(self, policy: Policy, method: str = "forward", steps: bool = True) -> None:
        global _backward
        self._policy = policy
        self._model, self._method = policy.model, method
        self._forward = getattr(policy.model, method)
        self._own = method in vars(policy.model)
        self._losses: list[Later] = []
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._gradients: list[torch.Tensor | None] = []
        self._ran = False  # forward, in this step
        setattr(policy.model, method, self._run)
        optimizer = policy.optimizer
        self._handle = (
            optimizer.register_step_pre_hook(lambda one, *_: self.decide(one)) if steps else None
        )
        if _backward is None:
            _backward = torch.Tensor.backward
            torch.Tensor.backward = _see_backward  # type: ignore[method-assign]
        _active.add(self)

    def remove(self) -> None:
        """The model, the optimizer and Tensor.backward are as before. May be called twice."""
        global _backward
        if self not in _active:
            return
        _active.discard(self)
        if self._handle is not None:
            self._handle.remove()
        if self._own:
            setattr(self._model, self._method, self._forward)
        else:
            delattr(self._model, self._method)
        if not _active and _backward is not None:
            torch.Tensor.backward = _backward  # type: ignore[method-assign]
            _backward = None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy
        if not (self._model.training and torch.is_grad_enabled()):
            return self._as(policy.half, *args, **kwargs)
        self._inputs, self._ran, self._gradients = (args, kwargs), True, []
        out = self._as(policy.half, *args, **kwargs)
        if policy.half and policy.machine.suspects:
            for index, x in enumerate(_floats(out)):
                self._gradients.append(None)
                if x.requires_grad:
                    x.register_hook(lambda g, i=index: self._keep(i, g))
        return out

    def _as(self, half: bool, *args: Any, **kwargs: Any) -> Any:
        if not half:
            return self._forward(*args, **kwargs)
        around = torch.is_autocast_enabled(self._policy.device)
        with self._policy.autocast(True):
            out = self._forward(*args, **kwargs)
        return out if around else _wide(out)

    def _keep(self, index: int, gradient: torch.Tensor) -> None:
        if index < len(self._gradients):
            self._gradients[index] = gradient.detach()

    def saw(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""
        if self._ran:
            self._losses.append(Later(loss))

    def decide(self, optimizer: Any) -> None:
        """Before a step of the optimizer: what follows from the loss.

        Raises UsageError for float16.
        """
        policy = self._policy
        if policy.scaler.is_enabled():
            raise UsageError(
                "float16 needs a loss scale, which a loop of its own does not give",
                "call policy.step(...) in the loop, or give dtype=torch.bfloat16",
            )
        if not self._losses:
            return
        loss = sum(one.read() for one in self._losses) / len(self._losses)
        half = policy.half
        facts = policy.agreed(loss)
        policy.observe(facts, lambda: policy.agreed_probe(self._probe(loss)), None)
        if half and not math.isfinite(facts.loss):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        self._losses, self._inputs, self._ran = [], ((), {}), False

    @torch.no_grad()
    def _probe(self, loss: float) -> float:
        """The relative difference of the loss in half and in full precision, to first order."""
        args, kwargs = self._inputs
        with aside(self._model):
            half = _floats(self._as(True, *args, **kwargs))
        with aside(self._model):
            full = _floats(self._as(False, *args, **kwargs))
        if not all(bool(x.isfinite().all()) for x in full):
            return 0.0
        if not all(bool(x.isfinite().all()) for x in half):
            return math.inf
        gap = 0.0
        for h, f, g in zip(half, full, self._gradients, strict=False):
            if g is not None and g.shape == h.shape:
                gap += abs(float(((h - f).double() * g.double()).sum()))
        if not math.isfinite(loss):
            return 0.0
        return gap / max(abs(loss), 1e-12)


def _see_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if self.numel() == 1:
        for hooks in list(_active):
            hooks.saw(self)
    assert _backward is not None
    _backward(self, *args, **kwargs)


def _wide(out: Any) -> Any:
    """With float32 instead of half, as losses want it."""
    halves = (torch.float16, torch.bfloat16)
    return pytree.tree_map(
        lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in halves else x, out
    )


def _floats(out: Any) -> list[torch.Tensor]:
    return [
        x
        for x in pytree.tree_leaves(out)
        if isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    ]
