"""GPT-2's and BERT's architectures in plain torch, in any size: what text models ask of a network.

Unlike images, most of their gradients come from a few large matrices: the embedding of the symbols,
which is the output's weight too, is a third of GPT-2 small and a fifth of BERT-base, and its
gradient is complete only when backward is at its end.

Sources of the shapes: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019);
Devlin et al., "BERT" (2018), with its masked-word head and without the next-sentence one. Without
dropout: what is measured is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Shape:
    """`symbols`: of the vocabulary. `context`: the longest sequence."""

    layers: int
    heads: int
    width: int
    symbols: int
    context: int


class Block(nn.Module):
    """Attention, then two linear layers. `pre_norm`: norms before each (GPT), else after (BERT)."""

    def __init__(self, shape: Shape, *, causal: bool, pre_norm: bool) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.causal, self.pre_norm = shape.heads, causal, pre_norm
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        if self.pre_norm:
            x = x + self._attend(self.norm(x))
            x = x + self.mlp(self.norm2(x))
        else:
            x = self.norm(x + self._attend(x))
            x = self.norm2(x + self.mlp(x))
        return x

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class GPT(nn.Module):
    """Learned positions, causal attention, the embedding's weight as the output's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed = nn.Embedding(shape.symbols, width)
        self.place = nn.Embedding(shape.context, width)
        self.blocks = nn.Sequential(
            *(Block(shape, causal=True, pre_norm=True) for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, shape.symbols, bias=False)
        self.output.weight = self.embed.weight
        _start(self)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """int64 [batch, time] to logits [batch, time, symbols]."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.blocks(self.embed(symbols) + self.place(places))
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


class Bert(nn.Module):
    """Attention in both directions and the head that guesses masked symbols, at every place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed = nn.Embedding(shape.symbols, width)
        self.place = nn.Embedding(shape.context, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(
            *(Block(shape, causal=False, pre_norm=False) for _ in range(shape.layers))
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.output = nn.Linear(width, shape.symbols)
        self.output.weight = self.embed.weight
        _start(self)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """int64 [batch, time], all of the first segment, to logits [batch, time, symbols]."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.embed(symbols) + self.place(places) + self.segment(torch.zeros_like(symbols))
        logits: torch.Tensor = self.output(self.head(self.blocks(self.norm(x))))
        return logits


def _start(model: nn.Module) -> None:
    """Both papers' initial weights: normal, 0.02; biases 0 and norms 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
