"""Lightning 1.9, the last with a Horovod strategy: automatic optimization, a scheduler."""

import pytorch_lightning as lightning
import torch
import torchmetrics
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
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
        # No batch norm: its running averages are each rank's own under Horovod, rank 0's under DDP.
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def training_step(self, batch, index):
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        wild.step(outputs["loss"])

    def configure_optimizers(self):
        # The Horovod strategy multiplies the learning rate by the number of ranks itself.
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3 if wild.HOROVOD else 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main() -> None:
    wild.begin()
    model = Automatic()
    wild.watch(model)
    given = {"strategy": "horovod"}
    if not wild.HOROVOD:
        environment = TorchElasticEnvironment()
        given = {
            "strategy": DDPStrategy(cluster_environment=environment, process_group_backend="gloo"),
            "devices": 1,
            "num_nodes": 2,
        }
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=wild.STEPS,
        limit_val_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    loader = torch.utils.data.DataLoader(Data(), batch_size=8)
    trainer.fit(model, loader, loader)
    wild.end()


if __name__ == "__main__":
    main()
