"""A loop with Accelerate: accumulation, clipping, a schedule, state that is saved and loaded."""

import torch
from accelerate import Accelerator
from torch import nn

from tests.wild import harness as wild


def main() -> None:
    wild.begin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    wild.watch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, wild.STEPS)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 16, generator=generator)
    targets = torch.randint(4, (512,), generator=generator)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=8
    )
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    wild.line(model, optimizer)
    done = 0
    while done < wild.STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                wild.step(loss)
                done += 1
                if done == wild.STEPS // 2:
                    accelerator.save_state(str(wild.OUT / "state"))
                    accelerator.wait_for_everyone()
                    accelerator.load_state(str(wild.OUT / "state"))
            if done == wild.STEPS:
                break
    wild.end()


if __name__ == "__main__":
    main()
