"""Where each chunk will live, how long a step will take and what bounds it. Pure arithmetic: no
tensor is made, nothing is measured (that is `probe`), so that a plan can be made for a machine that
is not here, and tested for every machine.

# The rule
The working set comes first: `depth` + 1 chunks of weights, gradients on their way out, activations.
What is left of the accelerator's budget takes chunks whole (weights, states, gradient), in the
order of the forward pass: the first layers are then ready for the next forward while the host still
updates the others. It is a prefix, so a larger budget never takes a chunk off the accelerator.

# The time
With exact clipping the optimizer waits for the whole backward pass:
`T = max(backward, its copies) + max(forward, optimizer on the host, its copies)`, each micro-batch
before the last without the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evener.zero.budget import Budget
from evener.zero.host import pages
from evener.zero.store import Formats, share_of


@dataclass(frozen=True)
class Machine:
    """What was measured. flops: of the model's matrix products, FLOP/s. h2d, d2h: bytes/s.
    host_adam: parameters/s of the fused CPU optimizer while copies go on; device_adam: on the
    accelerator. network: bytes/s of a collective between ranks (0: one rank)."""

    flops: float
    h2d: float
    d2h: float
    host_adam: float
    device_adam: float
    network: float = 0.0
    reserve: int = 0
    """Bytes of accelerator memory that are gone before the first tensor: the CUDA context."""


@dataclass(frozen=True)
class Part:
    """A chunk to be. `stays`: on the accelerator whatever the budget."""

    name: str
    numel: int
    trainable: bool = True
    stays: bool = False


@dataclass(frozen=True)
class Work:
    """One step on one rank."""

    tokens: int
    activations: int
    accumulation: int = 1
    checkpointing: bool = True
    ranks: int = 1
    depth: int = 2
    moments: int = 2


@dataclass(frozen=True)
class Place:
    """Where a chunk lives: "gpu" or "host"."""

    name: str
    numel: int
    where: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The answer. Times in seconds, memory in bytes (a rank)."""

    fits: bool
    problem: str
    places: list[Place]
    gpu_bytes: int
    host_bytes: int
    budget: Budget
    times: dict[str, float]
    step_seconds: float
    bound: str
    tokens_per_second: float

    @property
    def resident(self) -> set[str]:
        """Names of the chunks whose states are on the accelerator."""
        return {place.name for place in self.places if place.where == "gpu"}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _bytes_on(part: Part, formats: Formats, work: Work, where: str) -> int:
    share = share_of(part.numel, work.ranks)
    if not part.trainable:
        each = formats.compute.itemsize
        return pages(share, each) if where == "host" else share * each
    if where == "gpu":
        return share * formats.device_bytes(work.moments)
    sizes = [formats.compute.itemsize, formats.gradient.itemsize]
    sizes += [formats.moments.itemsize] * work.moments
    if formats.compute.itemsize == 2:
        sizes.append(2 if formats.host_bytes(0) - formats.gradient.itemsize == 4 else 4)
    return sum(pages(share, each) for each in sizes)


def working_set(parts: Sequence[Part], formats: Formats, work: Work, machine: Machine) -> int:
    """Bytes of accelerator memory that no budget can go below."""
    moving = [p.numel for p in parts if not p.stays]
    largest = sorted(moving, reverse=True)[: work.depth + 1]
    weights = sum(largest) * formats.compute.itemsize
    top = max(moving, default=0)
    # A gradient as autograd leaves it, and up to `depth` + 1 flat copies on their way to the host.
    gradients = top * formats.compute.itemsize
    gradients += (work.depth + 1) * top * formats.gradient.itemsize
    stays = 0
    for part in parts:
        if part.stays:
            stays += _bytes_on(part, formats, work, "gpu")
            stays += part.numel * formats.compute.itemsize if work.ranks > 1 else 0
    # The update of one resident chunk in torch operations needs float32 copies of it.
    scratch = 5 * 4 * share_of(max((p.numel for p in parts if p.trainable), default=0), work.ranks)
    return machine.reserve + weights + max(gradients + work.activations, scratch) + stays


