"""Blocks that are recomputed run in parts, attention among them: at the whole length a block takes
its queries, keys, values and attention's result, once each, beside what goes in and out.

A block that treats tokens one by one but for one call of attention (`apart`) has three stretches.
Tiles of the sequence run up to attention, and bring its queries, keys and values. Attention runs
for some heads after the others, and lets go of what it takes for them. Then tiles run once more,
with attention's result in the place of the call. The backward pass does the first two again; goes
tile by tile back from the result to attention; back through attention by heads, where a gradient
takes the place of what it is of; and back through the tiles up to attention.

Heads do not see each other, so each has the bits that it has in the whole. Gradients of weights are
summed over tiles in float32 and rounded once. That of the input is the sum of what comes from
behind attention and from before it, in its dtype, as autograd adds. So results are those of the
whole block to the rounding of sums, as with `sequence`.

It costs the layers up to attention once more in the forward pass, and twice in the backward pass.
So it is done where a block is recomputed, which is where memory is short.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evener.zero import apart, tokenwise
from evener.zero.activations import later
from evener.zero.apart import Attention, Call, How

PARTS = 8
"""Parts of the heads at most: a kernel of few heads would not fill a GPU, and memory falls by
little with more."""

LONG = 1 << 19
"""Tokens from which on what follows attention runs back twice, once to attention and once to the
input and the weights: the input's gradient is then not there while attention's are, which is an
eighth of the memory. It is 4% of the arithmetic at this length (Llama 3 8B)."""

Spans = Callable[..., Iterator[tuple[int, int]]]

_recomputed: list[None] = []


def recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, for a checkpoint: blocks inside run in parts where they can."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _recomputed.append(None)
        try:
            return call(*args, **kwargs)
        finally:
            _recomputed.pop()

    return run


def in_parts(module: nn.Module | None) -> bool:
    """Whether a block ran in parts, the last time that one looked."""
    block = getattr(getattr(module, "forward", None), "part", None)
    return isinstance(block, Block) and any(block.known.values())


class _Stop(BaseException):
    """Attention was reached. No model's `except Exception` is meant."""


@dataclass
class _Group:
    """Some heads: of all tokens, [batch, heads, tokens, width] each."""

    mine: slice
    pairs: slice
    given: list[torch.Tensor]
    """Query, key and value; later their gradients."""
    out: torch.Tensor | None = None

    def of(self, n: int) -> slice:
        """The heads of the query (0), or of keys and values."""
        return self.pairs if n else self.mine

    def back(self, gradient: torch.Tensor) -> None:
        """Through attention: gradients take the places of query, key and value."""
        assert self.out is not None
        out, self.out, given = self.out, self.out.detach(), self.given
        self.given = list(torch.autograd.grad(out, given, gradient))


class Sums:
    """Gradients of weights over tiles."""

    def __init__(self, wanted: list[torch.Tensor]) -> None:
        self._wanted = wanted
        self._sums: list[torch.Tensor | None] = [None] * len(wanted)

    def add(self, found: list[torch.Tensor | None]) -> None:
        """A tile's, which are let go of one by one."""
        for number in range(len(found)):
            part, before = found[number], self._sums[number]
            found[number] = None
            if part is not None and before is None:
                self._sums[number] = part.to(torch.promote_types(part.dtype, torch.float32))
            elif part is not None and before is not None:
                before.add_(part)
            del part, before

    def rounded(self) -> list[torch.Tensor | None]:
        """In the weights' dtypes. The sums are gone then."""
        for number, weight in enumerate(self._wanted):
            total = self._sums[number]
            self._sums[number] = None if total is None else total.to(weight.dtype)
            del total
        return self._sums


