"""States in fewer bits in plain torch: torch's own optimizer, whose moments, and weights without an
exact copy, are rounded after each step to what their bits can say. In float64 and by powers of two,
where Evener turns bits. Random bits are Evener's: which they are is part of what is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evener import zero
from evener.zero import units
from evener.zero.states import random_bits, random_key

LEAST = 64
"""In twins, elements from which on moments have one byte: their models are small."""
EXPONENTS = {"exp_avg": 15, "momentum_buffer": 15, "exp_avg_sq": 31}


def rounded(x: torch.Tensor, random: torch.Tensor, exponents: int) -> torch.Tensor:
    """`x` of any shape, up or down by 16 bits of `random`, int64 [n]."""
    flat = x.detach().reshape(-1).double()
    whole = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    mantissa, exponent = torch.frexp(whole.abs().amax(1, keepdim=True))
    top = exponent - 1 + (mantissa > 1.875 / 2).int()
    lowest = top.clamp(min=exponents + 3 - 127) - exponents + 1
    own = torch.maximum(torch.frexp(whole)[1] - 1, lowest)
    step = torch.exp2(own.double() - 3)
    drawn = nn.functional.pad(random & 0xFFFF, (0, -flat.numel() % 256)).view(-1, 256)
    code = (whole.abs() / step + drawn / 65536).floor()
    if exponents == EXPONENTS["exp_avg_sq"]:
        code = torch.where((whole > 0) & (code == 0), 1.0, code)
    found = (code * step * whole.sign()).view(-1)[: flat.numel()]
    return found.view(x.shape).to(x)


def half(x: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """`x` as bfloat16 has it: up or down by 16 bits of `random`, int64 [n]; half away from zero
    without."""
    flat = x.detach().reshape(-1).double()
    step = torch.exp2((torch.frexp(flat)[1] - 8).clamp(min=-133).double())
    drawn = 0.5 if random is None else (random & 0xFFFF) / 65536
    found = (flat.abs() / step + drawn).floor() * step * flat.sign()
    return found.view(x.shape).to(x)


def mixed(random: torch.Tensor) -> torch.Tensor:
    """Random bits, mixed once more: those of a weight without an exact copy, int64 [n]."""
    x = random ^ random >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def coarse(
    optimizer: torch.optim.Optimizer,
    trained: dict[str, nn.Parameter],
    engine: Callable[[], zero.Engine],
    *,
    moments: str = "int8",
    master: bool = True,
) -> None:
    """Let `optimizer` of the plain parameters in `trained` keep moments of one byte (or "bf16", or
    "fp32"), rounded as `engine` does; and without a `master` copy weights of two bytes."""
    names = {parameter: name for name, parameter in trained.items()}

    def after(_optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if parameter.grad is None or not state:
                    continue
                state["count"] = state.get("count", 0) + 1
                random = noise(engine(), names[parameter], state["count"]).to(parameter.device)
                for shift, name in enumerate(n for n in EXPONENTS if n in state):
                    bits = random >> 16 * shift
                    if moments == "int8" and parameter.numel() >= units.LEAST:
                        state[name].copy_(rounded(state[name], bits, EXPONENTS[name]))
                    elif moments == "bf16":
                        state[name].copy_(half(state[name], bits))
                if not master:
                    parameter.data.copy_(half(parameter.data, mixed(random)))

    optimizer.register_step_post_hook(after)


def noise(engine: zero.Engine, name: str, step: int) -> torch.Tensor:
    """A parameter's random bits in its `step`-th step, whichever rank draws them."""
    for chunk in engine.chunks():
        share = chunk.states.weights.numel()
        for piece in chunk.group.pieces:
            if piece.name != name:
                continue
            found = []
            for rank in range(engine.world):
                begin = rank * share
                low = max(piece.offset, begin)
                high = min(piece.offset + piece.numel, begin + share)
                key = random_key(0, step, chunk.index * engine.world + rank)
                cpu = torch.device("cpu")
                found.append(random_bits(max(0, high - low), key, low - begin, cpu))
            return torch.cat(found)
    raise KeyError(name)


FAR = {"rtol": 0.25, "atol": 0.02}
"""What a code of one byte, and what follows from it, may be apart."""


def close(
    mine: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    far: dict[str, float] = FAR,
    **given: Any,
) -> None:
    """As `assert_close`, but one element in 50 may be a code apart (`far`): sums that were rounded
    otherwise let a number fall on the other side."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        apart = ~torch.isclose(mine[name], value, **given)
        if apart.sum() > max(1, value.numel() // 50):
            torch.testing.assert_close(mine[name], value, **given)
        torch.testing.assert_close(mine[name], value, **far, equal_nan=True)
