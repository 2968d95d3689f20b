"""What the links between stages carry, measured: a tensor goes to the next rank and comes back.

Two sizes give latency and bandwidth, as the program gets them: with the host's part at both ends,
and the share of the link that a single transfer reaches. What a transfer takes while both devices
compute is more (docs/benchmarks/pipelines.md), and is not measured here.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.distributed as dist

from evener.base.log import logger
from evener.pipeline.simulate import Link, Network

# Bytes of the short and of the long message: the long one as activations are.
_SIZES = {"cuda": (4096, 16 << 20), "cpu": (4096, 2 << 20)}
_TIMES = 5


def probe(group: dist.ProcessGroup | None, device: torch.device, hosts: list[str]) -> Network:
    """Measure one link inside a node and one between two. All ranks of `group` call it.

    hosts: of each rank. What there is no pair of ranks for stays at `Network`'s default.
    """
    rank = dist.get_rank(group)
    steps = list(itertools.pairwise(range(len(hosts))))
    first = {
        name: next((pair for pair in steps if (hosts[pair[0]] == hosts[pair[1]]) == same), None)
        for name, same in (("inside", True), ("between", False))
    }
    found: dict[str, tuple[float, float]] = {}
    for name, pair in first.items():
        if pair is not None and rank in pair:
            short, long = (_there(group, pair, rank, device, n) for n in _SIZES[device.type])
            sizes = _SIZES[device.type]
            # On a busy machine the short one may take as long: latency is at most half of it all.
            short = min(short, long / 2)
            bandwidth = (sizes[1] - sizes[0]) / (long - short)
            found[name] = (bandwidth, max(short - sizes[0] / bandwidth, 1e-6))
    everyone: list[dict[str, tuple[float, float]]] = [{} for _ in hosts]
    dist.all_gather_object(everyone, found, group=group)
    links = {k: Link(*v) for one in reversed(everyone) for k, v in one.items()}
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    default = Network()
    per_node = 0 if len(runs) == 1 else runs[0] if len(set(runs)) == 1 else 1
    made = Network(
        links.get("inside", default.inside), links.get("between", default.between), per_node
    )
    if rank == 0:
        for name, link in links.items():
            where = "inside a node" if name == "inside" else "between nodes"
            logger.info("pipeline: a transfer %s carries %.3g GB/s, after %.0f us", where,
                        link.bandwidth / 1e9, link.latency * 1e6)  # fmt: skip
    return made


def _there(
    group: dist.ProcessGroup | None, pair: tuple[int, int], rank: int, device: torch.device,
    size: int,
) -> float:  # fmt: skip
    """Seconds of a message of `size` bytes one way: half of there and back."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    took = []
    for _ in range(_TIMES + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for source, target in (pair, pair[::-1]):
            if rank == source:
                dist.send(tensor, group=group, group_dst=target)
            else:
                dist.recv(tensor, group=group, group_src=source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append((time.perf_counter() - begin) / 2)
    return statistics.median(took[1:])
