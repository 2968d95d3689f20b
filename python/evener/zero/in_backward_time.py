"""How long a step takes with the optimizer in the backward pass (see `in_backward`)."""

from __future__ import annotations

from collections.abc import Sequence


def step_in_backward(
    times: dict[str, float], chunks: Sequence[tuple[int, int]], numel: int
) -> tuple[float, str]:
    """Seconds of a step of one rank, and what bounds it, by the times of `planner`. chunks: of
    those that are updated below the accelerator, in the order of the model, the elements and the
    bytes on the SSD; numel: elements of all. Launches of a backward pass are held up by busy cores
    as much as those of a forward pass are."""
    matrices = times["matrices in and out"] + times["matrices"]
    below = max(1, sum(size for size, _ in chunks))
    each = (max(times["host optimizer"], matrices) + times["gradients out"]) / below
    every = times["SSD"] / max(1, sum(away for _, away in chunks))
    slower = times["forward beside the optimizer"] - times["forward"]
    # Nothing is updated before the first gradient is there, nor used before the last update.
    first = last = 0.0
    if chunks:
        first = chunks[-1][0] * (times["backward"] / numel + times["gradients out"] / below)
        last = chunks[0][0] * each + chunks[0][1] * every
    optimizer = first + max(times["host optimizer"], matrices)
    backward = {
        "GPU": times["backward"] + slower + times["matrices"] + times["device optimizer"],
        "PCIe": times["matrices in and out"]
        + max(times["weights in"] + times["activations out"], times["gradients out"]),
        "host memory": optimizer,
        "SSD": first + times["SSD"],
    }
    forward = {
        "GPU": times["forward"],
        "PCIe": max(times["weights in"], times["activations out"]),
    }
    blame: dict[str, float] = {}
    for phase in (backward, forward):
        name = max(phase, key=lambda name: phase[name])
        blame[name] = blame.get(name, 0.0) + phase[name]
    waits = "SSD" if chunks and chunks[0][1] else "host memory"
    blame[waits] = blame.get(waits, 0.0) + last
    return sum(blame.values()), max(blame, key=lambda name: blame[name])
