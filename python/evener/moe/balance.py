"""Even load: of experts by the router's bias, of ranks by moving experts between them."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evener.base.given import given
from evener.errors import UsageError
from evener.moe.layer import Experts
from evener.moe.parallel import Parallel
from evener.moe.spread import layers, loads

logger = logging.getLogger("evener.moe")
_GAIN = 0.05  # of the most loaded rank's load: for less nothing is moved


@given
@torch.no_grad()
def balance(model: nn.Module, rate: float = 1e-3) -> None:
    """Balance experts without an auxiliary loss: call it after each optimizer step. Collective.

    Moves each router's bias by `rate` towards experts that had less than the mean load since the
    last call (arXiv 2408.15664). For routers with an `e_score_correction_bias`: `score="sigmoid"`
    here, DeepSeek-V3's in transformers. Raises UsageError where there are none.
    """
    found = []
    for name, block in model.named_modules():
        experts, gate = getattr(block, "experts", None), getattr(block, "gate", None)
        bias = getattr(gate, "e_score_correction_bias", None)
        if isinstance(experts, Experts) and isinstance(bias, torch.Tensor):
            found.append((name, experts, bias))
    if not found:
        raise UsageError("no router of this model has a bias",
                         'make it with score="sigmoid", or use the auxiliary loss')  # fmt: skip
    for (_, experts, bias), load in zip(
        found, loads((name, experts) for name, experts, _ in found), strict=True
    ):
        since = load - _seen(experts, "balanced", load)
        bias += rate * (since.mean() - since).sign().to(bias)


def _seen(layer: Experts, who: str, load: torch.Tensor) -> torch.Tensor:
    """The load at the last call, and note this one's."""
    before: torch.Tensor = layer.__dict__.setdefault("_seen", {}).get(who, torch.zeros_like(load))
    layer.__dict__["_seen"][who] = load
    return before


def placement(load: list[float], held: list[int], ranks: int) -> list[int]:
    """The order of experts in which ranks, each with equally many, have the most even load.

    The heaviest expert first to the rank with the least (Graham's rule); experts that stay on their
    rank keep their place. `held`: the order now.
    """
    each = len(load) // ranks
    sums, members = [0.0] * ranks, [set[int]() for _ in range(ranks)]
    now = {expert: at // each for at, expert in enumerate(held)}
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        free = [r for r in range(ranks) if len(members[r]) < each]
        best = min(free, key=lambda r: (sums[r], now[expert] != r, r))
        members[best].add(expert)
        sums[best] += load[expert]
    order = []
    for rank in range(ranks):
        before = held[rank * each :][:each]
        new = sorted(members[rank] - set(before))
        order += [expert if expert in members[rank] else new.pop(0) for expert in before]
    return order


def _most(load: list[float], held: list[int], ranks: int) -> float:
    each = len(load) // ranks
    return max(sum(load[e] for e in held[r * each :][:each]) for r in range(ranks))


@given
@torch.no_grad()
def rebalance(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Move spread experts so that ranks have even loads, and how many moved. Collective.

    Call it between steps, every few hundred: it goes by the load since the last call. States of
    `optimizer` move with their experts. Where the most loaded rank would gain less than 5% nothing
    moves. Outputs do not change, but for the order of sums. Raises UsageError on all ranks, with
    nothing moved, where a gradient is there and not zero, and where a state has no entry for each
    expert.
    """
    found = [(name, layer) for name, layer in layers(model) if layer.parallel is not None]
    if not found:
        raise UsageError("no experts of this model are spread", "call evener.moe.spread first")
    states = [_states(name, layer, optimizer) for name, layer in found]
    _agree(states, found[0][1])
    moved = 0
    for (name, layer), load, (held, _) in zip(found, loads(found), states, strict=True):
        since = (load - _seen(layer, "placed", load)).tolist()
        parallel = layer.parallel
        assert parallel is not None
        old, size = parallel.held.tolist(), parallel.shared.ranks.size
        new = placement(since, old, size)
        before, after = _most(since, old, size), _most(since, new, size)
        if before - after <= _GAIN * before:
            continue
        for tensor in held:
            _move(parallel, old, new, tensor)
        parallel.place(torch.tensor(new))
        count = sum(
            a // (len(old) // size) != new.index(e) // (len(old) // size) for a, e in enumerate(old)
        )
        mean = sum(since) / size
        logger.log(logging.DEBUG if parallel.shared.ranks.rank else logging.INFO,
                   "experts %s: %d moved, the most loaded rank has %.2f of the mean (%.2f before)",
                    name, count, after / mean, before / mean)  # fmt: skip
        moved += count
    return moved


def _states(
    name: str, layer: Experts, optimizer: torch.optim.Optimizer | None
) -> tuple[list[torch.Tensor], str]:
    """What moves with a layer's experts, [experts, ...] each; or why they cannot move."""
    held: list[torch.Tensor] = []
    for what in ("gate_up_proj", "down_proj"):
        matrix = getattr(layer, what)
        if matrix.grad is not None and matrix.grad.any():
            return [], f"{name}.{what} has a gradient, which would stay where its expert was"
        held.append(matrix.data)
        state = {} if optimizer is None else optimizer.state.get(matrix, {})
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.numel() == 1:
                continue
            if value.shape[:1] != matrix.shape[:1]:
                return [], (
                    f"{type(optimizer).__name__}'s {key} of {name}.{what} is "
                    f"{list(value.shape)}: not one entry for each of {len(matrix)} experts"
                )
            held.append(value)
    return held, ""


def _agree(states: list[tuple[list[torch.Tensor], str]], layer: Experts) -> None:
    """Raises UsageError on all ranks where one of them cannot, or has other states."""
    assert layer.parallel is not None
    ranks = layer.parallel.shared.ranks
    mine = [(why, [str(t.dtype) for t in held]) for held, why in states]
    all_of_them: list[Any] = [None] * ranks.size
    dist.all_gather_object(all_of_them, mine, group=ranks.group)
    for rank, theirs in enumerate(all_of_them):
        for why, _ in theirs:
            if why:
                raise UsageError(
                    f"experts cannot move: on rank {rank} {why}",
                    "call rebalance after optimizer.step() and zero_grad(), with an optimizer "
                    "that keeps a row for each expert",
                )
        if theirs != all_of_them[0]:
            raise UsageError(
                f"experts cannot move: rank {rank} has other optimizer states than rank 0",
                "step the optimizer on all ranks before rebalance",
            )


def _move(parallel: Parallel, old: list[int], new: list[int], tensor: torch.Tensor) -> None:
    """`tensor` [experts here, ...] in place, from the old order of experts to the new one."""
    ranks = parallel.shared.ranks
    each = len(old) // ranks.size
    from_, to = ({e: at // each for at, e in enumerate(order)} for order in (old, new))
    mine = old[ranks.rank * each :][:each]
    leave = sorted(mine, key=lambda e: (to[e], e))
    come = sorted(new[ranks.rank * each :][:each], key=lambda e: (from_[e], e))
    sent, got = ([[of[e] for e in each_way].count(r) for r in range(ranks.size)]
                 for of, each_way in ((to, leave), (from_, come)))  # fmt: skip
    device = parallel.shared.lane.device
    rows = tensor.to(device)[torch.tensor([mine.index(e) for e in leave], device=device)]
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous(), got, sent, group=ranks.group)
    slots = [new[ranks.rank * each :][:each].index(e) for e in come]
    whole = torch.empty_like(received)
    whole[torch.tensor(slots, device=device)] = received
    tensor.copy_(whole)


__all__ = ["balance", "placement", "rebalance"]
