"""Where to cut: a dynamic program over all positions, and the cuts that people make by hand.

A step of a pipeline takes about

    sum of the stages' times + (microbatches - 1) x the longest stage

so the longest stage comes first. For a bound on it, one pass finds the cuts with the smallest sum
of compute and transfers whose stages all keep to the bound and to their memory; the smallest bound
is found by another pass. Bounds a little above the smallest are tried too, because a cut through
fewer bytes may be worth more than the last percent of balance, and what each would really take is
simulated with the real schedule.

Memory of a stage = weights, gradients and states + in flight x what forward keeps, where "in
flight" is what the schedule holds at that stage (`schedules.in_flight`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evener.pipeline import schedules
from evener.pipeline.capture import Captured
from evener.pipeline.cuts import candidates, cut_bytes
from evener.pipeline.profile import Floats, Profile
from evener.pipeline.simulate import Network, Simulated, StageCost, simulate

# How far above the smallest bound cheaper cuts are looked for.
_SLACK = (1.0, 1.005, 1.02, 1.05, 1.1, 1.2)


@dataclass(frozen=True)
class Device:
    """A rank's device: `memory` in bytes, `speed` as a multiple of the profiled device's."""

    memory: float
    speed: float = 1.0


@dataclass
class Costs:
    """Everything the search needs, for microbatches of one size.

    Arrays have one entry per operation, `across` one per position (0..n). `uses`: for each
    parameter its bytes and the operations that use it. `states`: bytes of gradient and optimizer
    state per byte of a parameter.
    """

    forward: Floats
    input: Floats
    weight: Floats
    saved: Floats
    across: Floats
    back: Floats
    positions: list[int]
    uses: list[tuple[int, tuple[int, ...]]]
    states: float
    recompute: bool

    @classmethod
    def of(
        cls, captured: Captured, profile: Profile, rows: int, states: float, recompute: bool
    ) -> Costs:
        forward, inner, weight, saved = profile.at(rows)
        across, back = cut_bytes(captured, rows)
        seconds = forward + inner + weight
        uses = parameter_uses(captured)
        # Both sides of a cut have something to train: on a slow network the rest of a loss alone
        # would be the cheapest stage, and its rank would do nothing.
        trained = [k for _, at in uses for k in at] or [0, len(captured.ops)]
        free = [
            k for k in candidates(captured, seconds, across) if min(trained) < k <= max(trained)
        ]
        return cls(
            forward, inner, weight, saved, across, back, [0, *free, len(captured.ops)],
            uses, states, recompute,
        )  # fmt: skip

    def total(self) -> Floats:
        """Seconds of each operation in a step's forward and backward."""
        again = self.forward if self.recompute else 0.0
        return np.asarray(self.forward + again + self.input + self.weight)

    def stage(self, begin: int, end: int, speed: float = 1.0) -> StageCost:
        """The stage of operations begin..end."""
        part = slice(begin, end)
        forward = float(self.forward[part].sum()) / speed
        saved = float(self.saved[part].sum())
        edges = float(self.across[begin] + (self.across[end] if end < len(self.forward) else 0))
        return StageCost(
            forward=forward,
            input=float(self.input[part].sum()) / speed + (forward if self.recompute else 0.0),
            weight=float(self.weight[part].sum()) / speed,
            sent=float(self.across[end]) if end < len(self.forward) else 0.0,
            returned=float(self.back[end]) if end < len(self.forward) else 0.0,
            held=edges if self.recompute else saved + edges,
            peak=saved if self.recompute else 0.0,
            fixed=self.parameters(begin, end) * (1 + self.states),
        )

    def parameters(self, begin: int, end: int) -> float:
        """Bytes of the parameters that operations begin..end use, each counted once."""
        return float(sum(size for size, at in self.uses if any(begin <= k < end for k in at)))


def parameter_uses(captured: Captured) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes, operations that use it) of each parameter."""
    tensors = dict(captured.module.named_parameters(remove_duplicate=False))
    found: dict[str, list[int]] = {}
    for k, node in enumerate(captured.ops):
        for one in node.all_input_nodes:
            if one.op == "get_attr" and str(one.target) in tensors:
                found.setdefault(str(one.target), []).append(k)
    return [
        (tensors[name].numel() * tensors[name].element_size(), tuple(at))
        for name, at in found.items()
    ]


@dataclass(frozen=True)
class Setting:
    """The pipeline to cut for. `devices`: one per rank."""

    schedule: str
    ranks: int
    local: int
    microbatches: int
    devices: tuple[Device, ...]
    network: Network

    @property
    def stages(self) -> int:
        return self.ranks * self.local

    def rank_of(self, stage: int) -> int:
        return schedules.rank_of(schedules.kind_of(self.schedule), stage, self.ranks)


@dataclass(frozen=True)
class Found:
    """Cuts, and what they give."""

    cuts: tuple[int, ...]
    stages: tuple[StageCost, ...]
    result: Simulated
    fits: bool

    @property
    def imbalance(self) -> float:
        """The longest rank's compute over the mean."""
        busy = self.result.busy
        return max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0


