"""The update of a chunk of matrices that several ranks share, each with a part of every matrix.

What is elementwise (momentum, weight decay, the step) each rank does with its own elements. Between
these two halves the owner of each matrix (`owners`) gets its elements from all ranks, takes the
products, and sends back what they made: two exchanges for a chunk. The products take and make
bfloat16, so nothing is lost on the way, and 4 bytes per element cross at most, where AdamW sends
none. Distributed Muon of Liu et al., arXiv 2502.16982, gathers in the same way.

All ranks exchange for the same chunks in the same order: those on the accelerator in the training
thread, then the others in the streaming lane, in a group that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from evener.zero.chunk import Chunk, Run
from evener.zero.owners import Exchange, cuts
from evener.zero.ranks import Ranks
from evener.zero.rules import Muon
from evener.zero.states import Noise
from evener.zero.states import of as states_named

MOMENTUM, GRADIENT = "first", "gradient"
"""What `Shared.first` takes, by the names of a chunk's tensors."""


class Shared:
    """One update of the matrices at the places `moving`, which are the same on all ranks: `first`
    for all runs of this rank, `exchange`, then `last` for all of them. `seed`: of the stochastic
    rounding. Memory is that of the stream in which each is called."""

    def __init__(
        self,
        chunk: Chunk,
        moving: Set[int],
        hyper: Mapping[str, Any],
        scale: float,
        ranks: Ranks,
        seed: int,
        device: torch.device,
    ) -> None:
        self._pieces, self._hyper, self._scale = chunk.group.pieces, hyper, scale
        rule = chunk.group.rule
        assert isinstance(rule, Muon)
        self._rule, self._ranks = rule, ranks
        self._noise = Noise(seed, chunk.index * ranks.world + ranks.rank)
        matrices = chunk.group.matrices
        found = cuts({place: matrices[place] for place in moving}, chunk.states.weights.numel())
        self._plan = Exchange.of(found, ranks.rank, ranks.world)
        self._at: dict[int, int] = {}
        """Where each matrix's part is in `_sent`, less where it is in this rank's share."""
        numel = 0
        for cut in self._plan.mine:
            self._at[cut.place] = numel - cut.begin
            numel += cut.numel
        self._sent = torch.empty(numel, dtype=torch.bfloat16, device=device)

    def _change(self, run: Run) -> torch.Tensor:
        """What `run` sends, and after `exchange` gets."""
        at = self._at[run.place]
        return self._sent[at + run.begin : at + run.end]

    def first(self, run: Run, named: Mapping[str, torch.Tensor]) -> None:
        """Compute what a run sends, from its momentum and its gradient."""
        noise = replace(self._noise, offset=run.begin)
        self._change(run).copy_(
            self._rule.first_half(
                named[MOMENTUM], named[GRADIENT], self._hyper, run.step, self._scale, noise
            )
        )

    def last(self, run: Run, named: Mapping[str, torch.Tensor]) -> None:
        """Step the weights of a run, in every form that they have."""
        noise = replace(self._noise, offset=run.begin)
        rule = self._rule.of_shape(run.shape)
        rule.second_half(states_named(named), self._change(run), self._hyper, run.step, noise)

    @torch.no_grad()
    def exchange(self) -> None:
        """What was sent becomes what the products made of it. Collective."""
        plan, pieces = self._plan, self._pieces
        came = torch.empty(sum(plan.came), dtype=self._sent.dtype, device=self._sent.device)
        self._ranks.swap(came, self._sent, plan.came, plan.gone)
        parts: dict[int, list[torch.Tensor]] = {}
        for cut, part in zip(plan.owned, came.split([c.numel for c in plan.owned]), strict=True):
            parts.setdefault(cut.place, []).append(part)
        for place, found in parts.items():
            whole = torch.cat(found) if len(found) > 1 else found[0]
            made = self._rule.products(whole.view(pieces[place].shape), self._hyper).reshape(-1)
            for part, values in zip(found, made.split([p.numel() for p in found]), strict=True):
                part.copy_(values)
        self._ranks.swap(self._sent, came, plan.gone, plan.came)


def sliced(runs: list[Run], size: int) -> list[Run]:
    """The same elements in runs of at most `size`."""
    return [
        replace(run, begin=begin, end=min(begin + size, run.end))
        for run in runs
        for begin in range(run.begin, run.end, size)
    ]
