"""Where each chunk will live, how long a step will take and what bounds it. Pure arithmetic: no
tensor is made, nothing is measured (that is `probe`), so that a plan can be made for a machine that
is not here, and tested for every machine.

# The rule
The working set comes first: the CUDA context, `depth` + 1 chunks of weights, gradients on their way
out, activations, the streaming lane's slots, and what the allocator loses between blocks. What is
left of the accelerator's budget takes chunks whole (weights, states, gradient), in the
order of the forward pass: the first layers are then ready for the next forward while the host still
updates the others. It is a prefix, so a larger budget never takes a chunk off the accelerator.

Where a step was traced (`Work.profile`), the weights on the move, the activations and the gradients
on their way are played through moment by moment for what lives where; else their largest sizes are
added up. The weights of a kept chunk (a tied weight, used at both ends of the model) are always on
the accelerator, and the states go to the host where there is no room.

What the host has no room for goes to the SSD, from the end of the model and as little as will do:
the states that only the optimizer reads. Weights and gradients stay on the host. With the
optimizer in the backward pass (`Formats.pool`) gradients take a few buffers there.

# The time
With exact clipping the optimizer waits for the whole backward pass:
`T = max(backward, its copies) + max(forward, optimizer on the host, its copies)`, each micro-batch
before the last without the optimizer; the last forward pass is played through chunk by chunk, as
each waits for its update and its copy (`_next_forward`). Its operations are launched while the
cores are busy with the optimizer, and that takes longer: the probe measures both. Where units ran
on the accelerator before (`rehearsal`), what they took counts, not what their trace says. The
optimizer runs at the cores' rate, or at that of both lanes (see `lanes`) where that was measured to
be higher: then the streaming lane stands still while weights come in by the same wires. Matrices
that are updated as a whole go through the accelerator; its products for them are counted, and what
ranks exchange for them. States on the SSD are read and written once, at the rate of the file with
both going on at once.

With the optimizer in the backward pass it is beside that pass, and what comes in last is updated
before the next forward pass: `T = max(backward, its copies, optimizer) + forward`, with what the
first gradient takes to be there and the last one to be used (`step_time`).

Where nodes have copies of the states, what crosses between them is in the last backward pass, which
then takes as long as the longer of the two.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from evener.base.budget import Budget
from evener.zero.form import Form
from evener.zero.owners import Matrix, load
from evener.zero.profile import Held, Profile, peaks, step_seconds
from evener.zero.slots import at_once, slot_bytes
from evener.zero.ssd import SMALL, buffer_bytes, size_of
from evener.zero.states import SLICE
from evener.zero.step_time import step_after, step_in_backward
from evener.zero.store import PLACES, Formats, share_of, size_on_host
from evener.zero.units import ALIGN

WORKSPACE = 96 << 20
"""Bytes that matrix products take on a GPU for themselves: two threads' handles of cuBLAS."""

HELD = 4
"""Inputs of recomputed units on the accelerator at a time where the others wait on the host:
leaving, in use, coming, and one not yet given back."""

SMALL_THINGS = 64 << 10
"""Bytes beside an update, which cannot be run again: norms, the loss, roundings."""


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
    """The streaming lane's part of `balanced`."""
    slack: float = 0.0
    """Share of the moving memory that the allocator loses between blocks."""
    host_reserve: int = 0
    """Bytes of host memory that this process takes without the model."""
    bandwidth: float = 0.0
    """Bytes/s of the accelerator's own memory, read and written (0: not measured)."""
    launch: float = 0.0
    """Seconds that an operation takes at least, whatever its size."""
    launch_beside: float = 0.0
    """The same while the optimizer works on the host (0: not measured, as `launch`)."""
    ssd: float = 0.0
    """Bytes/s of the SSD's file, read and written at once (0: not measured)."""
    between: float = 0.0
    """Bytes/s that a rank receives from other nodes (0: not measured)."""
    held: int = 0
    """Bytes on the accelerator that this process has for something else."""
    cores: int = 0
    """Multiprocessors of a CUDA GPU that is not here; 0: what is here is asked."""


