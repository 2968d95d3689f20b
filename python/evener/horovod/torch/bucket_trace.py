"""The optimizer's gradient buckets on the timeline.

Their collectives do not go through the negotiation, so the timeline does not see them by itself.
While one is written, each step is watched by a `Recorder`: on a CPU it reads the clock, on a GPU it
records events on the streams where the stages run. When the step's buckets have landed they are
written, each on a track of its own: ALLREDUCE from the moment its last gradient was there, and in
it QUEUE and the stages. On a GPU that waits for the device once a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from evener.comm.exchange import Exchange
from evener.comm.profile import Recorder
from evener.comm.reducer import Reducer
from evener.horovod.timeline import Timeline

_STAGES = ("REDUCESCATTER", "ALLREDUCE", "ALLGATHER")


def watch(reducer: Reducer, timeline: Timeline) -> None:
    """Between steps: record the next one if a timeline is written."""
    reducer.recorder = Recorder(reducer.device) if timeline.active else None


def write(timeline: Timeline, recorder: Recorder, exchanges: Sequence[Exchange]) -> None:
    """The step that `recorder` watched. `exchanges`: of that step, by bucket."""
    gpu = recorder.clock.gpu
    anchor = recorder.clock.mark()
    if gpu:
        torch.cuda.current_stream(recorder.device).synchronize()
    # The timeline's clock is the negotiator's; `anchor` is this moment on the recorder's.
    now = timeline.now() - (0.0 if gpu else time.perf_counter() - anchor)

    def at(mark: Any) -> float:
        return now - recorder.clock.ms(mark, anchor) / 1e3

    library = "NCCL" if gpu else "GLOO"
    for exchange in exchanges:
        index = exchange.bucket.index
        if index not in recorder.ready:
            continue
        parts = [
            (f"{library}_{_STAGES[place]}", at(marks[0]), at(marks[1]))
            for place in range(3)
            if (marks := recorder.stages.get((index, place))) is not None
        ]
        timeline.bucket(
            exchange.title,
            at(recorder.ready[index]),
            parts,
            {
                "dtype": str(exchange.bucket.buffer.dtype),
                "shape": [[exchange.bucket.buffer.numel()]],
                "bytes": exchange.bucket.bytes,
                "bucket": index,
                "algorithm": "2d" if exchange.route.levels.two_level else "flat",
                "form": exchange.wire.name,
            },
        )
