"""What a loss asks of logits, computed over parts of the vocabulary: logits are never whole.

A loss wants little of each row: the log of the sum of exponentials (`norms`), some words (`picked`)
and the sum of all words (`totals`). Cross-entropy, label smoothing, a z-loss, log-probabilities of
chosen words, as DPO has them: all are made of these three. `reduce` computes them part by part, and
each part's logits and gradients once more in the backward pass. A weight's gradient is one product
as ever, and the input's is summed in float32, so the rounding is that of the plain way.

Between the layer and the loss a model may cast, scale and cap its logits (`tanh(x / 30) * 30`).
Such steps change each number by itself, so they are done to each part, in the same dtypes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

PART = 32 << 20
"""Logits that exist at a time."""

LEAST = 256
"""Words of a part; it has a multiple of them."""


class Layer(Protocol):
    """A linear layer, and how its weights are brought for as long as something computes."""

    linear: nn.Linear
    hold: Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Step:
    """Something done to each logit by itself. cast: and nothing else."""

    how: Callable[[torch.Tensor], torch.Tensor]
    cast: bool = False


Steps = tuple[Step, ...]


def follow(logits: torch.Tensor, steps: Steps) -> torch.Tensor:
    """`logits` after these steps."""
    for step in steps:
        logits = step.how(logits)
    return logits


def pull(
    logits: torch.Tensor, steps: Steps, gradient: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What the layer's own logits get, in their dtype. gradient: makes that of a loss from what the
    steps make of them (widened, see `wide`), which it may overwrite."""
    if all(step.cast for step in steps):
        return gradient(wide(follow(logits, steps))).to(logits.dtype)
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        after = follow(leaf, steps)
    own = gradient(wide(after.detach().clone()))
    (found,) = torch.autograd.grad(after, leaf, own.to(after.dtype))
    return found


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that is computed in: float32, of float64 float64."""
    return x if x.dtype == torch.float64 else x.float()


class _Parts:
    """The parts of the logits of `hidden` [n, width], one after the other."""

    def __init__(self, hidden: torch.Tensor, layer: Layer) -> None:
        # Not the arguments of `apply`: what the parameters are now, they were bound by `hold`.
        self.weight, bias = layer.linear.weight.detach(), layer.linear.bias
        self.bias = None if bias is None else bias.detach()
        self.hidden, self.words = hidden, layer.linear.out_features
        rows = max(1, hidden.shape[0])
        self.step = min(self.words, max(LEAST, PART // rows // LEAST * LEAST))

    def slices(self) -> list[slice]:
        return [
            slice(begin, min(begin + self.step, self.words))
            for begin in range(0, self.words, self.step)
        ]

    def logits(self, part: slice) -> torch.Tensor:
        return functional.linear(
            self.hidden, self.weight[part], None if self.bias is None else self.bias[part]
        )


def _place(index: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a part the words of `index` are, and which of them are there."""
    inside = (index >= part.start) & (index < part.stop)
    return (index - part.start).clamp(0, part.stop - part.start - 1), inside


