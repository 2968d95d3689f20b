"""What an optimizer is to the engine: a `Rule`.

A rule is elementwise: the new weight of an element depends on that element's weight, gradient and
moments alone. So a step may be cut into slices anywhere, and the slices may be updated anywhere.
The exception is a rule that is `whole`: it takes matrices one by one, each as a whole and on the
accelerator (`matrices`: on several ranks). A rule must give its `formula` in torch operations; that
is enough to train. It may give faster forms:

- `on_host`: a fused kernel of `crates/kernels` (else the formula, on the cores);
- `on_device`: a Triton kernel (else the formula, on the GPU).

All forms do the same operations in the same order, each rounded to float32 once, so a chunk's place
does not change a bit of it. Tests hold that for each rule in `RULES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from evener.base import optimizers as _optimizers
from evener.errors import UsageError
from evener.zero import states as layout
from evener.zero.states import Noise, States, part


class Rule(ABC):
    """An optimizer with its hyper-parameters.

    given: hyper-parameters that differ from `defaults`. Raises UsageError for one that is unknown.
    """

    name: ClassVar[str]
    """In checkpoints and errors."""
    title: ClassVar[str]
    """The class of torch or of another library that does the same."""
    aliases: ClassVar[frozenset[str]] = frozenset()
    """Further names in DeepSpeed's configuration, in small letters."""
    defaults: ClassVar[Mapping[str, Any]]
    """Hyper-parameters by the names that torch's optimizer has."""
    moments: ClassVar[Mapping[str, str]]
    """torch's name of each tensor of states: its place in `States`, "first" or "second"."""
    optional: ClassVar[bool] = False
    """The optimizer's state may lack the moments: some hyper-parameters need none."""
    kernel: ClassVar[bool] = False
    """Whether `on_device` is one kernel on a GPU, which takes no memory beside the states."""
    whole: ClassVar[bool] = False
    """A matrix is updated as a whole, after `of_shape` has said what its shape is."""
    only: ClassVar[Mapping[str, Any]] = {}
    """Options of the title's class that change the arithmetic: the one value that is the same."""

    def __init__(self, **given: Any) -> None:
        if unknown := set(given) - set(self.defaults):
            raise UsageError(
                f"{self.name} has no parameter {', '.join(sorted(unknown))}",
                f"it has {', '.join(self.defaults)}",
            )
        self.values: dict[str, Any] = {**self.defaults, **given}
        """All hyper-parameters, defaults filled in."""

    @classmethod
    def read(cls, title: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters of an optimizer of the title's class. Raises UsageError for an option
        that this rule does not have."""
        for option, same in cls.only.items():
            if option in defaults and defaults[option] != same:
                raise UsageError(
                    f"{title}({option}={defaults[option]!r})", f"use {option}={same!r}"
                )
        return {name: defaults[name] for name in cls.defaults if name in defaults}

    @classmethod
    def from_deepspeed(cls, kind: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """Hyper-parameters, where `kind` (small letters) names this rule; else None."""
        if kind != cls.name and kind not in cls.aliases:
            return None
        for key in ("torch_adam", "fused", "foreach"):
            params.pop(key, None)
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in params.items()
            if value != "auto"
        }

    def of_shape(self, shape: torch.Size | None) -> Rule:
        """The rule for a parameter of this shape. None: what is updated is of several."""
        return self

    def flops(self, shape: torch.Size) -> float:
        """Operations of matrix products in an update of a parameter."""
        return 0.0

    @abstractmethod
    def formula(
        self,
        w: torch.Tensor,
        g: torch.Tensor,
        moments: list[torch.Tensor],
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """One step in place: `w` and `moments`, float32 [n], of the float32 gradient `g`, which
        may be overwritten. `step` counts from 1."""

    def on_host(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        run: _optimizers.Run,
    ) -> None:
        """One step on CPU tensors; the gradient is multiplied by `scale` first."""
        self._by_formula(
            states, gradient, hyper, step, scale, Noise(run.seed, run.stream, run.offset)
        )

    def on_device(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise | None = None,
    ) -> None:
        """The same step where the states are."""
        self._by_formula(states, gradient, hyper, step, scale, noise or Noise())

    def _by_formula(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise,
    ) -> None:
        size = layout.SLICE
        for begin in range(0, gradient.numel(), size):
            end = min(begin + size, gradient.numel())
            at = Noise(noise.seed, noise.stream, noise.offset + begin)
            self._slice(part(states, begin, end), gradient[begin:end], hyper, step, scale, at)

    def _slice(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise,
    ) -> None:
        w = states.full()
        if w is states.weights or w is states.master:
            w = w.clone()
        kept = [place for place in self.moments.values() if getattr(states, place) is not None]
        # Not copied where they are float32 already.
        moments = [layout.unpacked(states.moment(place), place) for place in kept]
        self.formula(w, gradient.float() * scale, moments, hyper, step)
        random = None
        narrow = any(getattr(states, place).dtype != torch.float32 for place in kept)
        if narrow or states.rounded:
            key = layout.random_key(noise.seed, step, noise.stream)
            random = layout.random_bits(w.numel(), key, noise.offset, w.device)
        for number, (place, value) in enumerate(zip(kept, moments, strict=True)):
            bits = None if random is None else random >> 16 * number
            layout.pack_into(states.moment(place), place, value, bits)
        states.store(w, random)
