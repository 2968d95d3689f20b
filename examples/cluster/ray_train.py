"""DDP with Evener under Ray Train: Ray starts the ranks, and nothing else changes.

    python examples/cluster/ray_train.py --workers 16 --gpus
    python examples/cluster/ray_train.py --dry-run       # trains one rank here, without Ray

Ray sets RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR and makes the process group, so
`evener.ddp.accelerate` is the only line of Evener's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evener.ddp


def train(config: dict[str, Any]) -> None:
    """What each worker runs; the process group is there already."""
    cuda = bool(config["gpus"])
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = DistributedDataParallel(model)
    model = evener.ddp.accelerate(model, optimizer)
    for _ in range(config["steps"]):
        x = torch.randn(64, 256, device=device)
        y = torch.randint(10, (64,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU per worker")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="one rank here, without Ray")
    arguments = parser.parse_args()
    config = {"steps": arguments.steps, "gpus": arguments.gpus}
    if arguments.dry_run:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        train({"steps": 1, "gpus": False})
        dist.destroy_process_group()
        return
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus)
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
