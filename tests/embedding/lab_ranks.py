"""The ranks of a node of test_lab: what they train, and what the node sent meanwhile (JSON)."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from evener.embedding import Adagrad, Options
from evener.embedding.parts import hashes
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer
from tests import forked

DIM, STEPS, IDS = 32, 6, 16_384


def sent() -> int:
    """Bytes that left this node."""
    return sum(
        int((device / "statistics/tx_bytes").read_text())
        for device in Path("/sys/class/net").iterdir()
        if device.name != "lo"
    )


def all_sent() -> int:
    """`sent()` while no rank sends: nobody goes on before all have read."""
    dist.barrier()
    count = sent()
    dist.barrier()
    return count


def main() -> None:
    forked.ranks(2, 2)
    dist.init_process_group("gloo")
    rank, size, hosts = dist.get_rank(), dist.get_world_size(), 2
    embedding = DynamicEmbedding(Options(DIM, optimizer=Adagrad(lr=0.1)), "lab")
    optimizer = DynamicOptimizer(embedding)
    draw = torch.Generator().manual_seed(rank)
    asked = []
    for step in range(STEPS + 1):
        if step == 1:  # connections and buffers are there
            embedding.traffic.clear()
            before = all_sent()
        ids = (torch.rand(IDS, generator=draw).pow(6) * 200_000).long()
        embedding(ids).square().sum().backward()
        optimizer.step()
        if step:
            asked.append(torch.unique(ids))
    wire = all_sent() - before
    every: list[list[torch.Tensor]] = [[] for _ in range(size)]
    dist.all_gather_object(every, asked)
    bound = 0
    for step in range(STEPS):
        for host in range(hosts):
            mine = torch.cat([every[r][step] for r in range(size) if r * hosts // size == host])
            keys = torch.unique(mine)
            owner = hashes(keys) % size // (size // hosts)
            bound += int((owner != host).sum()) * (8 + 2 * 4 * DIM)
    found = {"wire": wire, "counted": embedding.traffic.total, "bound": bound}
    # In one write: two ranks of a node share what this goes into.
    sys.stdout.write(json.dumps({**found, "node": int(os.environ["GROUP_RANK"])}) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