@dataclass(frozen=True)
class Part:
    """A chunk to be. `stays`: on the accelerator whatever the budget. `kept`: its weights are, its
    states need not be. `unit`: the number of its unit."""

    name: str
    numel: int
    trainable: bool = True
    stays: bool = False
    kept: bool = False
    unit: int = 0
    align: int = ALIGN
    """What its elements are a multiple of (see `Group`)."""
    vectors: int = 0
    """Elements of parameters of one dimension."""
    moments: int = 2
    """Moments that its optimizer has."""
    scratch: int = 24
    """Bytes that an update on the accelerator takes beside the states, per element (`scratch`)."""
    matrices: tuple[Matrix, ...] = ()
    """Its parameters, where each is updated as a whole (on the accelerator)."""
    halves: tuple[int, int] = (0, 0)
    """`scratch` where ranks share them: of what is elementwise, and of the products."""


@dataclass(frozen=True)
class Work:
    """One step on one rank."""

    tokens: int
    activations: int
    accumulation: int = 1
    checkpointing: bool = True
    ranks: int = 1
    replicas: int = 1
    """Copies of the states, each shared by `ranks`: gradients cross between them once."""
    crossing: Form = field(default_factory=Form)
    """The form in which it crosses."""
    depth: int = 2
    streaming: bool = False
    offloaded: int = 0
    """Bytes of activations that wait for the backward pass on the host."""
    profile: Profile | None = None
    """Profile of a traced step; `activations` counts where there is none."""
    recompute: frozenset[int] = frozenset()
    """The units of the profile that are recomputed."""
    pools: bool = True
    """Whether holes in the allocator's pools count. Without them an allocator that is at its limit
    has to search: slower, and it fits all the same."""


@dataclass(frozen=True)
class Place:
    """Where a chunk lives: "gpu", "host", or "ssd": with the states that only the optimizer reads
    there (`away` bytes), and the rest (`bytes`) on the host."""

    name: str
    numel: int
    where: str
    bytes: int
    away: int = 0


@dataclass(frozen=True)
class Fit:
    """A setting with which a model would fit, in words: as the configuration has it, and as
    `evener plan-memory` has it. Its step and rate; 0 where they are not known."""

    setting: str
    option: str
    step_seconds: float
    tokens_per_second: float


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
    """"none", "recompute" (each block's inner activations), "some" (of the blocks), or "offload"
    (all, and their inputs wait on the host)."""
    streaming: bool = False
    gpu_reserve: int = 0
    """The part of `gpu_bytes` that is not the allocator's: the CUDA context."""
    gpu_held: int = 0
    """The part of `gpu_bytes` that the process has there for something else."""
    host_reserve: int = 0
    """The part of `host_bytes` that the process takes without the model."""
    offloaded: int = 0
    recomputed: list[int] = field(default_factory=list)
    """Numbers of the units that are recomputed, where the step was traced."""
    traced: bool = False
    """Whether activations were traced, and not estimated from shapes."""
    ssd_bytes: int = 0
    """Bytes of the file; each step reads and writes at most so many."""
    crossing_bytes: int = 0
    """Bytes that a rank hands to the network between nodes per step, where nodes have copies."""
    nearest: list[Fit] = field(default_factory=list)
    """What would fit, where this does not."""

    @property
    def resident(self) -> set[str]:
        """Names of the chunks whose states are on the accelerator."""
        return {place.name for place in self.places if place.where == "gpu"}

    @property
    def away(self) -> set[str]:
        """Names of the chunks with states on the SSD."""
        return {place.name for place in self.places if place.where == "ssd"}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _bytes_on(part: Part, formats: Formats, work: Work, where: str) -> int:
    """`where`: "gpu", "host", or "ssd": what stays on the host then."""
    formats = formats.of(part.align)
    owed = _owed(formats, work) * part.trainable
    return _size(_share(part, work), part.trainable, formats, part.moments, owed, where)


@functools.lru_cache(maxsize=1 << 12)  # blocks are alike, and a plan asks for each size again
def _size(
    share: int, trainable: bool, formats: Formats, moments: int, owed: int, where: str
) -> int:
    if where == "gpu":
        each = formats.device_bytes(moments) if trainable else formats.compute.itemsize
        return int(share * (each + owed))
    sizes = formats.pages(share, trainable, PLACES[:moments], where == "ssd")
    return sum(sizes) + (size_on_host(share, owed) if owed else 0)


def _share(part: Part, work: Work) -> int:
    return share_of(part.numel, work.ranks, part.align)


