"""A tensor that crosses a cut keeps its order in memory: views after the cut need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from evener import pipeline
from evener.pipeline.split import Draw, Split
from tests.pipeline import models


class Turned(nn.Module):
    """Between its two matrices the tensor is [tokens, rows, width] in the memory of rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(30, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.first(x).transpose(0, 1).relu()
        return self.second(turned.transpose(0, 1).view(x.shape[0], 30))


def cut_everywhere(model: nn.Module, x: torch.Tensor, target: torch.Tensor, loss: Any) -> int:
    captured = pipeline.capture(model, x, target=target, loss=loss)
    want = loss(model(x), target)
    places = [k for k in range(1, len(captured.ops)) if not captured.glued[k]]
    for place in places:
        split = Split(captured, [place])
        first, second = (split.module(s, torch.device("cpu"), Draw()) for s in (0, 1))
        leaves = captured.flatten(pipeline.Example.of(x, target))
        given = dict(zip(split.input_names, leaves, strict=True))
        sent = first(**{name: given[name] for name in first.needs})
        assert all(t.is_contiguous() for t in sent)
        came = [
            split.laid(edge, t, len(x)) for edge, t in zip(split.edge(place), sent, strict=True)
        ]
        (found,) = second(*came, **{name: given[name] for name in second.needs})
        assert torch.equal(found, want), captured.ops[place]
    return len(places)


def test_views_after_a_cut() -> None:
    torch.manual_seed(0)
    assert cut_everywhere(Turned(), torch.randn(3, 5, 6), torch.randn(3, 4), mse_loss) >= 3


def test_attention_of_torch_with_tokens_first() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 3))
    x = torch.randn(4, 6, 16)
    assert cut_everywhere(model, x, torch.zeros(4, 6, dtype=torch.long), models.cross_entropy) > 10
