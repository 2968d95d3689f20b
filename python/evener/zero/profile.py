"""What a step of a model takes beside its weights, moment by moment, and what follows for a plan.

`trace` makes a profile; here is arithmetic only. A step is a list of moments in the order in which
the engine's hooks saw them: a unit is entered, left, or a chunk's gradient is whole. Between two of
them stand the bytes that were held (activations, and gradients as autograd left them) and the most
that were held. There are two such lists: with nothing recomputed, and with every repeated unit
recomputed. A plan that recomputes some of the units takes from each list what belongs to it: what
happens inside a unit depends on that unit alone.

`peaks` plays the list against where chunks live: which weights are on the accelerator then (as
`loading` does it), which gradients are on their way out (as `gradients` does it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from evener.zero.pool import Pool

Work = tuple[tuple[int, int, int], ...]
"""Operations of one kind: (FLOP, bytes read and written, how many)."""


@dataclass(frozen=True)
class Moment:
    """kind: "enter" or "leave" a unit, a chunk's "gradient" is whole, or "other". `index`: of the
    unit, or of the chunk. `level`: bytes then; `peak`: the most from then to the next moment."""

    kind: str
    index: int
    level: int
    peak: int


@dataclass(frozen=True)
class Held:
    """A chunk. `moves`: its weights come and go; `gradient`: bytes of its flat gradient, 0 where it
    is frozen; `leaves`: its gradient goes to the host. `update`: bytes that its update takes on the
    accelerator when its unit is through; None: it comes after the backward pass."""

    unit: int
    weights: int
    gradient: int
    moves: bool
    leaves: bool
    update: int | None = None


@dataclass(frozen=True)
class Rehearsed:
    """A kind of units that ran on the accelerator (see `rehearsal`). count: units of this kind.
    Seconds of one: `forward`, of which the host needs `launch` to launch it; `backward`, plain and
    recomputed. And the work that a trace would count for each."""

    count: int
    forward: float
    launch: float
    backward: float
    backward_recomputed: float
    forward_work: Work = ()
    backward_work: Work = ()
    backward_recomputed_work: Work = ()

    def times(self, count: int) -> Rehearsed:
        """The same of `count` units."""
        return replace(self, count=count)


@dataclass(frozen=True)
class Profile:
    """See the head of this file. `recomputed` is empty where the model has no repeated units.
    `rows`: the largest first dimension of the inputs, for what another batch would take."""

    plain: tuple[Moment, ...]
    recomputed: tuple[Moment, ...]
    repeated: frozenset[int]
    forward: Work = ()
    backward: Work = ()
    backward_recomputed: Work = ()
    strays: frozenset[str] = frozenset()
    """Parameters that were read while their unit did not run: they have to stay."""
    rows: int = 1
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes that a recomputed unit keeps until the backward pass, by unit."""
    late: frozenset[int] = frozenset()
    """Units that fetch the next one's input from the host when most of their memory is free."""
    calls: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    """What each unit was called with, as `rehearsal.specs` gives it."""
    rehearsed: tuple[Rehearsed, ...] = ()
    """What was measured of the units; empty: nothing was."""
    buffers: int = 0
    """Bytes of the model's buffers."""
    holes: tuple[int, int] = (0, 0)
    """Bytes that an allocator loses between tensors (see `pool`): with nothing recomputed, and with
    every repeated unit recomputed."""
    asked: str = field(default="", compare=False)
    """Which values the model asked for, in words; empty: none."""
    played: dict[Any, tuple[int, int]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """What `peaks` has found, by what was asked: plans ask the same again and again."""

    @property
    def mixes(self) -> bool:
        """Whether both lists have the same moments, so that some units may be recomputed."""
        pairs = [[(m.kind, m.index) for m in each] for each in (self.plain, self.recomputed)]
        return pairs[0] == pairs[1]

    def scaled(self, rows: int) -> Profile:
        """About the same with this many rows: activations grow with them."""
        return replace(self.times(rows / self.rows), rows=rows)

    def times(self, factor: float) -> Profile:
        """The same with everything this many times as large."""

        def less(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
            return tuple(
                replace(m, level=int(m.level * factor), peak=int(m.peak * factor)) for m in moments
            )

        inputs = {unit: int(size * factor) for unit, size in self.inputs.items()}
        return replace(
            self,
            plain=less(self.plain),
            recomputed=less(self.recomputed),
            inputs=inputs,
            holes=(int(self.holes[0] * factor), int(self.holes[1] * factor)),
        )

    @property
    def inputs_bytes(self) -> int:
        """What is held before the model runs: the batch, which is there in the update, too."""
        return self.plain[0].level if self.plain else 0

    def lost(self, recompute: Set[int]) -> int:
        """Bytes that an allocator loses between tensors where these units are recomputed."""
        if not recompute:
            return self.holes[0]
        return self.holes[1] if recompute >= self.repeated else max(self.holes)

    def order(self) -> list[int]:
        """The units as a step enters them, forward and backward."""
        return [m.index for m in self.plain if m.kind == "enter"]


MODULES = 2.5
"""How much longer than an operation that is launched in a loop one takes that a module's `forward`
launches, where no unit was run: 14 us against 30 to 47 on a CPU, 66 for ViT's blocks, recomputed,
on a H200. In a backward pass autograd launches."""


def seconds(work: Work, flops: float, bandwidth: float, launch: float) -> float:
    """Time of these operations: each one's arithmetic or its memory, whichever takes longer, and
    at least what it takes to launch them all."""
    busy = sum(max(f / flops, b / bandwidth if bandwidth else 0.0) * n for f, b, n in work)
    return max(busy, launch * sum(n for _, _, n in work))


def step_seconds(
    profile: Profile, flops: float, bandwidth: float, launch: float, slower: float = 1.0
) -> tuple[float, float, float, float]:
    """Seconds of (forward, forward while launches take `slower` times as long, backward, backward
    with every repeated unit recomputed): those of the trace, with what ran on the accelerator in
    the place of what the trace says of it."""
    rates = flops, bandwidth, launch
    modules = flops, bandwidth, launch * MODULES
    forward = seconds(profile.forward, *modules)
    plain = seconds(profile.backward, *rates)
    again = seconds(profile.backward_recomputed or profile.backward, *rates)
    beside = forward
    if not profile.rehearsed:
        beside = seconds(profile.forward, flops, bandwidth, launch * MODULES * slower)
    for kind in profile.rehearsed:
        more = kind.forward - seconds(kind.forward_work, *modules)
        forward += kind.count * more
        beside += kind.count * (more + max(0.0, kind.launch * slower - kind.forward))
        plain += kind.count * (kind.backward - seconds(kind.backward_work, *rates))
        again += kind.count * (
            kind.backward_recomputed - seconds(kind.backward_recomputed_work, *rates)
        )
    return max(0.0, forward), max(0.0, beside), max(0.0, plain), max(0.0, again)


LARGE = 192 << 20
"""Bytes of a gradient from which on one at a time is on its way to the host: it takes so long that
the next one is there when it has left."""


def outgoing(depth: int, largest: int) -> int:
    """How many gradients are on their way to the host at most, the largest of this many bytes."""
    return min(depth, 1) if largest > LARGE else depth


def peaks(
    profile: Profile,
    chunks: Sequence[Held],
    *,
    recompute: Set[int],
    depth: int,
    offload: int = 0,
    ranks: int = 1,
    pools: bool = False,
    shared: bool = False,
) -> tuple[int, int]:
    """(the most of moving weights, the most of all else) in bytes. They need not be at the same
    moment, but each has its own part of the allocator's memory. `offload`: how many inputs of
    recomputed units are on the accelerator at a time, the others waiting on the host; 0: all.
    `pools`: of an allocator with a pool for each stream: holes in that of the weights count, and
    gradients of repeated units that leave have one of their own (see `gradients`), which counts
    with the weights. `shared`: between several ranks, in a stream of its own (`ranks` of them have
    a copy of the states): also what stays on the accelerator is held until that has passed, and the
    last of a pass are still held in the next."""
    asked = tuple(chunks), frozenset(recompute), depth, offload, ranks, pools, shared
    found = profile.played.get(asked)
    if found is None:
        found = profile.played[asked] = _play(profile, *asked)
    return found


def _play(
    profile: Profile,
    chunks: Sequence[Held],
    recompute: Set[int],
    depth: int,
    offload: int,
    ranks: int,
    pools: bool,
    shared: bool,
) -> tuple[int, int]:
    """`peaks`, played through."""
    of_unit: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        if chunk.moves:
            of_unit.setdefault(chunk.unit, []).append(number)
    pool = Pool()
    gone = 0
    every = bool(profile.recomputed) and recompute >= profile.repeated
    plain = profile.recomputed if every else profile.plain
    other = profile.recomputed if recompute and profile.mixes else plain
    out = outgoing(depth, max((c.gradient for c in chunks if c.leaves or shared), default=0))
    order = [m.index for m in plain if m.kind == "enter"]
    inputs = {unit: profile.inputs.get(unit, 0) for unit in recompute} if offload else {}
    largest = max(inputs.values(), default=0)
    keep = offload * largest
    place, loaded, weights, most = 0, set[int](), 0, 0

    def flat(chunk: Held) -> tuple[int, int]:
        """A gradient that is put together: bytes among the activations, and in its own pool."""
        size = chunk.gradient + (chunk.gradient // ranks if ranks > 1 else 0)
        apart = pools and ranks == 1 and chunk.leaves and chunk.unit in profile.repeated
        return (0, size) if apart else (size, 0)

    leaving: deque[tuple[int, int]] = deque()
    if shared:
        made = [chunks[m.index] for m in plain if m.kind == "gradient"]
        leaving.extend(flat(chunk) for chunk in made[len(made) - out :] if out)
    rest = 0
    # The model's own forward pass may hold a block's input until it returns. The plain list gives
    # it back there; a block that is recomputed holds it still.
    mixed = max((profile.inputs.get(u, 0) for u in recompute), default=0) if not every else 0
    level = mixed + (plain[0].level if plain else 0)
    inside: int | None = None
    outside = back = False
    waiting: dict[int, int] = {}
    whole: list[Held] = []  # gradients that wait for their unit
    for number, moment in enumerate(plain):
        transient = 0
        if moment.kind == "enter":
            inside = moment.index
            place += 1
            for unit in (inside, *order[place : place + depth]):
                if unit not in loaded:
                    loaded.add(unit)
                    for each in of_unit.get(unit, []):
                        weights += chunks[each].weights
                        pool.take(each, chunks[each].weights)
            most = max(most, weights)
            if inside in waiting:  # the backward pass: the next one comes, and no more
                waiting.pop(inside)
                keep, back = (0 if inside in profile.late else largest), True
            elif inside in inputs:
                waiting[inside] = inputs[inside]
        elif moment.kind == "leave":
            # In a backward pass the unit before is entered first. What goes after a unit was left
            # and before the next one (its input, where nothing has saved it) is of this unit, too.
            outside = moment.index == inside
            transient = max((chunk.update or 0 for chunk in whole), default=0)
            transient += sum(chunk.gradient for chunk in whole)
            whole.clear()
            if moment.index not in order[place : place + depth] and moment.index in loaded:
                loaded.discard(moment.index)
                for each in of_unit.get(moment.index, []):
                    weights -= chunks[each].weights
                    pool.give(each)
        elif moment.kind == "gradient":
            chunk = chunks[moment.index]
            if chunk.update is not None:
                whole.append(chunk)
            elif not (chunk.leaves or shared):
                transient = sum(flat(chunk))
            else:
                leaving.append(flat(chunk))
                while len(leaving) > out + 1:
                    leaving.popleft()
        taken = other if inside in recompute else plain
        if outside:
            inside, outside = None, False
        here = taken[number]
        # Around a unit, two are still on their way out.
        stay = keep if back or inside in inputs else min(keep, 2 * largest)
        away = max(0, sum(waiting.values()) - stay)
        held = level + here.peak - here.level - away + transient
        held += sum(chunk.gradient for chunk in whole)
        rest = max(rest, held + sum(size for size, _ in leaving))
        gone = max(gone, sum(size for _, size in leaving))
        if moment.kind == "gradient" and len(leaving) > out:
            leaving.popleft()
        if number + 1 < len(taken):
            level += taken[number + 1].level - here.level
    return (pool.size if pools else most) + gone, rest
