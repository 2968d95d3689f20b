"""Lightning's Trainer: automatic optimization with clipping and accumulation, or a GAN by hand."""

import argparse

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from tests.wild import harness as wild


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), index % 4


class Automatic(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

    def on_train_start(self) -> None:
        wild.line(self.trainer.strategy.model, self.optimizers().optimizer)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        wild.step(outputs["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def on_train_start(self) -> None:
        wild.line(self.trainer.strategy.model, *(o.optimizer for o in self.optimizers()))

    def training_step(self, batch, index):
        for_g, for_d = self.optimizers()
        measure = nn.BCEWithLogitsLoss()
        ones, zeros = torch.ones(len(batch[0]), 1), torch.zeros(len(batch[0]), 1)
        self.toggle_optimizer(for_g)
        loss_g = measure(self.discriminator(self.generator(batch[0][:, :8])), ones)
        for_g.zero_grad()
        self.manual_backward(loss_g)
        for_g.step()
        self.untoggle_optimizer(for_g)
        self.toggle_optimizer(for_d)
        fake = self.generator(batch[0][:, 8:]).detach()
        real = measure(self.discriminator(batch[0]), ones)
        loss_d = real + measure(self.discriminator(fake), zeros)
        for_d.zero_grad()
        self.manual_backward(loss_d)
        for_d.step()
        self.untoggle_optimizer(for_d)
        wild.step(loss_g + loss_d)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=2e-3),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-3),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--manual", action="store_true")
    args = parser.parse_args()
    wild.begin()
    model = Manual() if args.manual else Automatic()
    wild.watch(model)
    unused = args.manual
    given = {} if args.manual else {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(
            cluster_environment=TorchElasticEnvironment(),
            process_group_backend="gloo",
            find_unused_parameters=unused,
        ),
        max_steps=wild.STEPS * (2 if args.manual else 1),
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    loader = torch.utils.data.DataLoader(Data(), batch_size=8)
    trainer.fit(model, loader, None if args.manual else loader)
    wild.end()


if __name__ == "__main__":
    main()
