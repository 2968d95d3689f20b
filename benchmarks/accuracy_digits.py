"""What each form costs in accuracy: a small CNN on scikit-learn's digits, on a CPU.

    python benchmarks/accuracy_digits.py [--seeds 5] [--epochs 25] [--only sgd:topk,adamw:int8] \
        [--ranks 2] [--guard-steps 0] [--json FILE]

Ranks that pretend to be a node each train the same model from the same start on the same batches,
once for every form, optimizer and seed. Reported: accuracy on 360 held-out pictures, and the paired
difference to exact with its 95% interval (Student's t over the seeds). Digits ship with
scikit-learn: 1,797 pictures of 8 x 8, nothing to download.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.comm import wires
from evener.ddp import accelerate

TEST = 360
# Of all ranks together, so that steps and what they average are as many with more of them.
BATCH = 64
# The model is small: without this everything would be sent exactly. And rank r is on node r.
ENVIRONMENT = {"LIGHT_TOPK_THRESHOLD": "0", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Variant:
    """One way to train. `momentum`: of the SGD, applied by the reducer where `corrected`."""

    name: str
    optimizer: str
    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    corrected: bool = False


def _variants() -> list[Variant]:
    found = []
    for optimizer in ("sgd", "adamw"):
        for mode in wires.names():
            found.append(Variant(mode, optimizer, mode))
        found.append(Variant("topk-0.1%", optimizer, "topk", {"ratio": 0.001}))
        found.append(Variant("topk-warm", optimizer, "topk", {"warmup_steps": 110}))
        if optimizer == "sgd":
            found.append(Variant("topk-corrected", optimizer, "topk", {"momentum": 0.9}, True))
            warm = {"momentum": 0.9, "warmup_steps": 110}
            found.append(Variant("topk-corrected-warm", optimizer, "topk", warm, True))
            deep = {"momentum": 0.9, "warmup_steps": 110, "ratio": 0.001}
            found.append(Variant("topk-0.1%-corrected-warm", optimizer, "topk", deep, True))
    return found


VARIANTS = _variants()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures, float32 [1797, 1, 8, 8] in 0..1, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def cnn() -> nn.Module:
    """38,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _optimizer(variant: Variant, model: nn.Module) -> torch.optim.Optimizer:
    if variant.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=2e-3)
    momentum = 0.0 if variant.corrected else 0.9
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)


def train(rank: int, size: int, variant: Variant, seed: int, epochs: int) -> dict[str, float]:
    """One training; the figures are the same on all ranks."""
    images, labels = data()
    split = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, rest = split[:TEST], split[TEST:]
    torch.manual_seed(seed)
    model = accelerate(DistributedDataParallel(cnn()), wire=variant.mode, **variant.options)
    optimizer = _optimizer(variant, model)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = rest[torch.randperm(len(rest), generator=generator)]
        share = BATCH // size
        for start in range(0, len(order) - BATCH + 1, BATCH):
            mine = order[start + rank * share : start + (rank + 1) * share]
            optimizer.zero_grad()
            cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        right = (model.module(images[test]).argmax(1) == labels[test]).float().mean().item()
        loss = cross_entropy(model.module(images[rest]), labels[rest]).item()
    model.evener.close()
    return {"seed": seed, "accuracy": 100 * right, "train_loss": loss}


def be_a_rank(given: argparse.Namespace, chosen: list[Variant]) -> None:
    """Train all variants; rank 0 says what came of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for variant in chosen:
        for seed in range(given.seeds):
            began = time.perf_counter()
            figures = train(rank, ranks, variant, seed, given.epochs)
            seconds = time.perf_counter() - began
            if rank == 0:
                harness.say(of=[variant.optimizer, variant.name], seconds=seconds, **figures)
    dist.destroy_process_group()


def table(
    chosen: Sequence[Variant], results: Mapping[tuple[str, str], list[dict[str, float]]]
) -> list[dict[str, Any]]:
    """A row for each variant that has been trained with every seed with which exact was."""
    rows = []
    for variant in chosen:
        runs = results.get((variant.optimizer, variant.name), [])
        exact = results.get((variant.optimizer, "exact"), [])
        if runs and len(runs) == len(exact):
            by_seed = ({run["seed"]: run["accuracy"] for run in each} for each in (runs, exact))
            rows.append({**asdict(variant), **harness.paired(*by_seed), "runs": runs})
    return rows


def main() -> None:
    """Run the variants, print the table, write the JSON."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--only", default="", help="optimizer:variant, comma-separated")
    parser.add_argument(
        "--guard-steps", type=int, default=0,
        help="check forms every so many steps; past a limit a milder one takes over (0: never)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asked = {name for name in given.only.split(",") if name}
    chosen = [v for v in VARIANTS if not asked or f"{v.optimizer}:{v.name}" in asked]
    optimizers = {v.optimizer for v in chosen}
    chosen = [
        v for v in VARIANTS if v in chosen or (v.mode == "exact" and v.optimizer in optimizers)
    ]
    if given.rank:
        be_a_rank(given, chosen)
        return
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    setup = {"ranks": given.ranks, "batch": BATCH // given.ranks, "test": TEST}

    def heard(said: dict[str, Any]) -> None:
        optimizer, name = said.pop("of")
        results.setdefault((optimizer, name), []).append(said)
        # What is measured stays, whatever happens.
        harness.keep(given, setup=setup, rows=table(chosen, results))
        print(
            f"{optimizer:6} {name:26} seed {said['seed']}: {said['accuracy']:6.2f}%  "
            f"{said['seconds']:5.1f} s",
            flush=True,
        )

    env = {**ENVIRONMENT, "EVENER_GUARD_STEPS": str(given.guard_steps), "EVENER_LOG": "warning"}
    words = harness.arguments_of(given, "seeds", "epochs", "only")
    job = harness.ranks(*words, "--rank", count=given.ranks, limit=7200, env=env, heard=heard)
    if job.failed:
        raise SystemExit(job.failed)
    keys = ("optimizer", "name", "mean", "spread", "difference", "interval")
    heads = ["", "form", "accuracy, %", "seeds' spread", "against exact", "95% interval +-"]
    print(
        "\n" + harness.show(heads, ([row.get(k) for k in keys] for row in table(chosen, results)))
    )


if __name__ == "__main__":
    main()