def _owed(formats: Formats, work: Work) -> int:
    """Bytes of an element of what a form between nodes keeps; 0: it keeps nothing."""
    dtype = work.crossing.owed(formats.gradient) if work.replicas > 1 else None
    return 0 if dtype is None else dtype.itemsize


def _crossing(parts: Sequence[Part], formats: Formats, work: Work) -> int:
    """Bytes that a rank hands to the network between nodes per step."""
    width = formats.gradient.itemsize
    return sum(
        work.crossing.sent(_share(part, work), part.vectors // work.ranks, width, work.replicas)
        for part in parts
        if part.trainable
    )


def _need(
    parts: Sequence[Part],
    resident: Set[str],
    formats: Formats,
    work: Work,
    machine: Machine,
) -> int:
    """Bytes of accelerator memory beside the states of the chunks in `resident`."""
    stays = 0
    for part in parts:
        size = part.numel * formats.compute.itemsize
        if formats.pool and part.trainable and (part.stays or part.kept):
            stays += part.numel * formats.gradient.itemsize  # whole at the end of the pass
        if part.stays:
            stays += _bytes_on(part, formats, work, "gpu")
            stays += size if work.ranks > 1 else 0
        elif work.ranks > 1 and part.trainable and part.name in resident:
            stays += size  # gathered once, beside this rank's share
        elif part.kept and (work.ranks > 1 or part.name not in resident):
            stays += size
    share = max((_share(p, work) for p in parts if p.trainable), default=0)
    # Updated on the accelerator is what lives there, and what streams through, slice by slice.
    there = (p for p in parts if p.trainable and _updated(p, resident, work))
    scratch = max((_scratch(p, work) for p in there), default=0)
    scratch += scratch // 64 + SMALL_THINGS if scratch else 0
    streams = [p for p in parts if p.trainable and (p.matrices or work.streaming)]
    carried = [(at_once(p.matrices, _share(p, work), work.ranks), p.moments) for p in streams]
    slots = slot_bytes(carried, formats)
    if machine.slack and any(p.matrices for p in streams):
        slots += WORKSPACE // 2  # the lane's own thread has products too
    slots += work.crossing.scratch(share, formats.gradient, work.replicas)
    beside = 0  # an update and what it reads, in the backward pass
    if formats.pool:
        within = {p.name for p in parts if p.trainable and not (p.stays or p.kept)}
        if any(p.matrices or work.streaming for p in parts if p.name in within - resident):
            beside = scratch
    if work.profile is not None:
        weights, rest = peaks(
            work.profile,
            held(parts, resident, formats, work.ranks, scratch),
            recompute=work.recompute,
            depth=work.depth,
            offload=HELD if work.offloaded else 0,
            ranks=work.ranks,
            pools=machine.slack > 0 and work.pools,
            shared=work.ranks * work.replicas > 1,
        )
        if work.accumulation > 1:  # the sum so far comes back to be added to
            top = max((p.numel for p in parts if not p.stays), default=0)
            rest += top * formats.gradient.itemsize
        moving = (
            weights + max(rest + beside, work.profile.inputs_bytes + scratch) + work.profile.buffers
        )
        loss = lost(work.profile, work.recompute, moving, machine.slack, work.pools)
        return machine.reserve + machine.held + moving + loss + slots + stays
    sizes = [p.numel for p in parts if not p.stays]
    largest = sorted(sizes, reverse=True)[: work.depth + 1]
    weights = sum(largest) * formats.compute.itemsize
    top = max(sizes, default=0)
    # A gradient as autograd leaves it, and up to `depth` + 1 flat copies on their way to the host.
    gradients = top * formats.compute.itemsize
    gradients += (work.depth + 1) * top * formats.gradient.itemsize
    if formats.pool:  # one waits for its unit, and is updated in the pass
        beside = max((p.numel for p in parts if p.name in within & resident), default=0)
        beside = beside * formats.gradient.itemsize + scratch
    moving = weights + max(gradients + work.activations + beside, scratch)
    return machine.reserve + machine.held + int(moving * (1 + machine.slack)) + slots + stays


def _updated(part: Part, resident: Set[str], work: Work) -> bool:
    return part.stays or part.name in resident or work.streaming or bool(part.matrices)


def _scratch(part: Part, work: Work) -> int:
    share = _share(part, work)
    if not part.matrices:
        return part.scratch * min(SLICE, share)
    largest = max(matrix.numel for matrix in part.matrices)
    if work.ranks == 1:
        return part.scratch * largest
    held = load(part.matrices, share, work.ranks).held * torch.bfloat16.itemsize
    each, products = part.halves
    return held + max(each * min(SLICE, share), products * largest)


def lost(
    profile: Profile, recompute: Set[int], moving: int, slack: float, pools: bool = True
) -> int:
    """Bytes that an allocator with pools takes beside those that move. They were traced to the
    byte: what is left to it is how tensors fit together, and what products take for themselves."""
    if not slack:
        return 0
    return WORKSPACE + (max(int(moving * slack / 2), profile.lost(recompute)) if pools else 0)


def held(
    parts: Sequence[Part], resident: Set[str], formats: Formats, ranks: int, scratch: int = 0
) -> list[Held]:
    """The chunks as `profile.peaks` takes them. `scratch`: bytes of an update there."""
    found = []
    for part in parts:
        stays = part.stays or part.name in resident
        early = formats.pool and part.trainable and stays and not (part.stays or part.kept)
        found.append(
            Held(
                part.unit,
                part.numel * formats.compute.itemsize,
                part.numel * formats.gradient.itemsize if part.trainable else 0,
                moves=not part.stays
                and not part.kept
                and (not stays or (ranks > 1 and not part.trainable)),
                leaves=part.trainable and not stays,
                update=scratch if early else None,
            )
        )
    return found


def _able(parts: Sequence[Part], work: Work) -> list[Part]:
    """What the accelerator may take, in the order in which it does."""
    able = []
    for part in parts:
        if part.stays:
            continue
        if work.ranks > 1 and not part.trainable:
            break  # its weights would be gathered all the same
        able.append(part)
    return able


def _used(
    parts: Sequence[Part], taken: Sequence[Part], formats: Formats, work: Work, machine: Machine
) -> int:
    """Bytes that are used on the accelerator where it takes these chunks."""
    states = sum(_bytes_on(part, formats, work, "gpu") for part in taken)
    return states + _need(parts, {part.name for part in taken}, formats, work, machine)


def _prefix(
    parts: Sequence[Part], formats: Formats, work: Work, machine: Machine, budget: Budget
) -> tuple[frozenset[str], int]:
    """The chunks that the accelerator takes, and the bytes that are then used there."""
    able = _able(parts, work)
    low, high = 0, len(able) + 1  # `low` fits, or nothing does; `high` does not
    best = _used(parts, [], formats, work, machine)
    if best > budget.gpu:
        return frozenset(), best
    while high - low > 1:
        middle = (low + high) // 2
        size = _used(parts, able[:middle], formats, work, machine)
        if size <= budget.gpu:
            low, best = middle, size
        else:
            high = middle
    return frozenset(part.name for part in able[:low]), best


def _placed(
    parts: Sequence[Part],
    chosen: Set[str],
    formats: Formats,
    work: Work,
    machine: Machine,
    budget: Budget,
) -> tuple[list[Place], int, int]:
    """Where each chunk is if the accelerator takes those in `chosen`; bytes of host memory and of
    the SSD's file."""
    host = machine.host_reserve + work.offloaded
    places: list[Place] = []
    below = [p for p in parts if p.trainable and not (p.stays or p.name in chosen)]
    buffers = formats.buffers(_share(part, work) for part in below)
    host += sum(size_on_host(numel, formats.gradient.itemsize) for numel in buffers)
    for part in parts:
        where = "gpu" if part.stays or part.name in chosen else "host"
        size = _bytes_on(part, formats, work, where)
        host += size if where == "host" else 0
        places.append(Place(part.name, part.numel, where, size))
    return _spilled(parts, places, formats, work, budget, host)


def least_gpu(
    parts: Sequence[Part],
    formats: Formats,
    work: Work,
    machine: Machine,
    budget: Budget,
    most: int | None = None,
) -> int | None:
    """Bytes of accelerator memory from which on `plan` fits the budgets of host and SSD. None: it
    never does, or not with `most`.

    This plays the step once at most, where `plan` plays it for each size that it tries: as few
    chunks leave the host as it asks for, and what they and the rest then take is the answer.
    """
    able = _able(parts, work)

    def room(count: int) -> bool:
        chosen = {part.name for part in able[:count]}
        return _placed(parts, chosen, formats, work, machine, budget)[1] <= budget.host

    count = bisect_left(range(len(able) + 1), True, key=room)
    if count > len(able):
        return None
    taken = able[:count]
    if most is not None and sum(_bytes_on(part, formats, work, "gpu") for part in taken) > most:
        return None
    found = _used(parts, taken, formats, work, machine)
    return None if most is not None and found > most else found


def plan(
    parts: Sequence[Part], formats: Formats, work: Work, machine: Machine, budget: Budget
) -> Plan:
    """See the head of this file."""
    chosen, gpu = _prefix(parts, formats, work, machine, budget)
    places, host, ssd = _placed(parts, chosen, formats, work, machine, budget)
    problem = ""
    if gpu > budget.gpu:
        problem = (
            f"the working set needs {gpu / 1e9:.2f} GB of accelerator memory, the budget is "
            f"{budget.gpu / 1e9:.2f} GB"
        )
    elif host > budget.host:
        problem = (
            f"{host / 1e9:.2f} GB of host memory are needed, the budget is "
            f"{budget.host / 1e9:.2f} GB"
        )
        if budget.ssd:
            problem += f", with {ssd / 1e9:.2f} of {budget.ssd / 1e9:.2f} GB of the SSD in use"
    times = _times(parts, places, formats, work, machine)
    trainable = {p.name for p in parts if p.trainable}
    if formats.pool:
        below = [(p.numel, p.away) for p in places if p.where != "gpu" and p.name in trainable]
        step, bound = step_in_backward(times, below, max(1, sum(p.numel for p in places)))
    else:
        last = _next_forward(places, times, formats, work, machine, trainable)
        step, bound = step_after(times, work.accumulation, last)
    tokens = work.tokens * work.accumulation * work.ranks * work.replicas
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
        checkpointing=_mode(work),
        streaming=work.streaming,
        gpu_reserve=machine.reserve,
        gpu_held=machine.held,
        host_reserve=machine.host_reserve,
        offloaded=work.offloaded,
        recomputed=sorted(work.recompute),
        traced=work.profile is not None,
        ssd_bytes=ssd,
        crossing_bytes=_crossing(parts, formats, work),
    )