class _Reduce(torch.autograd.Function):
    """See `reduce`, for hidden [n, width] and index [n, k]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _weight: torch.Tensor,
        _bias: torch.Tensor | None,
        index: torch.Tensor | None,
        wanted: tuple[bool, bool],
        steps: Steps,
        dtype: torch.dtype,
        layer: Layer,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        rows = hidden.shape[0]
        empty = hidden.new_zeros(rows, dtype=dtype)
        norms = empty.clone() if wanted[0] else None
        totals = empty if wanted[1] else None
        picked = None if index is None else hidden.new_zeros(index.shape, dtype=dtype)
        with layer.hold():
            parts = _Parts(hidden, layer)
            for part in parts.slices():
                logits = wide(follow(parts.logits(part), steps))
                if index is not None and picked is not None:
                    place, inside = _place(index, part)
                    picked = torch.where(inside, logits.gather(1, place), picked)
                if totals is not None:
                    totals += logits.sum(1)
                if norms is not None:
                    own = torch.logsumexp(logits, 1)
                    norms = torch.logaddexp(norms, own) if part.start else own
                del logits
        ctx.save_for_backward(hidden, index, norms)
        ctx.layer, ctx.steps = layer, steps
        ctx.set_materialize_grads(False)
        return norms, picked, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if all(each is None for each in gradients):
            return (None,) * 8
        hidden, index, norms = ctx.saved_tensors
        needs, weights, biases, *_ = ctx.needs_input_grad
        of_norms, of_picked, of_totals = gradients
        into = torch.zeros_like(hidden, dtype=torch.float32) if needs else None
        with ctx.layer.hold():
            parts = _Parts(hidden, ctx.layer)
            grown = torch.empty_like(parts.weight) if weights else None
            lifted = torch.empty_like(parts.bias) if biases and parts.bias is not None else None
            for part in parts.slices():

                def gradient(logits: torch.Tensor, part: slice = part) -> torch.Tensor:
                    if of_norms is None:
                        logits.zero_()
                    else:
                        logits.sub_(norms[:, None]).exp_().mul_(of_norms[:, None])
                    if of_picked is not None:
                        place, inside = _place(index, part)
                        logits.scatter_add_(1, place, torch.where(inside, of_picked, 0.0))
                    return logits if of_totals is None else logits.add_(of_totals[:, None])

                found = pull(parts.logits(part), ctx.steps, gradient)
                if into is not None:
                    into.add_(found @ parts.weight[part])
                if grown is not None:
                    torch.mm(found.t(), hidden, out=grown[part])
                if lifted is not None:
                    lifted[part] = found.sum(0)
                del found
        back = None if into is None else into.to(hidden.dtype)
        return back, grown, lifted, None, None, None, None, None


def reduce(
    hidden: torch.Tensor,
    layer: Layer,
    steps: Steps = (),
    index: torch.Tensor | None = None,
    norms: bool = False,
    totals: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(norms [...], picked [..., k], totals [...]) of the logits that `layer` makes of hidden
    [..., width], after `steps`; float32, of float64 logits float64, None where it was not asked
    for. index: int64 [..., k], words of each row. Raises IndexError where one is no word (on a GPU:
    an assertion)."""
    shape, linear = hidden.shape[:-1], layer.linear
    flat = None if index is None else index.reshape(-1, index.shape[-1])
    if flat is not None:
        in_vocabulary(flat, torch.ones_like(flat, dtype=torch.bool), linear.out_features)
    after = wide(follow(torch.empty(0, dtype=hidden.dtype), steps)).dtype
    found = _Reduce.apply(
        hidden.reshape(-1, hidden.shape[-1]), linear.weight, linear.bias, flat, (norms, totals),
        steps, after, layer,
    )  # fmt: skip
    first, picked, last = found
    return (
        None if first is None else first.view(shape),
        None if picked is None else picked.view(*shape, picked.shape[-1]),
        None if last is None else last.view(shape),
    )


@torch.no_grad()
def argmax(hidden: torch.Tensor, layer: Layer, steps: Steps = ()) -> torch.Tensor:
    """The word with the largest logit of each row, int64 [...]; the first one of several."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    best = at = None
    with layer.hold():
        parts = _Parts(flat, layer)
        for part in parts.slices():
            top, place = follow(parts.logits(part), steps).max(1)
            place += part.start
            if best is None or at is None:
                best, at = top, place
            else:
                better = (top > best) | (top.isnan() & ~best.isnan())
                at = torch.where(better, place, at)
                best = torch.where(better, top, best)
    assert at is not None
    return at.view(hidden.shape[:-1])


def in_vocabulary(targets: torch.Tensor, kept: torch.Tensor, words: int) -> None:
    """Raise where a target is no word, as torch's cross-entropy does; on a GPU as it does there, by
    an assertion that ends the job when it is seen."""
    if isinstance(targets, FakeTensor):
        return
    inside = ~kept | ((targets >= 0) & (targets < words))
    if targets.device.type == "cuda":
        torch._assert_async(inside.all(), f"a target is outside of the {words} classes")
    elif not inside.all():
        raise IndexError(f"Target {int(targets[~inside][0])} is out of bounds.")
