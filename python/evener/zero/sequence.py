"""Parts of a block that do the same to each token run in tiles along the sequence, so that what
they keep and take does not grow with it (TiledMLP of ALST, arXiv 2506.13996, has this for MLPs).

A forward pass goes through the tiles without a graph, and keeps its input alone. The backward pass
takes each tile forward once more, and back. The gradients of weights are summed over tiles in
float32 and rounded once, and reach autograd when the last tile is done: what listens for a
gradient, as the engine does, hears each once. Which parts these are: `tokenwise`.

The size of a tile follows from the width alone, so neither the budget nor the batch changes bits.
Products of fewer rows may be rounded otherwise than those of all: results are equal to those of
the whole to rounding.

The input is kept by a node of its own, before the tiles run. So where the block is recomputed,
recomputation ends there if nothing behind it is needed, and tiles run twice per step, as the
plain block does, and not three times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from evener.zero import apart, heads, tokenwise
from evener.zero.config import Config
from evener.zero.units import blocks

ROWS = 1024
"""Tokens of a tile at least; a wide part has as many as it is wide, which keeps a GPU busy."""

Repeated = Callable[[int], contextlib.AbstractContextManager[None]]


_counting: list[Repeated] = []


@contextlib.contextmanager
def counted(repeated: Repeated) -> Iterator[None]:
    """Inside, a step is traced: of equal tiles one runs for all, in `repeated(how many)`."""
    _counting.append(repeated)
    try:
        yield
    finally:
        _counting.pop()


def spans(x: torch.Tensor, count: int, rows: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Tiles of `rows` of `count`: from, to. The last has `least` at least. In a trace, with a fake
    `x`, one stands for all that are equal."""
    rest = count % rows
    if 0 < rest < least <= rows < count:
        rest += rows
    full = (count - rest) // rows
    for number in range(full):
        at = number * rows, (number + 1) * rows
        if number == 1 and _counting and isinstance(x, FakeTensor):
            with _counting[-1](full - 1):
                yield at
            break
        yield at
    if rest:
        yield count - rest, count


class Tiles:
    """Runs the token-wise parts of a model's repeated `units` in tiles until `close`, and of
    `others` those that have no matrix: norms. attention: units that are recomputed run in parts as
    a whole where they can (`heads`)."""

    def __init__(
        self,
        units: list[nn.Module],
        others: Iterable[nn.Module] = (),
        attention: bool = True,
    ) -> None:
        self.parts: list[Part] = []
        self.blocks: list[heads.Block] = []
        known: dict[Any, int] = {}
        seen: set[int] = set()
        for unit in units:
            self._find(unit, known)
            seen.update(map(id, unit.modules()))
        for other in others:
            if id(other) not in seen and all(p.dim() < 2 for p in other.parameters()):
                self._find(other, known)
                seen.update(map(id, other.modules()))
        whole = {id(part.module) for part in self.parts}
        for block in units if attention else []:
            widths = [p.shape[-1] for p in block.parameters() if p.dim()]
            if id(block) not in whole and widths:
                width = max(set(widths), key=widths.count)
                self.blocks.append(heads.Block(block, max(ROWS, width), spans))
        for part in self.parts:
            part.begin()
        for each in self.blocks:
            each.begin()

    def _find(self, module: nn.Module, known: dict[Any, int]) -> None:
        """The outermost parts."""
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
        if not shapes:
            return
        key = str(module), shapes, type(module)
        if key not in known:
            known[key] = tokenwise.width_of(module)
        # What looks alike is looked at once; what it holds beside may differ.
        if known[key] and tokenwise.width_of(module):
            self.parts.append(Part(module, known[key]))
            return
        for child in module.children():
            self._find(child, known)

    def close(self) -> None:
        """The parts' own forward passes again."""
        for part in self.parts:
            part.end()
        for each in self.blocks:
            each.end()


def tiles_of(model: nn.Module, config: Config) -> Tiles:
    """A model's tiles. Attention runs in parts too, but for blocks that are compiled as a whole,
    and for those that swap tokens for heads with other ranks."""
    attention = config.sequence == 1 and not config.compile
    return Tiles(blocks(model), model.modules(), attention)


class Part(tokenwise.StandIn):
    """One module that runs in tiles of `rows` tokens of `width`."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__(module)
        self.width, self.rows = width, max(ROWS, width)

    def like(self, module: nn.Module) -> Part:
        """The same of a copy of the module."""
        return Part(module, self.width)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In tiles, where the one argument is of enough tokens."""
        if len(args) != 1 or kwargs or not self._able(args[0]):
            return self.inner(*args, **kwargs)
        return self._run(args[0])

    def _able(self, x: Any) -> bool:
        return (
            isinstance(x, torch.Tensor)
            and x.dim() == 3
            and x.shape[-1] == self.width
            and x.shape[0] * x.shape[1] > self.rows
            and not apart.looking()
            and not tokenwise.hooked(self.module)
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        weights = [p for p in self.module.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or weights):
            return self.forward(x)
        held: torch.Tensor = _Held.apply(x) if x.requires_grad else x
        found: torch.Tensor = _Tiled.apply(self, held, *weights)
        return found

    def spans(self, x: torch.Tensor) -> Iterator[tuple[int, int]]:
        """The tiles of `x`: from, to."""
        return spans(x, x.shape[0] * x.shape[1], self.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All tiles, without a graph. `x`: [batch, tokens, width]."""
        flat = x.reshape(1, -1, self.width)
        out: torch.Tensor | None = None
        with torch.no_grad():
            for begin, end in self.spans(x):
                tile = self.inner(flat[:, begin:end])
                if out is None:
                    out = tile.new_empty(1, flat.shape[1], tile.shape[-1])
                out[:, begin:end] = tile
        assert out is not None
        return out.view(*x.shape[:-1], out.shape[-1])

    def backward(
        self,
        x: torch.Tensor,
        gradient: torch.Tensor,
        wanted: list[torch.Tensor],
        into: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Gradients of `x` (if `into`) and of the weights in `wanted`."""
        flat, given = x.reshape(1, -1, self.width), gradient.reshape(1, -1, gradient.shape[-1])
        found = torch.empty_like(flat) if into else None
        sums = heads.Sums(wanted)
        for begin, end in self.spans(x):
            tile = flat[:, begin:end].detach().requires_grad_(into)
            with torch.enable_grad():
                out = self.inner(tile)
            inputs = [tile, *wanted] if into else wanted
            each: list[torch.Tensor | None] = list(
                torch.autograd.grad(out, inputs, given[:, begin:end], allow_unused=True)
            )
            del out
            if found is not None:
                part = each.pop(0)
                found[:, begin:end] = 0 if part is None else part
                del part
            sums.add(each)
        return None if found is None else found.view(x.shape), sums.rounded()


class _Held(torch.autograd.Function):
    """Keeps the input, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.part, ctx.held = part, x.grad_fn
        if ctx.held is None:
            ctx.save_for_backward(x)
        ctx.weights = weights
        kind = x.device.type
        ctx.casting = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), kind
        return part.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = (ctx.held or ctx).saved_tensors
        on, dtype, kind = ctx.casting
        needed = ctx.needs_input_grad[2:]
        wanted = [w for w, need in zip(ctx.weights, needed, strict=True) if need]
        with torch.autocast(kind, dtype=dtype, enabled=on):
            into, found = ctx.part.backward(x, gradient, wanted, ctx.needs_input_grad[1])
        given = iter(found)
        return None, into, *(next(given) if need else None for need in needed)