def _spilled(
    parts: Sequence[Part],
    places: list[Place],
    formats: Formats,
    work: Work,
    budget: Budget,
    host: int,
) -> tuple[list[Place], int, int]:
    """The places, with as many chunks on the SSD as the host has no room for; the bytes of host
    memory and of the file."""
    if not budget.ssd or host <= budget.host:
        return places, host, 0

    def fields(part: Part) -> list[torch.dtype]:
        return [dtype for _, dtype in formats.away(PLACES[: part.moments])]

    def width(part: Part) -> int:
        return sum(dtype.itemsize for dtype in fields(part))

    trained = [part for part in parts if part.trainable]
    host += buffer_bytes(max(map(width, trained), default=0))
    carried = [at_once(p.matrices, _share(p, work), work.ranks) * width(p) for p in trained]
    host += max(carried, default=0)
    places, used = list(places), 0
    for at in reversed(range(len(places))):
        part, place = parts[at], places[at]
        away = size_of(_share(part, work), fields(part))
        if place.where != "host" or not part.trainable or away < SMALL:
            continue
        if used + away > budget.ssd:
            continue
        rest = _bytes_on(part, formats, work, "ssd")
        places[at] = replace(place, where="ssd", bytes=rest, away=away)
        host -= place.bytes - rest
        used += away
        if host <= budget.host:
            break
    return places, host, used