class Block(tokenwise.StandIn):
    """A block that runs in parts where it can. rows: tokens of a tile, of all rows of a batch;
    `spans`: the tiles of a sequence, `sequence.spans`."""

    def __init__(self, module: nn.Module, rows: int, spans: Spans) -> None:
        super().__init__(module)
        self.rows, self._spans = rows, spans
        self.known: dict[Any, How | None] = {}
        """By what a call looks like; None: the block runs whole."""

    def like(self, module: nn.Module) -> Block:
        """The same of a copy of the block."""
        return Block(module, self.rows, self._spans)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In parts, where that was found to be the same."""
        call = self._able(args, kwargs)
        how = None if call is None else self._how(call)
        if call is None or how is None:
            return self.inner(*args, **kwargs)
        return self._run(call, how)

    def _able(self, args: Any, kwargs: Any) -> Call | None:
        if not _recomputed or not torch.is_grad_enabled() or apart.looking():
            return None
        call = Call.of(args, kwargs)
        if call is None or call.x.shape[1] <= self.rows or tokenwise.hooked(self.module):
            return None
        return call

    def tiles(self, x: torch.Tensor) -> Iterator[tuple[int, int]]:
        """From which to which token. Of two at least: one alone is a step of a generation."""
        return self._spans(x, x.shape[1], max(2, self.rows // x.shape[0]), 2)

    def _how(self, call: Call) -> How | None:
        key = call.key(), self.module.training
        if key not in self.known:
            lengths = [call.x.shape[1], *(end - begin for begin, end in self.tiles(call.x))]
            self.known[key] = apart.how_of(self.module, self.inner, call, lengths)
        return self.known[key]

    def _run(self, call: Call, how: How) -> Any:
        parts = _Parts(self, call, how)
        weights = [p for p in self.module.parameters() if p.requires_grad]
        given = [call.x, *(call.leaves[n] for n in call.tensors())]
        if call.x.requires_grad:
            given[0] = _Held.apply(*given)
        elif not weights:
            return parts.result(parts.forward(given))
        return parts.result(_Run.apply(parts, len(given), *given, *weights))


class _Parts:
    """One call of a block. Its tensors (`given`), the input first, come with each method: between
    the two passes they are autograd's."""

    def __init__(self, block: Block, call: Call, how: How) -> None:
        self._block, self._how = block, how
        self._places = [call.at, *call.tensors()]
        leaves = [None if isinstance(x, torch.Tensor) else x for x in call.leaves]
        self._bare = replace(call, leaves=tuple(leaves))
        self._form: tuple[TreeSpec, list[Any]] | None = None

    def _call(self, given: list[torch.Tensor]) -> Call:
        leaves = list(self._bare.leaves)
        for n, x in zip(self._places, given, strict=True):
            leaves[n] = x
        return replace(self._bare, leaves=tuple(leaves))

    def result(self, out: torch.Tensor) -> Any:
        """What the block returns, with `out` as its tensor."""
        assert self._form is not None
        spec, leaves = self._form
        return tree_unflatten([out if isinstance(x, _Here) else x for x in leaves], spec)

    # --- The three stretches ----------------------------------------------------------------------

    def _before(self, call: Call, begin: int, end: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value of a tile, whose input is `x`."""
        found: list[torch.Tensor] = []

        def reached(*given: Any, **named: Any) -> Any:
            found.extend(_three(*given, **named))
            raise _Stop

        args, kwargs = call.part(begin, end, x)
        with contextlib.suppress(_Stop), Attention(reached):
            self._block.inner(*args, **kwargs)
        return found

    def _after(
        self, call: Call, begin: int, end: int, x: torch.Tensor, attended: Callable[..., Any]
    ) -> torch.Tensor:
        """The block's result of a tile. `attended`: in the place of attention."""
        args, kwargs = call.part(begin, end, x)
        with Attention(attended):
            out = self._block.inner(*args, **kwargs)
        leaves, spec = tree_flatten(out)
        (place,) = [n for n, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        found: torch.Tensor = leaves[place]
        leaves[place] = _Here()
        self._form = spec, leaves
        return found

    def _attend(self, call: Call, group: _Group) -> torch.Tensor:
        how = self._how
        mask = None if how.mask is None else call.leaves[how.mask]
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask[..., group.mine, :, :]
        query, key, value = group.given
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=how.causal, scale=how.scale, enable_gqa=how.grouped
        )

    def _groups(self, call: Call) -> list[_Group]:
        """All tokens' queries, keys and values. Without a graph."""
        heads, pairs = self._how.heads
        times, count = heads // pairs, min(PARTS, pairs)
        ends = [pairs * n // count for n in range(count + 1)]
        groups = [
            _Group(slice(a * times, b * times), slice(a, b), [])
            for a, b in itertools.pairwise(ends)
        ]
        x = call.x
        with torch.no_grad():
            for begin, end in self._block.tiles(x):
                three = self._before(call, begin, end, x[:, begin:end])
                for group in groups:
                    for n, tile in enumerate(three):
                        part = tile[:, group.of(n)]
                        if len(group.given) == n:
                            shape = (*part.shape[:2], x.shape[1], part.shape[3])
                            group.given.append(part.new_empty(shape))
                        group.given[n][:, :, begin:end] = part
                    del part
                del three, tile
        return groups

    # --- The two passes ---------------------------------------------------------------------------

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        """The block's result, without a graph."""
        call = self._call(given)
        x = call.x
        with torch.no_grad():
            groups = self._groups(call)
            for group in groups:
                group.out = self._attend(call, group)
                group.given.clear()
            out: torch.Tensor | None = None
            for begin, end in self._block.tiles(x):
                attended = _tile(groups, begin, end)
                tile = self._after(call, begin, end, x[:, begin:end], _always(attended))
                if out is None:
                    out = tile.new_empty(tile.shape[0], x.shape[1], *tile.shape[2:])
                out[:, begin:end] = tile
                del tile, attended
        assert out is not None
        return out

    def backward(
        self,
        given: list[torch.Tensor],
        gradient: torch.Tensor,
        wanted: list[torch.Tensor],
        into: bool,
        ready: Callable[[], None],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of the input (if `into`) and of the weights in `wanted`. `ready`: is called
        when attention's memory is free."""
        call = self._call(given)
        x, groups = call.x, self._groups(call)
        for group in groups:
            for each in group.given:
                each.requires_grad_()
            with torch.enable_grad():
                group.out = self._attend(call, group)
        long = x.shape[1] >= LONG
        found = torch.empty_like(x) if into and not long else None
        sums = Sums(wanted)
        outs = [torch.empty_like(_out(group)) for group in groups]
        for begin, end in self._block.tiles(x):
            tile = x[:, begin:end].detach().requires_grad_(into and not long)
            attended = _tile(groups, begin, end).requires_grad_()
            with torch.enable_grad():
                out = self._after(call, begin, end, tile, _always(attended))
            back, own, of_weights = _grad(
                [out], tile, attended, [] if long else wanted, [gradient[:, begin:end]]
            )
            del out
            for group, whole in zip(groups, outs, strict=True):
                whole[:, :, begin:end] = 0 if back is None else back[:, group.mine]
            if found is not None:
                found[:, begin:end] = 0 if own is None else own
            sums.add(of_weights)
            del back, own, tile, attended
        outs.reverse()
        for group in groups:
            group.back(outs.pop())
            group.out = group.out if long else None
        ready()
        if long and into:
            found = torch.empty_like(x)
        for begin, end in self._block.tiles(x):
            tile = x[:, begin:end].detach().requires_grad_(into)
            ends = [
                torch.cat([group.given[n][:, :, begin:end] for group in groups], 1)
                for n in range(3)
            ]
            with torch.enable_grad():
                if long:
                    attended = _tile(groups, begin, end)
                    known = functools.partial(_known, attended, ends)
                    three = [self._after(call, begin, end, tile, known)]
                    ends = [gradient[:, begin:end]]
                else:
                    three = self._before(call, begin, end, tile)
            _, own, of_weights = _grad(three, tile, None, wanted, ends)
            if found is not None and long:
                found[:, begin:end] = 0 if own is None else own
            elif found is not None and own is not None:
                found[:, begin:end] += own
            sums.add(of_weights)
            del own, tile, three, ends
        return found, sums.rounded()


class _Here:
    """Where a block's tensor is in what it returns."""


def _out(group: _Group) -> torch.Tensor:
    assert group.out is not None
    return group.out.detach()


def _tile(groups: list[_Group], begin: int, end: int) -> torch.Tensor:
    """Attention's result of some tokens, of all heads; in memory tokens come before heads, so that
    a block may take either order for a view."""
    parts = [_out(group)[:, :, begin:end].transpose(1, 2) for group in groups]
    return torch.cat(parts, 2).transpose(1, 2)


def _grad(
    outs: list[torch.Tensor],
    tile: torch.Tensor,
    attended: torch.Tensor | None,
    wanted: list[torch.Tensor],
    gradients: list[torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradients of attention's result, of a tile of the input, and of weights, where each has
    one."""
    pairs = [(x, g) for x, g in zip(outs, gradients, strict=True) if x.requires_grad]
    inputs = [x for x in (attended, tile, *wanted) if x is not None and x.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(inputs)
    if pairs:
        found = list(
            torch.autograd.grad(
                [x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True
            )
        )
    back = found.pop(0) if attended is not None else None
    own = found.pop(0) if tile.requires_grad else None
    return back, own, found


def _three(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> list[torch.Tensor]:
    return [query, key, value]


def _always(attended: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *_, **__: attended


def _known(
    attended: torch.Tensor, gradients: list[torch.Tensor], *given: Any, **named: Any
) -> torch.Tensor:
    found: torch.Tensor = _Known.apply(attended, *_three(*given, **named), *gradients)
    return found


class _Known(torch.autograd.Function):
    """Attention whose result is there, and what its query, key and value get."""

    @staticmethod
    def forward(ctx: Any, attended: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = tensors[3:]
        return attended.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *ctx.gradients, None, None, None


class _Held(torch.autograd.Function):
    """Keeps what a block is given, and changes nothing. A node of its own, before the tiles: a
    block that is recomputed ends there (see `sequence`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *others)
        ctx.others = len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(None for _ in range(ctx.others))


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        given = list(tensors[:count])
        ctx.parts, ctx.count, ctx.held, ctx.weights = (
            parts,
            count,
            given[0].grad_fn,
            tensors[count:],
        )
        if ctx.held is None:
            ctx.save_for_backward(*given)
        kind = given[0].device.type
        ctx.casting = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), kind
        return parts.forward(given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        on, dtype, kind = ctx.casting
        needed = ctx.needs_input_grad[2 + ctx.count :]
        wanted = [w for w, need in zip(ctx.weights, needed, strict=True) if need]
        with later() as ready, torch.autocast(kind, dtype=dtype, enabled=on):
            given = list((ctx.held or ctx).saved_tensors)
            into, found = ctx.parts.backward(
                given, gradient, wanted, ctx.needs_input_grad[2], ready
            )
        each = iter(found)
        none = (None,) * (ctx.count - 1)
        return None, None, into, *none, *(next(each) if need else None for need in needed)
