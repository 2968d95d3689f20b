"""Twenty models that this project did not make, for zoo.py: torchvision's, timm's, transformers'.

Each is a module whose forward takes a batch and gives the loss, with random inputs of the size that
its authors trained on. With `--tiny`, for CPUs, a small model of the same library stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """One model. `make(tiny)` gives the module, `data(tiny, batch)` a batch on the CPU.

    `batch`: samples a rank; `amp`: autocast in bf16; `clip`: the norm to which gradients are
    clipped before each step, as transformers' Trainer does; 0: not at all.
    """

    make: Callable[[bool], nn.Module]
    data: Callable[[bool, int], Batch]
    batch: int
    optimizer: str = "SGD"
    amp: bool = False
    clip: float = 0.0


class Classifier(nn.Module):
    """Images to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[n, 3, size, size] and [n] to a scalar."""
        return cross_entropy(self.model(images), targets)


class Language(nn.Module):
    """A model of transformers' to a loss; where it has an encoder, its input is the text too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """[n, length] to a scalar."""
        loss: torch.Tensor = self.model(input_ids=text, labels=text).loss
        return loss


class Lstm(nn.Module):
    """A language model of two LSTM layers, as torch's own word_language_model example."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """[n, length] to a scalar."""
        out = self.head(self.lstm(self.embed(text[:, :-1]))[0])
        return cross_entropy(out.flatten(0, 1), text[:, 1:].flatten())


def _images(tiny: bool, batch: int) -> Batch:
    side, classes = (64, 10) if tiny else (224, 1000)
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def _text(symbols: int, length: int) -> Callable[[bool, int], Batch]:
    def data(tiny: bool, batch: int) -> Batch:
        return (torch.randint(2, 500 if tiny else symbols, (batch, 32 if tiny else length)),)

    return data


def _vision(name: str, batch: int) -> Entry:
    """One of torchvision's."""

    def make(tiny: bool) -> nn.Module:
        from torchvision.models import get_model

        classes = 10 if tiny else 1000
        return Classifier(get_model("squeezenet1_1" if tiny else name, num_classes=classes))

    return Entry(make, _images, batch)


def _timm(name: str, batch: int) -> Entry:
    """One of timm's."""

    def make(tiny: bool) -> nn.Module:
        import timm

        classes = 10 if tiny else 1000
        return Classifier(timm.create_model("resnet10t" if tiny else name, num_classes=classes))

    return Entry(make, _images, batch)


def _hugging(
    kind: str,
    batch: int,
    length: int,
    symbols: int,
    tiny: dict[str, Any],
    optimizer: str = "AdamW",
    clip: float = 0.0,
    **real: Any,
) -> Entry:
    """`kind`: such as GPT2 with its LMHeadModel, from a configuration; nothing is downloaded."""
    name, _, head = kind.partition(":")

    def make(small: bool) -> nn.Module:
        import transformers

        given = {**real, **tiny, "vocab_size": 512} if small else {**real, "vocab_size": symbols}
        config = getattr(transformers, f"{name}Config")(**given, use_cache=False)
        return Language(getattr(transformers, f"{name}{head}")(config))

    return Entry(make, _text(symbols, length), batch, optimizer, amp=True, clip=clip)


def _lstm(tiny: bool) -> nn.Module:
    return Lstm(500, 64) if tiny else Lstm(33278, 1024)


_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_MLP = {**_TINY, "intermediate_size": 128}

# In the order in which they are measured: those first on which the most has gone wrong.
ZOO: dict[str, Entry] = {
    "densenet121": _vision("densenet121", 64),
    "swin_b": _vision("swin_b", 64),
    "gpt2": _hugging(
        "GPT2:LMHeadModel", 8, 1024, 50257,
        {"n_embd": 64, "n_layer": 2, "n_head": 2}, clip=1.0,
    ),
    "convnext_base": _vision("convnext_base", 64),
    "regnet_y_32gf": _vision("regnet_y_32gf", 64),
    "mobilenet_v3_large": _vision("mobilenet_v3_large", 128),
    "efficientnet_b0": _vision("efficientnet_b0", 128),
    "vit_b_16": _vision("vit_b_16", 64),
    "bert-base": _hugging("Bert:ForMaskedLM", 16, 512, 30522, _TINY_MLP),
    "t5-small": _hugging(
        "T5:ForConditionalGeneration", 16, 512, 32128,
        {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2},
        decoder_start_token_id=0,
    ),
    "mixtral-like": _hugging(
        "Mixtral:ForCausalLM", 8, 512, 32000,
        {**_TINY_MLP, "num_key_value_heads": 2, "num_local_experts": 4},
        hidden_size=512, intermediate_size=1792, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8,
    ),
    "lstm": Entry(_lstm, _text(33278, 128), 64),
    "resnet50": _vision("resnet50", 128),
    "vgg16": _vision("vgg16", 64),
    "mixer_b16": _timm("mixer_b16_224", 64),
    "resnext50": _timm("resnext50_32x4d", 64),
    "deit_small": _timm("deit_small_patch16_224", 128),
    "efficientnetv2_s": _timm("tf_efficientnetv2_s", 64),
    "llama-like": _hugging(
        "Llama:ForCausalLM", 8, 1024, 32000,
        {**_TINY_MLP, "num_key_value_heads": 2}, clip=1.0,
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
    ),
    "shufflenet_v2": _vision("shufflenet_v2_x1_0", 128),
}  # fmt: skip