def _mode(work: Work) -> str:
    if work.offloaded:
        return "offload"
    if work.profile is not None and work.recompute < work.profile.repeated:
        return "some" if work.recompute else "none"
    return "recompute" if work.checkpointing else "none"


def _times(
    parts: Sequence[Part],
    places: Sequence[Place],
    formats: Formats,
    work: Work,
    machine: Machine,
) -> dict[str, float]:
    trainable = {p.name: p.trainable for p in parts}
    total = sum(p.numel for p in parts)
    below = [p for p in places if p.where != "gpu"]
    moved = sum(p.numel for p in below) / work.ranks
    updated = sum(p.numel for p in below if trainable[p.name]) / work.ranks
    kept = sum(p.numel for p in places if p.where == "gpu" and trainable[p.name]) / work.ranks
    forward = 2.0 * work.tokens * total / machine.flops
    backward = forward * (3 if work.checkpointing else 2)
    beside = forward
    if (profile := work.profile) is not None:
        slower = max(1.0, machine.launch_beside / machine.launch) if machine.launch else 1.0
        forward, beside, backward, slow = step_seconds(
            profile, machine.flops, machine.bandwidth, machine.launch, slower
        )
        if work.recompute:
            backward += len(work.recompute) / len(profile.repeated) * (slow - backward)
        if not updated:
            beside = forward
    gathered = again = crossing = 0.0
    if work.ranks > 1 and machine.network:
        each = formats.compute.itemsize * (work.ranks - 1) / work.ranks / machine.network
        gathered = total * each
        again = gathered - each * sum(
            p.numel for p in places if p.where == "gpu" and trainable[p.name]
        )
    owed = updated * _owed(formats, work)
    if work.replicas > 1 and machine.between:
        crossing = _crossing(parts, formats, work) / machine.between
    arriving = moved * formats.compute.itemsize / machine.h2d
    trained = {p.name: p for p in parts if p.trainable}
    whole = [trained[p.name] for p in below if p.name in trained and trained[p.name].matrices]
    sliced = updated - sum(p.numel for p in whole) / work.ranks
    optimizer = sliced / machine.host_adam
    if work.streaming and machine.balanced:
        optimizer = min(optimizer, (sliced + machine.streamed * arriving) / machine.balanced)
    matrices = sum(p.numel * formats.host_bytes(p.moments) for p in whole) / work.ranks
    here = [trained[p.name] for p in places if p.where == "gpu" and p.name in trained]
    (products, swapped), (there, swapped_here) = (_products(p, work) for p in (whole, here))
    wire = torch.bfloat16.itemsize / machine.network if machine.network else 0.0
    return {
        "forward": forward,
        "forward beside the optimizer": beside,
        "backward": backward,
        "weights in": arriving,
        "gradients out": updated * formats.gradient.itemsize / machine.d2h,
        "host optimizer": optimizer,
        "matrices in and out": matrices / min(machine.h2d, machine.d2h),
        "matrices": products / machine.flops,
        "matrices between ranks": swapped * wire,
        "activations out": work.offloaded / machine.d2h,
        "device optimizer": kept / machine.device_adam
        + there / machine.flops
        + swapped_here * wire,
        "gather": gathered,
        "gather again": again,
        "between nodes": crossing,
        "owed in and out": owed / min(machine.h2d, machine.d2h),
        "SSD": 2 * sum(p.away for p in places) / machine.ssd if machine.ssd else 0.0,
    }


