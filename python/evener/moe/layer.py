"""The layer: a router, experts, and an expert that all tokens take.

`Experts` is called as transformers calls its own (tokens, choices, weights), under the same names
of parameters, so it stands in a block of transformers as well (`convert`).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from evener.base.given import given
from evener.errors import UsageError
from evener.moe import core, permute
from evener.moe.gate import Activation
from evener.moe.parallel import Parallel
from evener.moe.positions import Positions
from evener.moe.router import Router, Score, load_balancing_loss
from evener.moe.turns import part


def check_capacity(capacity: float | None) -> None:
    """Raises UsageError for one that cannot be."""
    if capacity is not None and not 0 < capacity < math.inf:
        raise UsageError(f"capacity={capacity}", "give a factor above 0, or None")


class Experts(nn.Module):
    """`experts` gated feed-forward networks: down(act(gate x) * up x), as stacked matrices.

    gate_up_proj [experts, 2 inner, width]: gate above up. down_proj [experts, width, inner].
    capacity: the most tokens that an expert takes of a batch, as a factor of an even share; None
    drops nothing.
    """

    @given
    def __init__(
        self, width: int, inner: int, experts: int, activation: Activation = functional.silu,
        capacity: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if min(width, inner, experts) < 1:
            raise UsageError(f"width={width}, inner={inner}, experts={experts}", "give 1 or more")
        check_capacity(capacity)
        self.num_experts, self.capacity = experts, capacity
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        for matrix in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(
                matrix, -1 / math.sqrt(matrix.shape[2]), 1 / math.sqrt(matrix.shape[2])
            )
        # How many entries each expert was given in training since it was last looked at.
        # No buffer: DistributedDataParallel would make it rank 0's.
        self.load = torch.zeros(experts, dtype=torch.float32, device="cpu")
        self.dropped: torch.Tensor | None = None
        # Where the experts are spread over ranks (`spread`).
        self.parallel: Parallel | None = None

    def extra_repr(self) -> str:
        held, twice, width = self.gate_up_proj.shape
        where = "" if held == self.num_experts else f", {held} of them here"
        return f"{self.num_experts} x {width} x {twice // 2}{where}"

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x [tokens, width], experts and weights [tokens, k] > [tokens, width].

        A choice that is negative or `num_experts` is no choice.
        """
        if x.dim() != 2 or experts.shape != weights.shape or len(experts) != len(x):
            raise UsageError(
                f"tokens {list(x.shape)}, choices {list(experts.shape)}, weights "
                f"{list(weights.shape)}",
                "give [tokens, width] and twice [tokens, k]",
            )
        experts = experts.detach()
        experts = torch.where(experts < self.num_experts, experts, -1)
        limit = None
        if self.capacity is not None:
            share = experts.numel() / self.num_experts
            limit = max(1, math.ceil(share * self.capacity))
        self.load = self.load.to(x.device)
        if self.parallel is not None:
            return self.parallel(self, x, experts, weights, limit)
        at = permute.positions(experts, self.num_experts, limit)
        self.note(at, experts if limit is not None else None)
        return core.local(x, weights, at, self.gate_up_proj, self.down_proj, self.activation)

    @torch.no_grad()
    def note(self, at: Positions, experts: torch.Tensor | None = None) -> None:
        """Count the load of a batch; `experts`: the choices, where some may have been dropped."""
        if experts is not None:
            self.dropped = (experts >= 0).sum() - at.ends[-1]
        if self.training:
            ends = at.ends.to(self.load.dtype)
            self.load += torch.diff(ends, prepend=ends.new_zeros(1))


class SharedExpert(nn.Module):
    """The expert that every token takes: down(act(gate x) * up x)."""

    @given
    def __init__(self, width: int, inner: int, activation: Activation = functional.silu) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class MoE(nn.Module):
    """A mixture of experts instead of a feed-forward network: [..., width] > [..., width].

    shared: the inner width of an expert that all tokens take; 0: none. score, normalize, scale,
    groups, top_groups: see `Router`. capacity: see `Experts`. After a forward pass in training
    `aux_loss` holds the auxiliary loss of that batch; add a part of it (0.01) to the loss, or
    balance without it (`evener.moe.balance`).
    """

    @given
    def __init__(
        self, width: int, inner: int, experts: int, top_k: int, *, shared: int = 0,
        score: Score = "softmax", normalize: bool = True, scale: float = 1.0, groups: int = 1,
        top_groups: int = 1, capacity: float | None = None,
        activation: Activation = functional.silu,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate = Router(width, experts, top_k, score, normalize, scale, groups, top_groups)
        self.experts = Experts(width, inner, experts, activation, capacity)
        self.shared_experts = SharedExpert(width, shared, activation) if shared else None
        self.aux_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits, weights, experts = self.gate(flat)
        self._note_loss(logits, experts)
        parallel = self.experts.parallel
        if self.shared_experts is not None and parallel is not None:
            # Its work fills the time in which tokens travel.
            parallel.meanwhile(self.shared_experts, flat)
        out: torch.Tensor = self.experts(flat, experts, weights)
        if self.shared_experts is not None:
            out = out + (
                self.shared_experts(flat) if parallel is None else parallel.done_meanwhile()
            )
        return out.view(x.shape)

    def _note_loss(self, logits: torch.Tensor, experts: torch.Tensor) -> None:
        if not self.training:
            self.aux_loss = None
            return
        loss = load_balancing_loss(logits, experts, self.gate.score)
        mine = part()
        if mine is not None:
            # The mean of the parts', as with accumulated gradients.
            loss = loss * mine.share
            if mine.index and self.aux_loss is not None:
                loss = loss + self.aux_loss
        self.aux_loss = loss
