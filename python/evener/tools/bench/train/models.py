"""The models: small built-ins for CPUs, GPT-2 small and BERT-base, any classifier of torchvision.

The small classifiers are made so that two CPU cores and a slow link stand to each other as a GPU
and a 25 Gb/s card do: many parameters for little arithmetic.

A model trains on images or on text; `sample` says what one sample is, `data` makes a batch of them,
and `criterion` the loss between the model's output and the targets.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from evener.tools.bench.train.transformers import Shape


@dataclass(frozen=True)
class BuiltIn:
    """A small classifier: three-channel images of `size` pixels a side, ten classes."""

    name: str
    what: str
    size: int
    parameters: int


@dataclass(frozen=True)
class TextModel:
    """A transformer: `kind` "gpt" guesses every next symbol, "bert" the masked 15%.

    `context`: symbols of a sample. `batch`: samples a rank and step on a GPU, where none is said.
    """

    name: str
    what: str
    kind: str
    layers: int
    heads: int
    width: int
    symbols: int
    context: int
    batch: int
    parameters: int

    @property
    def shape(self) -> Shape:
        """For transformers.py; imports torch."""
        from evener.tools.bench.train.transformers import Shape

        return Shape(self.layers, self.heads, self.width, self.symbols, self.context)


TEXT = {
    model.name: model
    for model in (
        TextModel(
            "gpt-tiny", "GPT-2's shape in small, for tests", "gpt",
            2, 2, 32, 96, 64, 16, 30592,
        ),
        TextModel(
            "bert-tiny", "BERT's shape in small, for tests", "bert",
            2, 2, 32, 96, 64, 16, 31872,
        ),
        TextModel(
            "gpt2", "GPT-2 small: sequences of 1,024, batch 8", "gpt",
            12, 12, 768, 50257, 1024, 8, 124_439_808,
        ),
        TextModel(
            "bert-base", "BERT-base, masked words: sequences of 512, batch 16", "bert",
            12, 12, 768, 30522, 512, 16, 109_514_298,
        ),
    )
}  # fmt: skip
MASKED = 0.15

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


# Names of torchvision's models; for completion, and known without importing it.
USUAL = ("resnet50", "vgg16", "vgg16_bn", "vit_b_16", "efficientnet_b0", "convnext_base")


def is_built_in(name: str) -> bool:
    """Whether `name` needs no torchvision."""
    return name in BUILT_IN or name in TEXT


def sample(name: str) -> str:
    """What one sample of the model's data is: "image" or "sequence"."""
    return "sequence" if name in TEXT else "image"


def symbols(name: str) -> int:
    """Symbols (tokens) of one sample; 0 for images."""
    return TEXT[name].context if name in TEXT else 0


def gpu_batch(name: str) -> int:
    """Samples a rank and step on a GPU, where none is said."""
    return TEXT[name].batch if name in TEXT else 128


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
    if is_built_in(name):
        return
    if name in USUAL and importlib.util.find_spec("torchvision") is not None:
        return  # importing torchvision takes seconds, and whoever trains does it anyway
    try:
        import torchvision.models
    except ImportError as error:
        raise UsageError(
            f"model {name!r} would come from torchvision, which cannot be imported: {error}",
            f"pip install torchvision, or choose a built-in: {', '.join([*BUILT_IN, *TEXT])}",
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
    if name in TEXT:
        from evener.tools.bench.train import transformers

        made = transformers.GPT if TEXT[name].kind == "gpt" else transformers.Bert
        return made(TEXT[name].shape)
    require(name)
    import torchvision.models

    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    from torch import nn

    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


def data(
    name: str, batch: int, device: torch.device | str, size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets from torch's generator.

    Images: float32 [batch, 3, size, size] and int64 [batch]; `size` 0: what the model is for. Text:
    int64 [batch, context] twice, the target -100 where nothing is to be guessed.
    """
    import torch

    if name not in TEXT:
        size = size or image_size(name)
        images = torch.randn(batch, 3, size, size, device=device)
        return images, torch.randint(classes(name), (batch,), device=device)
    model = TEXT[name]
    text = torch.randint(model.symbols, (batch, model.context + 1), device=device)
    if model.kind == "gpt":
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    text = text[:, 1:]
    masked = torch.rand(text.shape, device=device) < MASKED
    masked[:, 0] = True  # at least one is to be guessed
    mask = 0  # the symbol that stands for what is to be guessed
    return torch.where(masked, mask, text), torch.where(masked, text, -100)


def criterion(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over classes, or over the symbols that are to be guessed."""
    from torch.nn.functional import cross_entropy

    # Inception and GoogLeNet answer with a named tuple in training.
    logits: torch.Tensor = getattr(output, "logits", output)
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def torchvision_listing() -> list[tuple[str, int]]:
    """(name, parameters; 0 where torchvision does not say) of its classifiers."""
    import torchvision.models

    rows = []
    for name in torchvision.models.list_models(module=torchvision.models):
        weights = list(torchvision.models.get_model_weights(name))
        rows.append((name, weights[0].meta.get("num_params", 0) if weights else 0))
    return rows
