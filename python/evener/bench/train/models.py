"""The models: small built-ins for CPUs, any classifier of torchvision for GPUs.

The built-ins are made so that two CPU cores and a slow link stand to each other as a GPU and a
25 Gb/s card do: many parameters for little arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class BuiltIn:
    """A small classifier: three-channel images of `size` pixels a side, ten classes."""

    name: str
    what: str
    size: int
    parameters: int


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn("mlp-tiny", "two small linear layers, for tests", 8, 6506),
        BuiltIn("mlp-wide", "three wide linear layers: nearly all network", 16, 4_730_122),
        BuiltIn(
            "cnn-small", "four convolutions, one linear layer: nearly all arithmetic", 32, 63_082
        ),
        BuiltIn(
            "vgg-tiny", "VGG16's shape in small: convolutions, then wide layers", 32, 1_603_114
        ),
    )
}

TORCHVISION_SIZE = 224
TORCHVISION_CLASSES = 1000


def is_built_in(name: str) -> bool:
    """Whether `name` needs no torchvision."""
    return name in BUILT_IN


def image_size(name: str) -> int:
    """Pixels a side that the model was made for."""
    if name in BUILT_IN:
        return BUILT_IN[name].size
    return 299 if name == "inception_v3" else TORCHVISION_SIZE


def classes(name: str) -> int:
    """Number of classes that the model tells apart."""
    return 10 if name in BUILT_IN else TORCHVISION_CLASSES


def require(name: str) -> None:
    """Raise UsageError unless there is such a model. Built-ins are known without torchvision."""
    if name in BUILT_IN:
        return
    try:
        import torchvision.models
    except ImportError as error:
        raise UsageError(
            f"model {name!r} would come from torchvision, which cannot be imported: {error}",
            f"pip install torchvision, or choose a built-in: {', '.join(BUILT_IN)}",
        ) from error
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(
            f"there is no model {name!r}", "`evener bench train --list-models` names them all"
        )


def build(name: str) -> nn.Module:
    """The model with fresh weights from torch's generator. Raises UsageError for unknown names."""
    from torch import nn

    if name == "mlp-tiny":
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    if name == "mlp-wide":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(768, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 768),
            nn.ReLU(),
            nn.Linear(768, 10),
        )
    if name == "cnn-small":
        return nn.Sequential(
            *_convolution(3, 16), *_convolution(16, 32),
            *_convolution(32, 64), *_convolution(64, 64),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
    if name == "vgg-tiny":
        return nn.Sequential(
            *_convolution(3, 16), *_convolution(16, 32), *_convolution(32, 64),
            nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 10),
        )  # fmt: skip
    require(name)
    import torchvision.models

    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    from torch import nn

    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


def torchvision_listing() -> list[tuple[str, int]]:
    """(name, parameters; 0 where torchvision does not say) of its classifiers."""
    import torchvision.models

    rows = []
    for name in torchvision.models.list_models(module=torchvision.models):
        weights = list(torchvision.models.get_model_weights(name))
        rows.append((name, weights[0].meta.get("num_params", 0) if weights else 0))
    return rows
