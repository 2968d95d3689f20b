"""The memory of a call before it runs: a call that is larger than any of its kind before is traced,
and room is made where the forecast is over the budget."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn

from evener.zero.device import Device
from evener.zero.inputs import signature
from evener.zero.loading import Loading
from evener.zero.passes import Passes
from evener.zero.planner import Plan
from evener.zero.profile import Profile
from evener.zero.room import Room
from evener.zero.store import Store
from evener.zero.trace import timed_trace
from evener.zero.vocabulary import Head

logger = logging.getLogger("evener.zero")


class Foresight:
    """`alone`: one rank has all states, so that it may make room by itself."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        device: Device,
        passes: Passes,
        loading: Loading,
        room: Room,
        plan: Plan | None,
        *,
        head: Head | None,
        chunked: bool,
        alone: bool,
    ) -> None:
        self._model, self._store, self._device = model, store, device
        self._passes, self._loading, self._room = passes, loading, room
        self._plan, self._alone = plan, alone
        self._loss = {"head": head, "chunked": chunked}
        self._seen: dict[Any, list[int]] = {}

    def largest(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is larger than all of its kind before; then it is the one to know."""
        # Floating-point inputs are cast before they are used: an example need not be.
        shapes, spec = signature(args, kwargs, self._store.dtype)
        sizes = [math.prod(s[0]) for s in shapes if isinstance(s, tuple)]
        kind = spec, tuple((len(s[0]), s[1]) if isinstance(s, tuple) else s for s in shapes)
        before = self._seen.get(kind)
        # A little longer is not worth a trace: where it is too much, the pass runs again.
        if before is not None and all(
            new <= 1.02 * old for new, old in zip(sizes, before, strict=True)
        ):
            return False
        self._seen[kind] = [max(p) for p in zip(sizes, before or sizes, strict=True)]
        return True

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass: make the room that it will take."""
        if not torch.is_grad_enabled() or not self.largest(args, kwargs):
            return
        if self._plan is None and self._device.peak_bytes() == 0:
            return  # nothing was planned, and nothing is limited
        with self._device.elsewhere(), self._passes.away():
            profile, said = timed_trace(
                self._model,
                [unit for unit, _ in self._store.units],
                args,
                kwargs,
                device=self._device.device,
                dtype=self._store.dtype,
                **self._loss,
            )
        logger.info("new inputs: %s", said)
        if profile is None:
            return
        self._keep(profile)
        if self._plan is not None and self._alone:
            self._room.fit(profile, self._plan.budget.gpu)

    def _keep(self, profile: Profile) -> None:
        """Weights that are read while their unit does not run stay from now on."""
        for unit, chunks in self._store.units:
            for chunk in chunks:
                if unit.module is not None and any(
                    piece.name in profile.strays for piece in chunk.group.pieces
                ):
                    self._loading.keep(chunk)
