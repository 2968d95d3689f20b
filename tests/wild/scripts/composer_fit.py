"""MosaicML's Composer: its Trainer, its algorithms' events, DDP chosen by itself."""

import torch
import torch.distributed as dist
from composer import Callback, ComposerModel, Trainer
from composer.algorithms import GradientClipping, LabelSmoothing
from torch import nn

from tests.wild import harness as wild


class Classifier(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch, *args, **kwargs):
        target = batch[1]
        return nn.functional.cross_entropy(outputs, target)


class Follow(Callback):
    def fit_start(self, state, logger):
        wild.line(state.model, state.optimizers[0])

    def batch_end(self, state, logger):
        wild.step(state.loss if isinstance(state.loss, torch.Tensor) else sum(state.loss))


def main() -> None:
    wild.begin(group=True)
    model = Classifier()
    wild.watch(model)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 16, generator=generator)
    targets = torch.randint(4, (512,), generator=generator)
    data = torch.utils.data.TensorDataset(inputs, targets)
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), wild.RANK)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration=f"{wild.STEPS}ba",
        device="cpu",
        device_train_microbatch_size=4,
        algorithms=[GradientClipping("norm", 1.0), LabelSmoothing(0.1)],
        callbacks=[Follow()],
        progress_bar=False,
        seed=0,
    )
    trainer.fit()
    wild.end()


if __name__ == "__main__":
    main()
