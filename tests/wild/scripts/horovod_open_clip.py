"""open_clip's own training program, with --horovod or with its DDP, on its synthetic pictures."""

import json
from pathlib import Path

import open_clip
import torch
import training.data
import training.main
import training.train

from tests.wild import harness as wild

TINY = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 64,
        "patch_size": 8,
        "head_width": 16,
    },
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 32,
        "heads": 2,
        "layers": 2,
    },
}


class Told(torch.utils.data.distributed.DistributedSampler):
    """Its synthetic data set asks torch.distributed for the ranks, which Horovod does not tell."""

    def __init__(self, dataset):
        super().__init__(dataset, num_replicas=2, rank=wild.RANK)


def main() -> None:
    wild.begin()
    configs = wild.SCRATCH / "configs"
    configs.mkdir()
    (Path(configs) / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    open_clip.add_model_config(configs)

    training.data.DistributedSampler = Told
    # Its DDP names a device, and torch takes none for a CPU.
    whole = torch.nn.parallel.DistributedDataParallel

    def of_cpus(model, device_ids=None, **given):
        del device_ids
        return whole(model, **given)

    torch.nn.parallel.DistributedDataParallel = of_cpus
    make, backward = training.main.create_model_and_transforms, training.train.backward

    def made(*args, **kwargs):
        found = make(*args, **kwargs)
        wild.watch(found[0])
        return found

    def back(loss, scaler):
        backward(loss, scaler)
        wild.step(loss)

    training.main.create_model_and_transforms, training.train.backward = made, back
    batch = 4
    arguments = [
        *("--dataset-type", "synthetic", "--train-num-samples", str(2 * batch * wild.STEPS)),
        *("--batch-size", str(batch), "--workers", "0", "--model", "tiny", "--epochs", "1"),
        *("--warmup", "5", "--lr", "1e-3", "--precision", "fp32", "--save-frequency", "0"),
        *("--logs", str(wild.SCRATCH / "logs"), "--name", "run", "--grad-clip-norm", "1.0"),
    ]
    training.main.main([*arguments, *(["--horovod"] if wild.HOROVOD else ["--dist-backend=gloo"])])
    wild.end()


if __name__ == "__main__":
    main()
