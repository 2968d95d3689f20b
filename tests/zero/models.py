"""Small models, and the plain loop that the engine must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evener.base import optimizers as _optimizers

VOCABULARY = 50


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, width: int = 32, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Predict the input: enough to train on."""
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def batches(count: int, seed: int = 1, rows: int = 4) -> list[torch.Tensor]:
    """Tokens [rows, 16]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (rows, 16), generator=generator) for _ in range(count)]


class Plain:
    """AdamW on float32 masters in separate torch operations; `dtype` is the model's."""

    def __init__(
        self, model: nn.Module, lr: float, decay: float, clip: float, dtype: torch.dtype
    ) -> None:
        self.model, self.lr, self.decay, self.clip = model, lr, decay, clip
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.trained]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        model.to(dtype)
        with torch.no_grad():
            for p, w in zip(self.trained, self.masters, strict=True):
                p.copy_(self.rounded(w, dtype))
        self.count = 0
        self.norm = 0.0

    @staticmethod
    def rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """To bfloat16 as a split master rounds: halves away from zero. torch takes them to even,
        which is another bit in one weight of 65,536."""
        return _optimizers.split(weights)[0] if dtype == torch.bfloat16 else weights

    @torch.no_grad()
    def step(self) -> None:
        """Clip as `torch.nn.utils.clip_grad_norm_`, update, round to the model's dtype."""
        self.count += 1
        grads = [p.grad for p in self.trained]
        assert all(g is not None for g in grads)
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)  # type: ignore[arg-type]
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        self.norm = norm.item()
        scale = 1.0
        if self.clip:
            scale = (self.clip / (norm + 1e-6)).clamp(max=1.0).item()
        b1, b2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        root = torch.tensor(1 / b2**0.5, dtype=torch.float64).float()
        for p, w, (m, v) in zip(self.trained, self.masters, self.moments, strict=True):
            assert p.grad is not None
            g = p.grad.float() * scale
            p.grad = None
            w.mul_(1 - self.lr * self.decay)
            m.mul_(0.9).add_(g * (1 - 0.9))
            v.mul_(0.999).add_((g * g) * (1 - 0.999))
            w.sub_((m / (v.double().sqrt().float() * root + 1e-8)) * (self.lr / b1))
            p.copy_(self.rounded(w, p.dtype))
