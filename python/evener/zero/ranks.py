"""The ranks that share a model's states, and what their communicators take.

# Several nodes
States are shared out over all ranks ("shard"), or over those of one node, and every node has a copy
("replicate"). Then weights never cross the network between nodes, and gradients cross once per
optimizer step: each rank's share with those of the same place on the other nodes (`between`). The
sum is made in one place and sent to all, so the copies stay equal bit for bit.

There are two communicators in a node because two threads issue collectives: the loader gathers
weights, the training thread reduces gradients. Each thread's order is the same on every rank; how
the two interleave is not, and one communicator would need that too (ranks would wait for each other
for ever). Where matrices are updated as a whole (`matrices`), the streaming lane has a third.

NCCL's buffers lie beside torch's allocator and grow with channels, peers and algorithms. So that a
budget can hold: channels are bounded, all collectives here are of the ring's kind (an all-reduce
would connect trees as well), and connections are made when the communicators are, before anything
is planned: what the driver's figure grew by is in the plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.world.topology import host_identity
from evener.zero.form import Form

CHANNELS = 8
"""Channels of each NCCL communicator, so multiprocessors that it takes from the model: well above
100 GB/s over NVLink, where a block's weights are needed at some tens of GB/s."""

WARM = 16 << 20
"""Elements of the first collectives: large enough for what NCCL chooses for a chunk."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place among the `world` ranks that share one copy of the states, and that copy's
    among `replicas`. Without groups: it is alone, and no collective may be called."""

    rank: int = 0
    world: int = 1
    weights: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    matrices: dist.ProcessGroup | None = None
    bytes: int = 0
    """Accelerator memory of the communicators."""
    network: float = 0.0
    """Bytes/s that a rank receives in a gather (0: not measured)."""
    replica: int = 0
    replicas: int = 1
    between: dist.ProcessGroup | None = None
    """The ranks of this one's place in all copies."""
    form: Form = field(default_factory=Form)
    """What gradients cross in between copies."""

    @property
    def size(self) -> int:
        """All ranks."""
        return self.world * self.replicas

    @property
    def number(self) -> int:
        """This rank among all: 0 speaks for all."""
        return self.replica * self.world + self.rank

    def cross(self, share: torch.Tensor, cast: torch.dtype | None = None) -> None:
        """`share` [n] becomes the mean of all copies' shares, summed in its dtype or in `cast`; on
        the training thread."""
        if self.replicas == 1:
            return
        # Divided first: large gradients do not leave the range of a narrower dtype.
        sent = share if cast is None else (share / self.replicas).to(cast)
        count, rest = divmod(sent.numel(), self.replicas)
        if rest or not sent.is_cuda:  # Gloo's reduce-scatter is an all-reduce of everything
            dist.all_reduce(sent, group=self.between)
        else:
            mine = torch.empty(count, dtype=sent.dtype, device=sent.device)
            dist.reduce_scatter_tensor(mine, sent, group=self.between)
            dist.all_gather_into_tensor(sent, mine, group=self.between)
        if cast is None:
            share /= self.replicas
        else:
            share.copy_(sent)

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """`whole` [world * n] from every rank's `mine` [n]; on the loader's thread, or while it
        has nothing to do."""
        dist.all_gather_into_tensor(whole, mine, group=self.weights)

    def collect(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """As `gather`, on the training thread."""
        dist.all_gather_into_tensor(whole, mine, group=self.gradients)

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's values to all; before training."""
        if self.replicas > 1:
            dist.broadcast(values, group_src=0, group=self.between)
        if self.world > 1:
            dist.broadcast(values, group_src=0, group=self.weights)

    def reduce(self, share: torch.Tensor, whole: torch.Tensor) -> None:
        """`share` [n] of the mean of every rank's `whole` [world * n]; on the training thread."""
        dist.reduce_scatter_tensor(share, whole, group=self.gradients)
        share /= self.world

    def swap(
        self, came: torch.Tensor, sent: torch.Tensor, sizes: list[int], given: list[int]
    ) -> None:
        """`given[r]` elements of `sent` go to rank r, `sizes[r]` come from it into `came`, each in
        the order of ranks; what does not cross is copied. See `matrices` for the threads."""
        dist.all_to_all_single(came, sent, sizes, given, group=self.matrices)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's scalar, the same bits on all; on the training thread."""
        every = torch.empty(self.world, dtype=value.dtype, device=value.device)
        dist.all_gather_into_tensor(every, value.reshape(1), group=self.gradients)
        return every.sum()

    def any(self, mine: torch.Tensor) -> torch.Tensor:
        """Where any rank's uint8 [n] is not zero; on the training thread."""
        for count, group in ((self.world, self.gradients), (self.replicas, self.between)):
            if count > 1:
                every = torch.empty(count, mine.numel(), dtype=mine.dtype, device=mine.device)
                dist.all_gather_into_tensor(every.view(-1), mine, group=group)
                mine = every.amax(0)
        return mine

    def everywhere(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor [n], the same bits on all; on the training thread."""
        for count, group in ((self.world, self.gradients), (self.replicas, self.between)):
            if count > 1:
                every = torch.empty(count, mine.numel(), dtype=mine.dtype, device=mine.device)
                dist.all_gather_into_tensor(every.view(-1), mine, group=group)
                mine = every.sum(0)
        return mine

    def agree(self, given: Any) -> Any:
        """Rank 0's object on all ranks."""
        held = [given]
        if self.replicas > 1:
            dist.broadcast_object_list(held, group=self.between, group_src=0)
        if self.world > 1:
            dist.broadcast_object_list(held, group=self.weights, group_src=0)
        return held[0]

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of every rank's numbers."""
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        for count, group in ((self.world, self.weights), (self.replicas, self.between)):
            if count > 1:
                every = torch.empty(count, dtype=torch.int64, device=device)
                dist.all_gather_into_tensor(every, mine, group=group)
                mine = every.max().reshape(1)
        return int(mine)


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def meet() -> None:
    """All ranks of the default process group wait for each other."""
    if world_size() > 1:
        dist.barrier()


@dataclass(frozen=True)
class Layout:
    """Which ranks share a node. nodes: the ranks of each, by the place in their node."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def able(self) -> bool:
        """Whether each node may have a copy: there are several, of one size."""
        return len(self.nodes) > 1 and len({len(ranks) for ranks in self.nodes}) == 1


def layout() -> Layout:
    """Layout of the default process group; collective."""
    if world_size() == 1:
        return Layout(((0,),))
    names: list[Any] = [None] * world_size()
    dist.all_gather_object(names, host_identity())
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return Layout(tuple(tuple(ranks) for ranks in nodes.values()))


@dataclass(frozen=True)
class Crossing:
    """The group of this rank's place on all nodes; bytes/s that a rank receives in it while all
    ranks of a node do the same; and the accelerator memory that the group takes."""

    group: dist.ProcessGroup
    rate: float
    bytes: int


def taken(device: torch.device) -> int:
    """Bytes of the GPU that torch's allocator has not: contexts and communicators."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def crossing(device: torch.device, nodes: Layout) -> Crossing:
    """Made and measured: four or more all-gathers of 16 MB, for 0.4 s (without a GPU 1 MB, 0.05 s).
    Collective."""
    rank, mine = dist.get_rank(), None
    before = taken(device)
    for place in range(len(nodes.nodes[0])):
        members = [ranks[place] for ranks in nodes.nodes]
        group = group_of(device, "between nodes", members)
        mine = group if rank in members else mine
    assert mine is not None
    numel = (8 << 20) if device.type == "cuda" else (1 << 19)
    whole = torch.zeros(numel * len(nodes.nodes), dtype=torch.bfloat16, device=device)
    share = whole[:numel].clone()

    def idle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def turn(whole: torch.Tensor, share: torch.Tensor) -> float:
        idle()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, share, group=mine)
        idle()
        return time.perf_counter() - start

    def slowest(own: float) -> float:
        every: list[Any] = [None] * world_size()
        dist.all_gather_object(every, own)
        return float(max(every))

    turn(whole, share)  # connections are made
    wanted = 0.4 if device.type == "cuda" else 0.05
    turns = max(4, min(64, int(wanted / slowest(turn(whole, share)))))
    # In the first half a network's windows still grow; a chunk is sent in what they have become.
    seconds = [turn(whole, share) for _ in range(turns)][turns // 2 :]
    dist.reduce_scatter_tensor(share, whole, group=mine)
    idle()
    rate = (whole.nbytes - share.nbytes) / slowest(sum(seconds) / len(seconds))
    del whole, share
    return Crossing(mine, rate, max(0, taken(device) - before))


def join(
    device: torch.device,
    nodes: Layout | None = None,
    between: Crossing | None = None,
    form: Form | None = None,
    matrices: bool = False,
) -> Ranks:
    """The ranks of the default process group, in communicators of their own; alone without one.
    `nodes`: each has a copy of the states, with `between` among them. `matrices`: some are updated
    as a whole."""
    size = world_size()
    if size == 1:
        return Ranks()
    number = dist.get_rank()
    if nodes is None or between is None:
        rank, world, replica, replicas = number, size, 0, 1
        sets = [list(range(size))]
    else:
        replica = next(n for n, ranks in enumerate(nodes.nodes) if number in ranks)
        rank, world = nodes.nodes[replica].index(number), len(nodes.nodes[0])
        replicas, sets = len(nodes.nodes), [list(ranks) for ranks in nodes.nodes]
    alone = Ranks(
        rank, world, replica=replica, replicas=replicas, form=form or Form(),
        between=between.group if between else None, bytes=between.bytes if between else 0,
    )  # fmt: skip
    if world == 1:
        return alone
    cuda, before = device.type == "cuda", taken(device)

    def made(name: str) -> dist.ProcessGroup:
        groups = [group_of(device, name, members) for members in sets]
        return next(g for g, members in zip(groups, sets, strict=True) if number in members)

    ranks = replace(alone, weights=made("weights"), gradients=made("gradients"))
    if matrices:
        ranks = replace(ranks, matrices=made("matrices"))
    if not cuda:
        return ranks
    for numel in (world, WARM // world * world):
        whole = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        share = whole[: numel // world].clone()
        ranks.gather(whole, share)
        dist.broadcast(whole, group_src=0, group=ranks.weights)
        ranks.reduce(share, whole)
        ranks.total(share[:1])
        if matrices:
            each = [numel // world] * world
            ranks.swap(torch.empty_like(whole), whole, each, each)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(4):
        ranks.gather(whole, share)
    torch.cuda.synchronize(device)
    rate = 4 * (whole.nbytes - share.nbytes) / (time.perf_counter() - start)
    del whole, share
    more = max(0, taken(device) - before)
    return replace(ranks, bytes=ranks.bytes + more, network=rate)


def makes(device: torch.device) -> list[str]:
    """What products of matrices run on, in words that are equal where their bits are: of all ranks
    of the default process group. Collective."""
    cuda = device.type == "cuda"
    mine = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, mine)
    return found


def group_of(device: torch.device, name: str, members: list[int]) -> dist.ProcessGroup:
    """The process group of these ranks; all ranks call it."""
    options = None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = CHANNELS
    group: dist.ProcessGroup = dist.new_group(
        members,
        backend="nccl" if options else None,
        pg_options=options,
        group_desc=f"evener {name}",
    )
    return group