def evaluate(costs: Costs, setting: Setting, cuts: Sequence[int]) -> Found:
    """Simulate the pipeline that is cut at `cuts` (the positions between its stages)."""
    edges = [0, *cuts, len(costs.forward)]
    stages = tuple(
        costs.stage(begin, end, setting.devices[setting.rank_of(s)].speed)
        for s, (begin, end) in enumerate(itertools.pairwise(edges))
    )
    result = simulate(setting.schedule, stages, setting.ranks, setting.microbatches,
                      setting.network)  # fmt: skip
    fits = all(used <= d.memory for used, d in zip(result.memory, setting.devices, strict=True))
    return Found(tuple(cuts), stages, result, fits)


def search(costs: Costs, setting: Setting) -> Found | None:
    """The cuts with the shortest simulated step that fit; None where none fit or are possible."""
    places = costs.positions
    stages = setting.stages
    if len(places) - 1 < stages:
        return None
    time, moved, allowed = _tables(costs, setting)
    bound = _smallest_bound(time, moved, allowed)
    if not np.isfinite(bound):
        return None
    best: Found | None = None
    tried: set[tuple[int, ...]] = set()
    for slack in _SLACK:
        cuts = _smallest_sum(time, moved, allowed, bound * slack * (1 + 1e-9))
        if cuts is None or cuts in tried:
            continue
        tried.add(cuts)
        found = evaluate(costs, setting, [places[c] for c in cuts])
        if found.fits and (best is None or found.result.step < best.result.step):
            best = found
    return best


def _tables(costs: Costs, setting: Setting) -> tuple[list[Floats], list[Floats], list[Any]]:
    """Per stage and pair of positions: seconds of compute, of transfers, whether it fits."""
    places = np.array(costs.positions)
    total = np.concatenate([[0.0], np.cumsum(costs.total())])[places]
    saved = np.concatenate([[0.0], np.cumsum(costs.saved)])[places]
    seconds = total[None, :] - total[:, None]
    across = costs.across[places].copy()
    across[-1] = 0.0
    edges = across[:, None] + across[None, :]
    between = saved[None, :] - saved[:, None]
    fixed = _parameter_table(costs, places) * (1 + costs.states)
    flight = schedules.in_flight(
        setting.schedule, setting.ranks, setting.local, setting.microbatches
    )
    time, moved, allowed = [], [], []
    for stage in range(setting.stages):
        rank = setting.rank_of(stage)
        device = setting.devices[rank]
        if costs.recompute:
            memory = fixed + flight[stage] * edges + between
        else:
            memory = fixed + flight[stage] * (between + edges)
        time.append(seconds / device.speed)
        before = np.zeros(len(places))
        if stage:
            _, link = setting.network.way(setting.rank_of(stage - 1), rank)
            both = across + costs.back[places] * (np.arange(len(places)) < len(places) - 1)
            before = 2 * link.latency + both / link.bandwidth
        moved.append(np.broadcast_to(before[:, None], seconds.shape))
        # Several stages per rank share its memory; the simulation has the last word.
        allowed.append((memory <= device.memory / (setting.local if setting.local == 1 else 1))
                       & (places[None, :] > places[:, None]))  # fmt: skip
    return time, moved, allowed


def _parameter_table(costs: Costs, places: Any) -> Floats:
    """Bytes of parameters of every stage begin..end; a tied one counts once per stage."""
    count = len(places)
    table = np.zeros((count, count))
    single = np.zeros(len(costs.forward))
    for size, at in costs.uses:
        if len(at) == 1:
            single[at[0]] += size
            continue
        where = np.array(sorted(at))
        # The first use at or after each begin; the stage has it if its end is beyond.
        first = np.searchsorted(where, places, side="left")
        after = np.where(first < len(where), where[np.minimum(first, len(where) - 1)], 1 << 60)
        table += size * (places[None, :] > after[:, None])
    total = np.concatenate([[0.0], np.cumsum(single)])[places]
    return np.asarray(table + (total[None, :] - total[:, None]))


