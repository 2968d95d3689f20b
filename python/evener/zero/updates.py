"""One step's update of the weights, once the factor of all gradients is known: resident chunks at
once on the accelerator, the others by the lanes."""

from __future__ import annotations

from typing import Any

import torch

from evener.zero.chunk import Chunk, Run
from evener.zero.device import Device
from evener.zero.lanes import Lanes, Update
from evener.zero.matrices import GRADIENT, MOMENTUM, Shared, sliced
from evener.zero.ranks import Ranks
from evener.zero.spans import Spans
from evener.zero.states import SLICE, Noise, part


class Updates:
    """`seed`: of the stochastic rounding."""

    def __init__(self, device: Device, ranks: Ranks, lanes: Lanes, spans: Spans, seed: int) -> None:
        self._device, self._ranks = device, ranks
        self._lanes, self._spans, self._seed = lanes, spans, seed

    def begin(
        self,
        chunks: list[Chunk],
        moving: list[set[int]],
        groups: list[dict[str, Any]],
        scale: float,
    ) -> None:
        """Update `chunks`, of each the parameters at the places in `moving`, by the hyperparameters
        of their group. Those of the host are updated while training goes on."""
        jobs = []
        for chunk, places in zip(chunks, moving, strict=True):
            if not places:
                continue  # no rank had a gradient of it
            chunk.stale, chunk.loaded = True, False
            job = self.start(chunk, places, groups, scale)
            if job is not None:
                jobs.append(job)
            if not chunk.loaded:
                chunk.guard()
        self._lanes.put(jobs)

    def start(
        self, chunk: Chunk, places: set[int], groups: list[dict[str, Any]], scale: float
    ) -> Update | None:
        """Update a chunk that is on the accelerator; of another, what the lanes are to do."""
        runs = chunk.begin_step(places, self._ranks.rank)
        given = groups[chunk.group.group]
        hyper = {name: now(given[name]) for name in chunk.group.rule.values}
        job = Update(chunk, hyper, scale, runs, places)
        if chunk.resident:
            self._resident(job)
            return None
        chunk.updated.clear()
        return job

    def moving(self, chunks: list[Chunk]) -> list[set[int]]:
        """The places of the parameters that had a gradient on any rank. Collective."""
        if self._ranks.size == 1:
            return [set(chunk.given) for chunk in chunks]
        places = [(c, p) for c, chunk in enumerate(chunks) for p in range(len(chunk.group.pieces))]
        mine = [place in chunks[c].given for c, place in places]
        given = self._ranks.any(torch.tensor(mine, dtype=torch.uint8, device=self._device.device))
        found: list[set[int]] = [set() for _ in chunks]
        for (c, place), moves in zip(places, given.tolist(), strict=True):
            if moves:
                found[c].add(place)
        return found

    @torch.no_grad()
    def _resident(self, job: Update) -> None:
        chunk, runs = job.chunk, job.runs
        with self._spans.host("wait", "training for the checkpoint", chunk.group.name):
            chunk.saved.wait()
        with self._spans.device("optimizer", "compute", chunk.group.name):
            if chunk.group.rule.whole and self._ranks.world > 1:
                self._shared(job)
            else:
                self._alone(chunk, job.hyper, job.scale, runs)
        if self._ranks.world == 1:
            chunk.stale, chunk.loaded = False, True
        else:
            self._device.wait("h2d", self._device.record("compute"))

    def _alone(self, chunk: Chunk, hyper: dict[str, Any], scale: float, runs: list[Run]) -> None:
        assert chunk.gradient is not None
        stream = chunk.index * self._ranks.world + self._ranks.rank
        for run in runs:
            chunk.group.rule.of_shape(run.shape).on_device(
                part(chunk.states, run.begin, run.end),
                chunk.gradient[run.begin : run.end],
                hyper,
                run.step,
                scale,
                Noise(self._seed, stream, run.begin),
            )

    def _shared(self, job: Update) -> None:
        """Matrices of which each rank has a part."""
        chunk, runs = job.chunk, sliced(job.runs, SLICE)
        momentum, gradient = chunk.states.first, chunk.gradient
        assert momentum is not None and gradient is not None
        update = Shared(chunk, job.moving, job.hyper, job.scale, self._ranks, self._seed,
                        self._device.device)  # fmt: skip
        for run in runs:
            mine = slice(run.begin, run.end)
            update.first(run, {MOMENTUM: momentum[mine], GRADIENT: gradient[mine]})
        update.exchange()
        for run in runs:
            update.last(run, part(chunk.states, run.begin, run.end).tensors())


def now(value: Any) -> Any:
    """A hyperparameter as it is now: schedulers write into a rate that is a tensor, while the lanes
    are at work."""
    return value.item() if isinstance(value, torch.Tensor) else value
