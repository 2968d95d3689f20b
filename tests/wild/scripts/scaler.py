"""Mixed precision in the way of torch's own recipe: autocast, GradScaler, unscale_, clipping; one
overflow on one rank, so that a step is skipped on all."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild


def main() -> None:
    wild.begin(group=True)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    wild.watch(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wild.line(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)
    for step in range(wild.STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(
                model(wild.data(step, 8, 16)), wild.tokens(step, 4, 8)
            )
        blown = loss * float("inf") if step == 20 and wild.RANK == 1 else loss
        scaler.scale(blown).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        wild.step(loss)
    wild.end()


if __name__ == "__main__":
    main()
