"""What was once wrong with the doors, put back in the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def _forgets_frozen() -> None:
    from evener.ddp import line

    inner = line.taken
    line.taken = lambda model: [(n, p) for n, p in inner(model) if p.requires_grad]


def _reduces_every_backward() -> None:
    from evener.ddp.model import AcceleratedDataParallel

    inner = AcceleratedDataParallel.backward_ended

    def ended(self: Any) -> None:
        inner(self)
        self.evener.arrivals.active = True

    AcceleratedDataParallel.backward_ended = ended  # type: ignore[method-assign]


def _state_is_not_watched() -> None:
    from evener.comm.overlap.state import StateWatch

    StateWatch.seen = lambda _: ""  # type: ignore[method-assign]
    StateWatch.of_the_step = lambda _: contextlib.nullcontext()  # type: ignore[method-assign]


def _transforms_are_not_seen() -> None:
    from evener.comm.overlap import interpose

    interpose._transforms = lambda: iter(())  # type: ignore[assignment]
    interpose.refusal = lambda: ""
    interpose.within = lambda: False


def _gradients_are_not_looked_at() -> None:
    from evener.comm.reducer import Reducer

    Reducer.begins = lambda _: None  # type: ignore[method-assign]


def _last_look_is_not_forgotten() -> None:
    from evener.comm.reducer import Reducer

    inner = Reducer.begins

    def begins(self: Any) -> None:
        before = self._kept
        inner(self)
        self._kept = before | self._kept

    Reducer.begins = begins  # type: ignore[method-assign]


def _weights_are_not_looked_at() -> None:
    from evener.comm import holders

    holders.share_memory = lambda _: False  # type: ignore[assignment]


def _unused_are_sent() -> None:
    from evener.comm.state import ShardState

    ShardState.aside = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign]


def _frozen_have_no_node() -> None:
    from evener.comm import arrivals
    from evener.ddp import torch_reducer as own

    own.thawed = arrivals.thawed = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]


def _fp16_is_chosen() -> None:
    from evener.comm import wires

    wires.get("fp16").overflows = False


def _compiled_code_is_not_seen() -> None:
    from evener.comm.overlap import interpose

    interpose._compiled = lambda enter: enter  # type: ignore[assignment]
    interpose.within = lambda: False


def _ranks_talk_in_a_forward() -> None:
    from evener.comm.steps import Steps

    turn, began = Steps._turn, Steps.forward_began

    def forward_began(self: Any, compiled: bool) -> None:
        for _ in range(self.__dict__.pop("owed", 0)):
            turn(self)
        began(self, compiled)

    Steps._turn = lambda self: self.__dict__.update(owed=1)  # type: ignore[method-assign]
    Steps.forward_began = forward_began  # type: ignore[method-assign]


def _each_rank_decides() -> None:
    from evener.ddp import line

    line.everyones = lambda communicators, mine: [mine] * communicators.size


# What plain DDP does not raise, and ranks that wait for each other.
ENDS = {
    "C2 every backward is reduced": "Timed out waiting",
    "C4 torch.func is not seen": "has been modified by an inplace operation",
    "H2 frozen parameters have no node": "It is not possible to get the gradient edge",
    "H4 compiled code is not seen": "KeyError: '_evener_owner'",
    "H5 ranks talk in a forward": "Timed out waiting",
    "H5 each rank decides alone": "Timed out waiting",
}
FAULTS: dict[str, Callable[[], None]] = {
    "C1 what is frozen is left out": _forgets_frozen,
    "C2 every backward is reduced": _reduces_every_backward,
    "C3 state is not watched": _state_is_not_watched,
    "C4 torch.func is not seen": _transforms_are_not_seen,
    "C5 gradients that are kept are not seen": _gradients_are_not_looked_at,
    "C5 gradients seen by a backward to inputs stay": _last_look_is_not_forgotten,
    "C5 weights that are kept are not seen": _weights_are_not_looked_at,
    "H1 residuals of unused parameters are dropped": _unused_are_sent,
    "H2 frozen parameters have no node": _frozen_have_no_node,
    "H3 auto chooses FP16": _fp16_is_chosen,
    "H4 compiled code is not seen": _compiled_code_is_not_seen,
    "H5 ranks talk in a forward": _ranks_talk_in_a_forward,
    "H5 each rank decides alone": _each_rank_decides,
}
