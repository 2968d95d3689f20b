"""mmengine's Runner: its own subclass of DDP, accumulation, averaged weights."""

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

from tests.wild import harness as wild


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head, self.other = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, images, labels, mode="tensor"):
        y = self.net(images)
        if mode != "loss":
            return self.head(y)
        return {
            "loss_class": nn.functional.cross_entropy(self.head(y), labels),
            "loss_size": (self.other(y).squeeze(1) - labels).square().mean(),
        }


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 10, 10, generator=generator), index % 4


class Watch(Hook):
    priority = "VERY_LOW"

    def before_train(self, runner) -> None:
        wild.watch(runner.model.module)
        wild.line(runner.model, runner.optim_wrapper.optimizer)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        wild.step(outputs["loss"])


def main() -> None:
    wild.begin(group=True)  # its own asks for a GPU
    runner = Runner(
        model=Model(),
        work_dir=str(wild.SCRATCH),
        train_dataloader={
            "dataset": Data(), "batch_size": 8, "num_workers": 0,
            "collate_fn": {"type": "default_collate"},
            "sampler": {"type": "InfiniteSampler", "shuffle": True, "seed": 0},
        },
        train_cfg={"by_epoch": False, "max_iters": wild.STEPS},
        optim_wrapper={
            "type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.02, "momentum": 0.9},
            "accumulative_counts": 2, "clip_grad": {"max_norm": 1.0},
        },
        param_scheduler={"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 10},
        custom_hooks=[Watch(), {"type": "EMAHook", "ema_type": "ExponentialMovingAverage"}],
        default_hooks={"checkpoint": None, "logger": None},
        launcher="pytorch",
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        randomness={"seed": 0},
        log_level="ERROR",
    )  # fmt: skip
    runner.train()
    wild.end()


if __name__ == "__main__":
    main()
