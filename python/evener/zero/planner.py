"""Where each chunk will live, how long a step will take and what bounds it. Pure arithmetic: no
tensor is made, nothing is measured (that is `probe`), so that a plan can be made for a machine that
is not here, and tested for every machine.

# The rule
The working set comes first: the CUDA context, `depth` + 1 chunks of weights, gradients on their way
out, activations, the streaming lane's slots, and what the allocator loses between blocks. What is
left of the accelerator's budget takes chunks whole (weights, states, gradient), in the
order of the forward pass: the first layers are then ready for the next forward while the host still
updates the others. It is a prefix, so a larger budget never takes a chunk off the accelerator.

# The time
With exact clipping the optimizer waits for the whole backward pass:
`T = max(backward, its copies) + max(forward, optimizer on the host, its copies)`, each micro-batch
before the last without the optimizer. The optimizer runs at the cores' rate, or at that of both
lanes (see `lanes`) where that was measured to be higher: then the streaming lane stands still while
weights come in by the same wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evener.zero.budget import Budget
from evener.zero.host import pages
from evener.zero.states import SLICE
from evener.zero.store import Formats, share_of

SLOTS = 3
"""Slices on their way through the accelerator: one comes, one is updated, one leaves."""


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
    balanced: float = 0.0
    """Parameters/s of the host's cores and the streaming lane together (0: not measured)."""
    streamed: float = 0.0
    """Of those, the streaming lane's."""
    slack: float = 0.0
    """Share of the moving memory that the allocator loses between blocks."""
    host_reserve: int = 0
    """Bytes of host memory that this process takes without the model."""


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
    streaming: bool = False
    offloaded: int = 0
    """Bytes of activations that wait for the backward pass on the host."""


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
    checkpointing: str = "recompute"
    """"none", "recompute" (each block's inner activations), or "offload" (and its input waits on
    the host)."""
    streaming: bool = False
    gpu_reserve: int = 0
    """Of `gpu_bytes`, what is not the allocator's: the CUDA context."""
    host_reserve: int = 0
    """Of `host_bytes`, what the process takes without the model."""
    offloaded: int = 0

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
    sizes = [p.numel for p in parts if not p.stays]
    largest = sorted(sizes, reverse=True)[: work.depth + 1]
    weights = sum(largest) * formats.compute.itemsize
    top = max(sizes, default=0)
    # A gradient as autograd leaves it, and up to `depth` + 1 flat copies on their way to the host.
    gradients = top * formats.compute.itemsize
    gradients += (work.depth + 1) * top * formats.gradient.itemsize
    stays = 0
    for part in parts:
        if part.stays:
            stays += _bytes_on(part, formats, work, "gpu")
            stays += part.numel * formats.compute.itemsize if work.ranks > 1 else 0
    # An update in torch operations needs float32 copies of one slice.
    share = share_of(max((p.numel for p in parts if p.trainable), default=0), work.ranks)
    scratch = 6 * 4 * min(SLICE, share)
    moving = weights + max(gradients + work.activations, scratch)
    slots = SLOTS * SLICE * formats.host_bytes(work.moments) if work.streaming else 0
    return machine.reserve + int(moving * (1 + machine.slack)) + slots + stays


def plan(
    parts: Sequence[Part], formats: Formats, work: Work, machine: Machine, budget: Budget
) -> Plan:
    """See the head of this file."""
    need = working_set(parts, formats, work, machine)
    gpu, host = need, machine.host_reserve + work.offloaded
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
        checkpointing=("offload" if work.offloaded else "recompute")
        if work.checkpointing
        else "none",
        streaming=work.streaming,
        gpu_reserve=machine.reserve,
        host_reserve=machine.host_reserve,
        offloaded=work.offloaded,
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
    arriving = moved * formats.compute.itemsize / machine.h2d
    optimizer = updated / machine.host_adam
    if work.streaming and machine.balanced:
        optimizer = min(optimizer, (updated + machine.streamed * arriving) / machine.balanced)
    return {
        "forward": forward,
        "backward": forward * (3 if work.checkpointing else 2),
        "weights in": arriving,
        "gradients out": updated * formats.gradient.itemsize / machine.d2h,
        "host optimizer": optimizer,
        "activations out": work.offloaded / machine.d2h,
        "device optimizer": kept / machine.device_adam,
        "gather": gathered,
    }


def _step(times: dict[str, float], work: Work) -> tuple[float, str]:
    forward = {
        "GPU": times["forward"],
        "PCIe": max(times["weights in"], times["activations out"]),
        "network": times["gather"],
    }
    backward = {
        "GPU": times["backward"],
        "PCIe": max(times["weights in"] + times["activations out"], times["gradients out"]),
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
