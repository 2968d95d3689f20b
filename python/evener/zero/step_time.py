"""How long a step takes and what bounds it, by the times of its parts (see `planner`)."""

from __future__ import annotations

from collections.abc import Sequence


def step_after(
    times: dict[str, float], accumulation: int, next_forward: float
) -> tuple[float, str]:
    """Seconds of a step with the optimizer after its last backward pass. next_forward: from there
    to the end of the next forward pass, chunk by chunk."""
    forward = {
        "GPU": times["forward"],
        "PCIe": max(times["weights in"], times["activations out"]),
        "network": times["gather"],
    }
    backward = {
        "GPU": times["backward"],
        "PCIe": max(times["weights in"] + times["activations out"], times["gradients out"]),
        "network": times["gather again"] + times["gather"],
    }
    crossing = {
        **backward,
        "PCIe": backward["PCIe"] + times["owed in and out"],
        "network": backward["network"] + times["between nodes"],
    }
    last = {
        **forward,
        "GPU": times["forward beside the optimizer"] + times["matrices"],
        "PCIe": forward["PCIe"] + times["matrices in and out"],
        "network": forward["network"] + times["matrices between ranks"],
        "host memory": times["host optimizer"],
        "SSD": times["SSD"],
    }
    phases = [backward] * (accumulation - 1) + [crossing]
    phases += [forward] * (accumulation - 1) + [last]
    blame: dict[str, float] = {}
    for phase in phases:
        name = max(phase, key=lambda name: phase[name])
        took = max(phase[name], next_forward) if phase is last else phase[name]
        blame[name] = blame.get(name, 0.0) + took
    blame["GPU"] = blame.get("GPU", 0.0) + times["device optimizer"]
    return sum(blame.values()), max(blame, key=lambda name: blame[name])


def step_in_backward(
    times: dict[str, float], chunks: Sequence[tuple[int, int]], numel: int
) -> tuple[float, str]:
    """Seconds of a step of one rank with the optimizer in the backward pass (`in_backward`).
    chunks: of those that are updated below the accelerator, in the order of the model, the elements
    and the bytes on the SSD; numel: elements of all. Launches of a backward pass are held up by
    busy cores as much as those of a forward pass are."""
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