def plan(
    parts: Sequence[Part], formats: Formats, work: Work, machine: Machine, budget: Budget
) -> Plan:
    """See the head of this file."""
    need = working_set(parts, formats, work, machine)
    gpu, host = need, 0
    places: list[Place] = []
    room = need <= budget.gpu
    for part in parts:
        if part.stays:
            size = _bytes_on(part, formats, work, "gpu")
            places.append(Place(part.name, part.numel, "gpu", size))
            continue
        size = _bytes_on(part, formats, work, "gpu")
        if work.ranks == 1:
            room = room and gpu + size <= budget.gpu
        else:
            room = room and gpu + size <= budget.gpu and part.trainable
        if room:
            gpu += size
            places.append(Place(part.name, part.numel, "gpu", size))
        else:
            size = _bytes_on(part, formats, work, "host")
            host += size
            places.append(Place(part.name, part.numel, "host", size))
    problem = ""
    if need > budget.gpu:
        problem = (
            f"the working set needs {need / 1e9:.2f} GB of accelerator memory, the budget is "
            f"{budget.gpu / 1e9:.2f} GB"
        )
    elif host > budget.host:
        problem = (
            f"{host / 1e9:.2f} GB of host memory are needed, the budget is "
            f"{budget.host / 1e9:.2f} GB"
        )
    times = _times(parts, places, formats, work, machine)
    step, bound = _step(times, work)
    tokens = work.tokens * work.accumulation * work.ranks
    return Plan(
        fits=not problem,
        problem=problem,
        places=places,
        gpu_bytes=gpu,
        host_bytes=host,
        budget=budget,
        times=times,
        step_seconds=step,
        bound=bound,
        tokens_per_second=tokens / step if step else 0.0,
    )


def _times(
    parts: Sequence[Part],
    places: Sequence[Place],
    formats: Formats,
    work: Work,
    machine: Machine,
) -> dict[str, float]:
    trainable = {p.name: p.trainable for p in parts}
    total = sum(p.numel for p in parts)
    moved = sum(p.numel for p in places if p.where == "host") / work.ranks
    updated = sum(p.numel for p in places if p.where == "host" and trainable[p.name]) / work.ranks
    kept = sum(p.numel for p in places if p.where == "gpu" and trainable[p.name]) / work.ranks
    forward = 2.0 * work.tokens * total / machine.flops
    gathered = 0.0
    if work.ranks > 1 and machine.network:
        gathered = total * formats.compute.itemsize * (work.ranks - 1) / work.ranks
        gathered /= machine.network
    return {
        "forward": forward,
        "backward": forward * (3 if work.checkpointing else 2),
        "weights in": moved * formats.compute.itemsize / machine.h2d,
        "gradients out": updated * formats.gradient.itemsize / machine.d2h,
        "host optimizer": updated / machine.host_adam,
        "device optimizer": kept / machine.device_adam,
        "gather": gathered,
    }


def _step(times: dict[str, float], work: Work) -> tuple[float, str]:
    forward = {
        "GPU": times["forward"],
        "PCIe": times["weights in"],
        "network": times["gather"],
    }
    backward = {
        "GPU": times["backward"],
        "PCIe": max(times["weights in"], times["gradients out"]),
        "network": 2 * times["gather"],
    }
    last = {**forward, "host memory": times["host optimizer"]}
    phases = [backward] * work.accumulation + [forward] * (work.accumulation - 1) + [last]
    blame: dict[str, float] = {}
    for phase in phases:
        name = max(phase, key=lambda name: phase[name])
        blame[name] = blame.get(name, 0.0) + phase[name]
    blame["GPU"] = blame.get("GPU", 0.0) + times["device optimizer"]
    return sum(blame.values()), max(blame, key=lambda name: blame[name])
