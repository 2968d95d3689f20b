"""A small DDP program. It does not name Evener: `evener launch --ddp` puts Evener under it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)

    # Your model and your data go here.
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = nn.Sequential(model, nn.Linear(512, 1)).to(device)
    wanted = torch.randn(64, 1, device=device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # each rank draws samples of its own
    for step in range(100):
        x = torch.randn(64, 64, device=device)
        loss = nn.functional.mse_loss(model(x), x @ wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