def _smallest_bound(time: list[Floats], moved: list[Floats], allowed: list[Any]) -> float:
    """The smallest longest stage that any cuts give."""
    reach: Floats | None = None
    for seconds, transfer, fits in zip(time, moved, allowed, strict=True):
        # A link that is slower than the stage beside it sets the pace.
        cost = np.where(fits, np.maximum(seconds, transfer), np.inf)
        reach = cost[0] if reach is None else np.min(np.maximum(reach[:, None], cost), axis=0)
    assert reach is not None
    return float(reach[-1])


def _smallest_sum(
    time: list[Floats], moved: list[Floats], allowed: list[Any], bound: float
) -> tuple[int, ...] | None:
    """Indices of the cuts with the smallest sum of compute and transfers under `bound`."""
    reach: Floats | None = None
    back = []
    for seconds, transfer, fits in zip(time, moved, allowed, strict=True):
        cost = np.where(fits & (np.maximum(seconds, transfer) <= bound), seconds + transfer, np.inf)
        if reach is None:
            reach = cost[0]
            continue
        options = reach[:, None] + cost
        choice = np.argmin(options, axis=0)
        back.append(choice)
        reach = options[choice, np.arange(options.shape[1])]
    assert reach is not None
    if not np.isfinite(reach[-1]):
        return None
    at, found = len(reach) - 1, []
    for choice in reversed(back):
        at = int(choice[at])
        found.append(at)
    return tuple(reversed(found))


def largest(costs: Costs) -> float:
    """Seconds of the longest piece that no cut divides: no stage can be shorter."""
    total = np.concatenate([[0.0], np.cumsum(costs.total())])[np.array(costs.positions)]
    return float(np.max(np.diff(total)))


def _segments(captured: Captured) -> list[tuple[str, int]]:
    """(block, first operation) of each run of operations of one block, or of none."""
    found: list[tuple[str, int]] = []
    for k, block in enumerate(captured.blocks):
        if not found or found[-1][0] != block:
            found.append((block, k))
    # An operation of no block in the middle of one (a mask that a block makes) divides nothing.
    merged: list[tuple[str, int]] = []
    seen: set[str] = set()
    for name, first in found:
        if name and name in seen:
            while merged and merged[-1][0] != name and not merged[-1][0]:
                merged.pop()
            if merged and merged[-1][0] == name:
                continue
        merged.append((name, first))
        seen.add(name)
    return merged


def uniform_by_block(costs: Costs, captured: Captured, stages: int) -> list[int] | None:
    """An equal number of blocks per stage, the rest with the first and the last stage."""
    starts = [first for name, first in _segments(captured) if name]
    if len(starts) < stages:
        return None
    return _valid(costs, [starts[s * len(starts) // stages] for s in range(1, stages)])


def by_parameters(costs: Costs, captured: Captured, stages: int) -> list[int] | None:
    """Layers (blocks, and what lies between them) with the smallest largest count of parameters."""
    starts = [first for _, first in _segments(captured)]
    if len(starts) < stages:
        return None
    edges = [*starts, len(captured.ops)]
    edges[0] = 0
    # A tied parameter counts in every layer that has it, as each layer holds it.
    counts = [costs.parameters(a, b) for a, b in itertools.pairwise(edges)]
    total = np.concatenate([[0.0], np.cumsum(counts)])
    size = len(total)
    cost = np.where(np.arange(size)[None, :] > np.arange(size)[:, None],
                    total[None, :] - total[:, None], np.inf)  # fmt: skip
    reach, back = cost[0], []
    for _ in range(1, stages):
        options = np.maximum(reach[:, None], cost)
        choice = np.argmin(options, axis=0)
        back.append(choice)
        reach = options[choice, np.arange(size)]
    at, found = size - 1, []
    for choice in reversed(back):
        at = int(choice[at])
        found.append(edges[at])
    return _valid(costs, list(reversed(found)))


def _valid(costs: Costs, cuts: list[int]) -> list[int] | None:
    """The nearest positions that can be cut; None where two fall together."""
    inner = np.array(costs.positions[1:-1])
    if not len(inner):
        return None
    found = [int(inner[np.argmin(np.abs(inner - cut))]) for cut in cuts]
    return found if len(set(found)) == len(found) else None
