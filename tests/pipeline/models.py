"""Small models in the shapes that are hard to cut: tied weights, an encoder whose output is used
until the end, residuals around in-place activations and batch norm, dropout, routing by values."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from evener import pipeline

VOCABULARY, WIDTH, LENGTH = 61, 16, 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH) if cross else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 2, 3 * WIDTH // 2).chunk(3, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        a = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(rows, length, WIDTH)))
        if self.cross is not None and memory is not None:
            x = x + self.cross(memory).mean(1, keepdim=True)
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """`tied`: the head is the embedding. `loss`: labels are given, and the loss is returned."""

    def __init__(self, layers: int = 4, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                "logits": logits}  # fmt: skip


class EncoderDecoder(nn.Module):
    """The encoder's output goes into every block of the decoder."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(layers))
        self.decoder = nn.ModuleList(Block(cross=True) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(answer)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """In-place additions and activations, running statistics."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(blocks)))
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to one of four experts, by values: integers that depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        weight, index = self.gate(x).softmax(-1).topk(1, -1)
        weight.div_(weight.sum(-1, keepdim=True) + 1.0)
        x = x + weight * torch.einsum("btd,btde->bte", x, self.experts[index.squeeze(-1)])
        return self.head(x)


def tokens(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


class _TraceOnce:
    """What is planned and built under this traces each model, with each shape and loss, once: that
    takes most of a case's time, and nothing after it writes to what was traced.

    It holds the models, so that no other gets the identity of one that is gone.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        # By their full names: `pipeline.plan` is a function.
        modules = map(importlib.import_module, ("evener.pipeline.api", "evener.pipeline.plan"))
        self._patches = [mock.patch.object(module, "capture", self) for module in modules]

    def __call__(
        self, model: nn.Module, example: Any, *, target: Any = None, loss: Any = None
    ) -> Any:
        call = pipeline.Example.of(example, target)
        shapes = [(t.shape, t.dtype, t.device) for t in call.tensors()]
        key = id(model), str(shapes), tuple(call.kwargs), loss
        if key not in self._known:
            self._known[key] = model, pipeline.capture(model, call, loss=loss)
        return self._known[key][1]

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


trace_once = _TraceOnce()
