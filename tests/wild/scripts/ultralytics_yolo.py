"""ultralytics' own detection trainer on two CPU ranks.

Its DDP is for GPUs only, so the places that name a device are replaced: how the group is made,
what number of ranks it has, DDP's device_ids, and the evaluation after the last epoch.
"""

import os

import torch
import torch.distributed as dist

os.environ["YOLO_CONFIG_DIR"] = os.environ["WILD_OUT"]
os.environ["YOLO_OFFLINE"] = "true"

from PIL import Image
from torch.nn import parallel
from ultralytics.models.yolo.detect import DetectionTrainer

from tests.wild import harness as wild

INNER = parallel.DistributedDataParallel


def on_cpu(model: torch.nn.Module, **given: object) -> INNER:
    given.pop("device_ids", None)
    return INNER(model, **given)


def images() -> str:
    """A data set of 100 small pictures with a box each, in this rank's folder."""
    for part in ("images", "labels"):
        (wild.SCRATCH / part).mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    for i in range(100):
        pixels = torch.randint(255, (64, 64, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(wild.SCRATCH / "images" / f"{i:03}.png")
        box = f"{i % 2} {0.3 + 0.004 * i:.3f} 0.5 0.4 0.3\n"
        (wild.SCRATCH / "labels" / f"{i:03}.txt").write_text(box)
    named = wild.SCRATCH / "data.yaml"
    named.write_text(f"path: {wild.SCRATCH}\ntrain: images\nval: images\nnames: [a, b]\n")
    return str(named)


class Trainer(DetectionTrainer):
    def _setup_ddp(self) -> None:
        self.device = torch.device("cpu")
        dist.init_process_group("gloo")

    def _setup_train(self) -> None:
        self.world_size = 2
        super()._setup_train()
        wild.watch(self.model.module)
        wild.line(self.model, self.optimizer)

    def final_eval(self) -> None:
        """It asks CUDA for a device, where there are ranks."""


def follow(trainer: Trainer) -> None:
    wild.step(trainer.loss)
    if len(wild._losses) == wild.STEPS:
        trainer.stop = True


def main() -> None:
    wild.begin()
    parallel.DistributedDataParallel = on_cpu
    trainer = Trainer(
        overrides={
            "model": "yolo11n.yaml",
            "data": images(),
            "device": "cpu",
            "epochs": max(wild.STEPS // 10, 1),
            "batch": 10,
            "nbs": 10,
            "imgsz": 64,
            "workers": 0,
            "optimizer": "SGD",
            "project": str(wild.OUT),
            "name": f"run{wild.RANK}",
            "amp": False,
            "val": False,
            "plots": False,
            "save": False,
            "deterministic": True,
            "warmup_epochs": 1,
        }
    )
    trainer.world_size = 2
    trainer.ddp = False
    trainer.add_callback("on_train_batch_end", follow)
    trainer._do_train()
    wild.end()


if __name__ == "__main__":
    main()
