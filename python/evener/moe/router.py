"""Which experts take a token, and with what weight.

`softmax`: as Mixtral and Qwen3-MoE: probabilities over all experts, the largest k. `sigmoid`: as
DeepSeek-V3 (arXiv 2412.19437): each expert's own score; experts are in groups, each group is worth
its two best, only the best groups are looked at, and a bias that balances the load takes part in
the choice but not in the weight (arXiv 2408.15664).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from evener.base.given import given
from evener.errors import UsageError

Score = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """logits [tokens, experts]; weights, float32 [tokens, k]; experts, int64 [tokens, k]."""

    logits: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor


class Router(nn.Module):
    """Scores tokens [..., width] and chooses `top_k` of `experts`.

    normalize: the weights of a token add up to `scale`. groups, top_groups: only experts of the
    `top_groups` best groups can be chosen. Logits and scores are in float32 (float64 for float64).
    """

    e_score_correction_bias: torch.Tensor | None

    @given
    def __init__(
        self, width: int, experts: int, top_k: int, score: Score = "softmax",
        normalize: bool = True, scale: float = 1.0, groups: int = 1, top_groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= top_k <= experts:
            raise UsageError(f"top_k={top_k} of {experts} experts", "choose 1 to all of them")
        if groups < 1 or experts % groups:
            raise UsageError(f"groups={groups} does not divide {experts} experts",
                             "choose a divisor")  # fmt: skip
        if not 1 <= top_groups <= groups or top_k > experts // groups * top_groups:
            raise UsageError(
                f"top_groups={top_groups} of {groups} groups of {experts // groups} experts cannot "
                f"give {top_k}", "raise top_groups or lower top_k",
            )  # fmt: skip
        self.top_k, self.num_experts, self.score = top_k, experts, score
        self.normalize, self.scale = normalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=1 / math.sqrt(width))
        bias = torch.zeros(experts, dtype=torch.float32) if score == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, top {self.top_k}, {self.score}"

    def forward(self, x: torch.Tensor) -> Routing:
        x = x.reshape(-1, x.shape[-1])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = functional.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(logits, weights * self.scale, experts)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.top_groups < self.groups:
            grouped = scores.view(len(scores), self.groups, self.num_experts // self.groups)
            worth = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            best = worth.topk(self.top_groups, -1, sorted=False).indices
            out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(out.unsqueeze(-1), -math.inf).flatten(1)
        return scores.topk(self.top_k, -1).indices


def load_balancing_loss(
    logits: torch.Tensor, experts: torch.Tensor, score: Score = "softmax"
) -> torch.Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961): 1 per choice where even.

    experts x sum over experts of (share of the tokens that chose it) x (its mean probability); with
    several choices a token counts in each, as in transformers' load_balancing_loss_func. logits
    [tokens, experts], experts int64 [tokens, k].
    """
    count = logits.shape[-1]
    if score == "softmax":
        chance = logits.float().softmax(-1)
    else:
        chance = logits.float().sigmoid()
        chance = chance / (chance.sum(-1, keepdim=True) + 1e-20)
    chosen = torch.zeros(count, device=logits.device)
    chosen.index_add_(0, experts.reshape(-1), torch.ones(experts.numel(), device=logits.device))
    # Without a token it is 0, not the mean of nothing.
    tokens = max(1, len(experts))
    return count * (chosen / tokens * (chance.sum(0) / tokens)).sum()
