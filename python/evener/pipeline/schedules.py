"""The schedules: which rank does what, in which order.

The orders are those that torch.distributed.pipelining runs. For schedules with several stages per
rank they are taken from torch's own classes, made without processes, so that what is simulated is
what is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from evener.errors import UsageError


class Action(NamedTuple):
    """`kind`: F forward, B whole backward, I gradients of inputs, W gradients of parameters."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Kind:
    """A schedule: torch's class, stages per rank (0: as asked for), whether backward is split."""

    name: str
    torch_class: str
    local: int
    split: bool
    v: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("GPipe", "ScheduleGPipe", 1, False),
        Kind("1F1B", "Schedule1F1B", 1, False),
        Kind("Eager1F1B", "Schedule1F1B", 1, False),
        Kind("Interleaved1F1B", "ScheduleInterleaved1F1B", 0, False),
        Kind("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 0, True),
        Kind("ZBVZeroBubble", "ScheduleZBVZeroBubble", 2, True, v=True),
    )
}


def kind_of(name: str) -> Kind:
    """A schedule by its name. Raises UsageError."""
    for known, kind in KINDS.items():
        if known.lower() == name.lower():
            return kind
    raise UsageError(f"schedule {name!r} is not known", f"one of {', '.join(KINDS)}")


def ranks_of(kind: Kind, stages: int, local: int) -> int:
    """How many ranks `stages` stages take, `local` of them on each. Raises UsageError."""
    if kind.local and local != kind.local:
        raise UsageError(
            f"{kind.name} has {kind.local} stage(s) per rank, not {local}",
            f"give stages_per_rank={kind.local}",
        )
    if stages % local or stages < 1:
        raise UsageError(
            f"{stages} stages cannot be put on ranks with {local} each",
            f"give a multiple of {local}",
        )
    return stages // local


def rank_of(kind: Kind, stage: int, ranks: int) -> int:
    """The rank of a stage: in rounds, or there and back again (V)."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if kind.v and turn % 2 else place


def check(kind: Kind, ranks: int, microbatches: int) -> str:
    """Why a schedule cannot run this many microbatches; "" where it can."""
    if kind.name in ("1F1B", "Eager1F1B") and microbatches < ranks:
        return f"{kind.name} wants at least as many microbatches as stages ({ranks})"
    if kind.local != 1 and not kind.v:
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            return f"{kind.name} wants microbatches in {rounds} equal rounds"
    return ""


@lru_cache(maxsize=256)
def order(name: str, ranks: int, local: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank does, in order. Raises UsageError where the schedule cannot run it."""
    kind = kind_of(name)
    if problem := check(kind, ranks, microbatches):
        raise UsageError(problem, "give another number of microbatches")
    if kind.name == "GPipe":
        return tuple(
            (*(Action("F", rank, m) for m in range(microbatches)),
             *(Action("B", rank, m) for m in range(microbatches)))
            for rank in range(ranks)
        )  # fmt: skip
    if kind.name in ("1F1B", "Eager1F1B"):
        eager = kind.name != "1F1B"
        return tuple(
            _one_forward_one_backward(rank, ranks, microbatches, eager) for rank in range(ranks)
        )
    return _torch_order(kind, ranks, local, microbatches)


def _one_forward_one_backward(
    rank: int, ranks: int, microbatches: int, eager: bool
) -> tuple[Action, ...]:
    """Eager: nearly twice as many forwards go ahead, so that on a slow network the next microbatch
    is there while a gradient still travels. It holds as many more activations."""
    ahead = min(2 * (ranks - rank) - 1 if eager else ranks - rank, microbatches)
    actions = [Action("F", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action("B", rank, m))
        if m + ahead < microbatches:
            actions.append(Action("F", rank, m + ahead))
    return tuple(actions)


class _Stage:
    """What torch's schedules ask of a stage when they are made."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = nn.Module()
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


def _torch_order(
    kind: Kind, ranks: int, local: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    from torch.distributed import pipelining

    stages = ranks * local
    own = [s for s in range(stages) if rank_of(kind, s, ranks) == 0]
    made: Any = getattr(pipelining, kind.torch_class)(
        [_Stage(s, stages, 0, ranks) for s in own],
        n_microbatches=microbatches,
        loss_fn=lambda output, _target: output,
    )
    letters = {"F": "F", "B": "B", "I": "I", "W": "W"}
    found = []
    for rank in range(ranks):
        actions = []
        for step in made.pipeline_order[rank]:
            if step is None or step.microbatch_index is None:
                continue
            letter = letters.get(str(step.computation_type.value), "")
            letter = letter or {"FORWARD": "F", "BACKWARD": "B"}.get(
                step.computation_type.name.removeprefix("FULL_"), ""
            )
            if letter:
                actions.append(Action(letter, step.stage_index, step.microbatch_index))
        found.append(tuple(actions))
    return tuple(found)


def in_flight(name: str, ranks: int, local: int, microbatches: int) -> tuple[int, ...]:
    """For each stage the most microbatches whose activations it holds at a time."""
    peak = [0] * (ranks * local)
    for actions in order(name, ranks, local, microbatches):
        now = dict.fromkeys((a.stage for a in actions), 0)
        for action in actions:
            if action.kind == "F":
                now[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], now[action.stage])
            elif action.kind in "BW":
                now[action.stage] -= 1
    return tuple(peak)