def _products(parts: Sequence[Part], work: Work) -> tuple[float, int]:
    """For the busiest rank: operations of the products of these chunks' matrices, and elements that
    cross for them."""
    found = [load(p.matrices, _share(p, work), work.ranks) for p in parts if p.matrices]
    return sum(each.flops for each in found), sum(each.crossing for each in found)


def _next_forward(
    places: Sequence[Place],
    times: dict[str, float],
    formats: Formats,
    work: Work,
    machine: Machine,
    trainable: Set[str],
) -> float:
    """Seconds from the end of a backward pass to the end of the next forward pass: the last
    gradient goes out, then chunk after chunk is updated, comes in and is computed with. What a unit
    computes is taken as its share of the parameters."""
    mine = [p for p in places if p.where != "gpu" and p.name in trainable]
    matrices = times["matrices in and out"] + times["matrices"] + times["matrices between ranks"]
    share = max(times["host optimizer"], matrices) / max(1, sum(p.numel for p in mine))
    each = times["SSD"] / max(1, sum(p.away for p in places))
    compute = times["forward beside the optimizer"] / max(1, sum(p.numel for p in places))
    begin = mine[0].numel / work.ranks * formats.gradient.itemsize / machine.d2h if mine else 0.0
    updated, arrived, done = begin, 0.0, 0.0
    for place in places:
        if place.where != "gpu":
            if place.name in trainable:
                updated += max(place.numel * share, place.away * each)
                arrived = max(arrived, updated)
            arrived += place.numel / work.ranks * formats.compute.itemsize / machine.h2d
            done = max(done, arrived)
        done += place.numel * compute
    return done
