"""What `evener plan` has to know of a model where it needs no trace of its step: how many weights,
and in which units FSDP2 shards them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmb]?)", re.IGNORECASE)
_LAYERS = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Unit:
    """What one `fully_shard` holds: entries in all, and of them those of norms and biases."""

    numel: int
    small: int


@dataclass(frozen=True)
class Shape:
    """`units`: the root's own first, then the layers; a single one where only the number of weights
    is known. `batch`: samples per GPU and step, `tokens`: of a sample, at most; 0 where nothing
    says it. `here`: the bench has the model, so it can be run."""

    name: str
    units: tuple[Unit, ...]
    batch: int = 0
    tokens: int = 0
    here: bool = False

    @property
    def runs(self) -> int:
        """The batch with which a step can be measured here; 0 where it cannot."""
        return self.batch if self.here else 0

    @property
    def numel(self) -> int:
        """Weights in all."""
        return sum(unit.numel for unit in self.units)

    def per_step(self) -> tuple[float, str]:
        """What a GPU gets through in a step, and in what unit."""
        if self.batch and self.tokens:
            return self.batch * self.tokens, "tokens/s"
        return (self.batch, "samples/s") if self.batch else (1, "steps/s")


def of_profile(path: str) -> tuple[Shape, float]:
    """The shape that `EVENER_PROFILE=path` wrote, and the milliseconds of its step."""
    from evener.comm.profile import StepProfile

    profile = StepProfile.load(Path(path))
    count = sum(bucket.numel for bucket in profile.buckets)
    return Shape(path, (Unit(count, 0),)), profile.compute_ms


def of(name: str, batch: int | None) -> Shape:
    """The shape of a built-in or torchvision's model, of a Llama (7b, 8b, 13b, 70b), of a
    config.json, of LAYERSxWIDTH or LAYERSxWIDTHxWORDS, or of a bare number of weights (`10b`).
    Raises UsageError."""
    from evener.zero.named import NAMES, configuration, model_of
    from evener.zero.shapes import llama

    if name.lower() in NAMES or Path(name).exists():
        config = configuration(name)
        model = model_of(config)
        module = llama(model) if isinstance(model, Mapping) else model
        tokens = config.get("max_position_embeddings")
        return Shape(name, _units(module), batch or 0, tokens if isinstance(tokens, int) else 0)
    if match := _LAYERS.fullmatch(name):
        return Shape(name, _transformer(*(int(found or 0) for found in match.groups())), batch or 0)
    if match := _COUNT.fullmatch(name.strip()):
        count = round(float(match[1]) * _TIMES[match[2].lower()])
        if not count:
            raise UsageError(f"--model {name!r}: no weights", "give a number above 0, as 10b")
        return Shape(name, (Unit(count, 0),), batch or 0)
    import torch

    from evener.tools.bench.train import models

    models.require(name)
    with torch.device("meta"):
        module = models.build(name)
    samples = batch or models.gpu_batch(name)
    return Shape(name, _units(module), samples, models.symbols(name), here=True)


def _transformer(layers: int, width: int, words: int) -> tuple[Unit, ...]:
    """12 width^2 weights a layer, as Llamas and GPTs have them, and tied embeddings."""
    if not layers or not width:
        raise UsageError(
            f"--model {layers}x{width} has no weights", "give LAYERSxWIDTH, as 32x4096"
        )
    layer = Unit(12 * width * width + 2 * width, 2 * width)
    return (Unit(words * width + width, width), *([layer] * layers))


def _units(model: Any) -> tuple[Unit, ...]:
    """The model as one shards it: each block of its largest list of blocks, and the rest."""
    from torch import nn

    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    blocks = [[c for c in found.children() if size(c)] for found in lists]
    # `max` takes the first of equals, which is the outermost.
    layers = max(blocks, key=lambda found: sum(map(size, found)), default=[])
    held = {id(p) for layer in layers for p in layer.parameters()}
    own = [p for p in model.parameters() if id(p) not in held]
    each = [own, *(list(layer.parameters()) for layer in layers)]
    return tuple(
        Unit(sum(p.numel() for p in found), sum(p.numel() for p in found if p.dim() <= 1))
        for found in each
        if found
    )
