"""A model that need not fit the GPU: weights, gradients and optimizer states are in host memory.

Each layer comes to the GPU shortly before it runs. Without a GPU the program runs on the CPU.
"""

import torch
from torch import nn

from evener import zero


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    # Your model and your data go here.
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(256, 1))
    wanted = torch.randn(256, 1, device=device)
    engine, _, _, _ = zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 64,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            # "budget": {"gpu": "24GB", "host": "110GB"} says how much Evener may take of each.
            "evener": {"device": device},
        },
        example=torch.zeros(64, 256),
    )
    for step in range(100):
        x = torch.randn(64, 256, device=device)
        loss = nn.functional.mse_loss(engine(x), x @ wanted)
        engine.backward(loss)
        engine.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    zero.save_checkpoint(engine, "checkpoint")


if __name__ == "__main__":
    main()
