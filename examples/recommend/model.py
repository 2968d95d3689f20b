"""A small click model in the shape of DLRM (Naumov et al., 2019).

Embeddings of all fields, the products of each two of them, and a tower on both.
"""

from __future__ import annotations

import torch
from torch import nn


class ClickModel(nn.Module):
    """`embedding` maps ids int64 [batch, fields] to float32 [batch, fields, dim]."""

    def __init__(self, embedding: nn.Module, fields: int, dim: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1))
        inputs = fields * dim + fields * (fields - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Logits [batch]."""
        rows = self.embedding(keys)
        products = rows @ rows.transpose(1, 2)
        products = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((rows.flatten(1), products), 1)).squeeze(1)
