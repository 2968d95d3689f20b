"""Lightning's ModelParallelStrategy: the module shards itself in configure_model."""

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.wild import harness as wild
from tests.wild.scripts.lightning_fit import Data


class Sharded(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16))
              for _ in range(3)),
            nn.Linear(16, 4),
        )  # fmt: skip

    def configure_model(self) -> None:
        if self.trainer.state.fn != "fit" or hasattr(self, "sharded"):
            return
        self.sharded = True
        how = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        }
        for block in self.net[:-1]:
            fully_shard(block, **how)
        fully_shard(self.net, **how)

    def on_train_start(self) -> None:
        wild.watch(self.net)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("val", loss, sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        wild.step(outputs["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main() -> None:
    wild.begin()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        plugins=[TorchElasticEnvironment()],
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=wild.STEPS,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = torch.utils.data.DataLoader(Data(), batch_size=8)
    trainer.fit(Sharded(), loader, loader)
    wild.end()


if __name__ == "__main__":
    main()
