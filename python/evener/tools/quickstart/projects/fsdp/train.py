"""A small FSDP2 program. It does not name Evener: `evener launch --fsdp` puts Evener under it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)

    # Your model and your data go here.
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(256, 1)).to(device)
    wanted = torch.randn(256, 1, device=device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # each rank draws samples of its own
    for step in range(100):
        x = torch.randn(64, 256, device=device)
        loss = nn.functional.mse_loss(model(x), x @ wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
