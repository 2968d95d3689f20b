"""A small UNet in the way of diffusers' unconditional example: Accelerate, noise, EMA, clipping."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import nn

from tests.wild import harness as wild


def main() -> None:
    wild.begin()
    accelerator = Accelerator(cpu=True)
    net = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    wild.watch(net)
    noise = DDPMScheduler(num_train_timesteps=100)
    average = EMAModel(net.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=net.config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = get_scheduler(
        "cosine", optimizer, num_warmup_steps=5, num_training_steps=2 * wild.STEPS
    )
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    wild.line(model, optimizer)
    for step in range(wild.STEPS):
        clean, added = wild.data(step, 2, 3, 16, 16), wild.data(step + 5000, 2, 3, 16, 16)
        times = wild.tokens(step, 100, 2)
        with accelerator.accumulate(model):
            guess = model(noise.add_noise(clean, added, times), times).sample
            loss = nn.functional.mse_loss(guess, added)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(net.parameters())
        wild.step(loss.detach().item())
    wild.end()


if __name__ == "__main__":
    main()
