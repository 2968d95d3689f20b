"""A GAN in the order of DCGAN's script: two models, two optimizers, the discriminator used for both
losses, its gradients of the generator's loss thrown away."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild


def main() -> None:
    wild.begin(group=True)
    make = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    wild.watch(make, judge)
    generator, discriminator = DistributedDataParallel(make), DistributedDataParallel(judge)
    for_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
    for_d = torch.optim.Adam(discriminator.parameters(), 2e-3, betas=(0.5, 0.999))
    wild.line(generator, for_g)
    wild.line(discriminator, for_d)
    measure = nn.BCEWithLogitsLoss()
    real, false = torch.ones(8, 1), torch.zeros(8, 1)
    for step in range(wild.STEPS):
        discriminator.zero_grad()
        of_real = measure(discriminator(wild.data(step, 8, 16)), real)
        of_real.backward()
        fake = generator(wild.data(step + 5000, 8, 8))
        of_fake = measure(discriminator(fake.detach()), false)
        of_fake.backward()
        for_d.step()
        generator.zero_grad()
        loss = measure(discriminator(fake), real)
        loss.backward()
        for_g.step()
        wild.step(loss + of_real + of_fake)
    wild.end()


if __name__ == "__main__":
    main()
