"""Which blocks treat tokens one by one but for a single call of attention. What such a block makes
of a sequence is what it makes of parts of it, if attention's result is given to each part.

Nothing goes by name. The block runs without memory (on the meta device), and every operation is
looked at. Each tensor that follows from the block's input has *labels*: beside each number the
place of the token that it belongs to. What moves numbers moves labels. What computes with them must
find the same label on all that it brings together, and nothing beside it that differs by token. So
a batch may be flattened and heads may change places with tokens, and what turns, mixes or counts
tokens is found. Attention is torch's `scaled_dot_product_attention`, called once, with queries,
keys and values of all tokens in their order, and a mask that the block was given. The block's
result has tokens where its input has them.

Labels are of a short sequence. What depends on the length is found beside that: at the length of
the call and of its parts the block must call the same operations, with the same numbers and with
shapes that differ by the length alone. A mistake here would be a wrong result, so an operation that
is not known counts as mixing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from evener.zero.tokenwise import MixesError, without_memory
from evener.zero.untouched import Attributes, kept_graphs

PRIMES = (53, 59, 61, 67, 71, 73, 79, 83)
"""Tokens of the sequence that has labels: the first that divides no size of the block."""

_looking: list[nn.Module] = []

_PLAIN = bool | int | float | str | None | torch.dtype | torch.device
_SHAPED = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"}
_MOVED = {
    "unsqueeze", "squeeze", "permute", "transpose", "t", "slice", "narrow", "select", "split",
    "split_with_sizes", "chunk", "unbind", *_SHAPED,
}  # fmt: skip
_SAME = {"detach", "alias", "clone", "_to_copy", "contiguous"}
_OVER = {"mean", "sum", "amax", "amin", "var", "var_mean", "linalg_vector_norm"}
_SOFTMAX = {"_softmax", "_log_softmax"}
_NORMS = {"native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"}


@dataclass(frozen=True)
class How:
    """A call of attention beside its tensors. `mask`: which of the block's arguments it is."""

    heads: tuple[int, int]
    """How many heads queries have, and how many keys and values have."""
    mask: int | None
    causal: bool
    scale: float | None
    grouped: bool


@dataclass(frozen=True)
class Call:
    """What a block is called with. `at`: which leaf is its input [batch, tokens, width]; `along`:
    the dimension of tokens of the others that have one; `square`: those with several, masks."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    at: int
    along: dict[int, int]
    square: frozenset[int]

    @staticmethod
    def of(args: Any, kwargs: Any) -> Call | None:
        """None where an argument is not known to be cut."""
        leaves, spec = tree_flatten((args, kwargs))
        found = [n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        known = all(isinstance(x, torch.Tensor | _PLAIN) for x in leaves)
        if not known or not found or leaves[found[0]].dim() != 3:
            return None
        at, tokens = found[0], leaves[found[0]].shape[1]
        if not leaves[at].is_floating_point() or any(leaves[n].requires_grad for n in found[1:]):
            return None
        along: dict[int, int] = {}
        square: set[int] = set()
        for n in found[1:]:
            places = [d for d, size in enumerate(leaves[n].shape) if size == tokens]
            if len(places) == 1:
                along[n] = places[0]
            elif places:
                square.add(n)
        return Call(tuple(leaves), spec, at, along, frozenset(square))

    @property
    def x(self) -> torch.Tensor:
        """The block's input."""
        found: torch.Tensor = self.leaves[self.at]
        return found

    def tensors(self) -> list[int]:
        """The places of tensors beside the input."""
        return [
            n for n, x in enumerate(self.leaves) if isinstance(x, torch.Tensor) and n != self.at
        ]

    def key(self) -> Any:
        """What is equal for calls that are alike."""
        told = tree_map(
            lambda x: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x, list(self.leaves)
        )
        return repr((told, self.spec))

    def given(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with these leaves."""
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def part(self, begin: int, end: int, x: torch.Tensor) -> tuple[Any, ...]:
        """Arguments of the tokens from `begin` to `end`, whose input is `x`."""
        leaves = list(self.leaves)
        leaves[self.at] = x
        for n, dim in self.along.items():
            leaves[n] = leaves[n].narrow(dim, begin, end - begin)
        return self.given(leaves)

    def of_length(self, tokens: int) -> list[Any]:
        """The leaves without memory, for another number of tokens."""
        whole = self.x.shape[1]

        def made(n: int, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            every = n in self.square
            shape = [
                tokens if size == whole and (every or self.along.get(n, 1) == d) else size
                for d, size in enumerate(x.shape)
            ]
            return torch.empty(shape, dtype=x.dtype, device="meta")

        return [made(n, x) for n, x in enumerate(self.leaves)]


class Attention(TorchFunctionMode):
    """Calls `instead` of torch's attention, with its arguments by their names."""

    def __init__(self, instead: Callable[..., Any]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._instead(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def told(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    leaves: list[Any],
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> How:
    """How attention was called in a block that was given `leaves`. Raises MixesError for what
    cannot be split by heads."""
    places = [n for n, x in enumerate(leaves) if x is attn_mask]
    if dropout_p or (attn_mask is not None and not places):
        raise MixesError("attention with dropout, or a mask of the block's own")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise MixesError("attention without a dimension of heads")
    heads, pairs = query.shape[1], key.shape[1]
    if value.shape[1] != pairs or heads % pairs or (heads != pairs and not enable_gqa):
        raise MixesError("heads that do not divide")
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise MixesError("queries of other tokens than keys")
    if attn_mask is not None:
        sizes = (1, 1, *attn_mask.shape)
        if attn_mask.dim() > 4 or sizes[-2:] != (query.shape[2],) * 2 or sizes[-3] not in (
            1, heads
        ):  # fmt: skip
            raise MixesError("a mask of another shape")
    mask = places[0] if attn_mask is not None else None
    return How((heads, pairs), mask, is_causal, scale, enable_gqa)


@dataclass
class _Labels(TorchDispatchMode):
    """Sees the operations of one run with `tokens`. labelled: whether it looks at labels; else it
    writes the log alone. Raises MixesError."""

    tokens: int
    leaves: list[Any]
    labelled: bool
    log: list[Any] = field(default_factory=list)
    how: How | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._opaque: list[torch.Tensor] = []
        self._given = {
            x.untyped_storage()._cdata for x in self.leaves if isinstance(x, torch.Tensor)
        }

    def place(self, x: torch.Tensor, dim: int) -> None:
        """`x` has tokens along `dim`."""
        at = torch.arange(self.tokens, dtype=torch.int32)
        shape = [1] * x.dim()
        shape[dim] = self.tokens
        self._label(x, at.view(shape).expand(x.shape))

    def placed(self, x: torch.Tensor, dim: int) -> bool:
        """Whether `x` has all tokens along `dim`, in their order."""
        if not self.labelled:
            return x.dim() > dim and x.shape[dim] == self.tokens
        if x.dim() <= dim or x.shape[dim] != self.tokens or not self._has(x):
            return False
        shape = [1] * x.dim()
        shape[dim] = self.tokens
        at = torch.arange(self.tokens, dtype=torch.int32).view(shape).expand(x.shape)
        return torch.equal(self._labels(x), at)

    def forbid(self, x: torch.Tensor) -> None:
        """No operation may look at `x`."""
        self._opaque.append(x)

    def attend(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> torch.Tensor:
        """In the place of attention."""
        names = ("attn_mask", "dropout_p", "is_causal")
        how = told(
            query, key, value, self.leaves, **{**dict(zip(names, rest, strict=False)), **named}
        )
        self.log.append(("attention", [tuple(x.shape) for x in (query, key, value)]))
        batch, heads, tokens, _ = query.shape
        with _disable_current_modes():
            if self.how is not None or not all(self.placed(x, 2) for x in (query, key, value)):
                raise MixesError("attention that is called twice, or of something else than tokens")
            self.how = how
            out = torch.empty(
                batch, tokens, heads, value.shape[3], dtype=query.dtype, device="meta"
            ).transpose(1, 2)
            if self.labelled:
                self.place(out, 2)
        return out

    def _label(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        if x.shape != labels.shape:
            raise MixesError(f"a result of shape {tuple(x.shape)}")
        self._of[id(x)] = x, labels

    def _has(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and id(x) in self._of and self._of[id(x)][0] is x

    def _labels(self, x: torch.Tensor) -> torch.Tensor:
        return self._of[id(x)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func._overloadpacket)[5:]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        shapes = [(tuple(x.shape), x.dtype) for x in (*given, *made)]
        plain = tree_map(lambda x: None if isinstance(x, torch.Tensor) else x, (args, kwargs))
        self.log.append((name, shapes, plain))
        if not self.labelled:
            return out
        if torch.Tag.nondeterministic_seeded in func.tags or any(
            x is each for x in given for each in self._opaque
        ):
            raise MixesError(name)
        have = [x for x in given if self._has(x)]
        others = [x for x in given if not self._has(x)]
        pointwise = torch.Tag.pointwise in func.tags
        if func._schema.is_mutable:
            own = self._has(args[0]) and args[0].untyped_storage()._cdata not in self._given
            if not (own and pointwise):
                raise MixesError(name)
        # A weight that is no parameter of the block would not get its gradient.
        if any(x.requires_grad for x in others):
            raise MixesError(name)
        if not have:
            return out
        before = self._labels(args[0]) if func._schema.is_mutable else None
        labels = self._moved(name, func, pointwise, args, kwargs, have, others, made)
        if before is not None and not torch.equal(labels[0], before):
            raise MixesError(name)
        for x, label in zip(made, labels, strict=True):
            self._label(x, label)
        return out

    def _moved(
        self,
        name: str,
        func: Any,
        pointwise: bool,
        args: Any,
        kwargs: dict[str, Any],
        have: list[torch.Tensor],
        others: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Labels of what the operation makes."""
        first = args[0]
        one = len(have) == 1 and self._has(first)
        if pointwise:
            return [_together([self._labels(x) for x in have], others, made[0].shape)]
        if name in _SAME and one:
            return [self._labels(first)]
        if name in _SHAPED and one:
            labels = self._labels(first)
            sizes = made[0].shape
            return [labels.expand(sizes) if name == "expand" else labels.reshape(sizes)]
        if name in _MOVED and one:
            found = func(self._labels(first), *args[1:], **kwargs)
            return [found] if isinstance(found, torch.Tensor) else list(found)
        if name in ("cat", "stack") and not others:
            return [func([self._labels(x) for x in first], *args[1:], **kwargs)]
        if name in ("mm", "bmm", "linear") and one:
            return [_one(self._labels(first), -1).expand(made[0].shape)]
        if name == "addmm" and len(have) == 1 and self._has(args[1]) and first.dim() == 1:
            return [_one(self._labels(args[1]), -1).expand(made[0].shape)]
        if name in _OVER and one:
            at = 2 if name == "linalg_vector_norm" else 1
            dims = args[at] if len(args) > at else kwargs.get("dim")
            dims = [dims] if isinstance(dims, int) else dims
            if not dims:
                raise MixesError(name)
            labels = self._labels(first)
            for dim in dims:
                labels = _one(labels, dim)
            return [labels.reshape(x.shape) for x in made]
        if name in _SOFTMAX and one:
            _one(self._labels(first), args[1])
            return [self._labels(first)]
        if name in _NORMS and one:
            labels = self._labels(first)
            few = labels
            for back in range(1, len(args[1]) + 1):
                few = _one(few, -back)
            return [labels if x.shape == labels.shape else few.reshape(x.shape) for x in made]
        raise MixesError(name)


def _one(labels: torch.Tensor, dim: int) -> torch.Tensor:
    """The labels with 1 number along `dim`, where all along it are of one token."""
    few = labels.narrow(dim, 0, 1)
    if not torch.equal(few.expand_as(labels), labels):
        raise MixesError("tokens are added up")
    return few


def _together(
    labels: list[torch.Tensor], others: list[torch.Tensor], shape: torch.Size
) -> torch.Tensor:
    """Labels of what is computed number by number."""
    wide = [each.expand(shape) for each in labels]
    if any(not torch.equal(each, wide[0]) for each in wide[1:]):
        raise MixesError("numbers of several tokens")
    for dim in range(len(shape)):
        if torch.equal(wide[0].narrow(dim, 0, 1).expand(shape), wide[0]):
            continue
        for x in others:
            place = dim - (len(shape) - x.dim())
            if place >= 0 and x.shape[place] != 1:
                raise MixesError("what differs by token, and is not the block's input")
    return wide[0]


def _alike(mine: Any, other: Any, tokens: tuple[int, int], sizes: bool = False) -> bool:
    """Whether logs of two lengths are equal. sizes: of numbers that may grow with the length."""
    if type(mine) is not type(other):
        return False
    if isinstance(mine, tuple | list):
        # (name, shapes, numbers)
        named = len(mine) == 3 and isinstance(mine[0], str)
        ways = [False, True, named and mine[0] in _MOVED] if named else [sizes] * len(mine)
        return len(mine) == len(other) and all(
            _alike(a, b, tokens, way) for a, b, way in zip(mine, other, ways, strict=True)
        )
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(
            _alike(mine[name], other[name], tokens, sizes) for name in mine
        )
    if isinstance(mine, float) and math.isnan(mine):
        return math.isnan(other)
    if sizes and type(mine) is int:
        return bool(mine == other or mine * tokens[1] == other * tokens[0])
    return bool(mine == other)


def looking() -> bool:
    """Whether a block runs that is only looked at."""
    return bool(_looking)


def how_of(
    module: nn.Module, inner: Callable[..., Any], call: Call, lengths: list[int]
) -> How | None:
    """How a block calls attention that treats tokens one by one beside it, where it does the same
    at each of `lengths`; None of another block. `inner`: its forward pass. Modules and random
    numbers stay as they are."""
    sizes = {n for p in (*module.parameters(), *module.buffers()) for n in p.shape}
    sizes |= {n for x in call.leaves if isinstance(x, torch.Tensor) for n in x.shape}
    short = next((p for p in PRIMES if all(n % p for n in sizes)), 0)
    if not short:
        return None
    found: list[_Labels] = []
    with _disable_current_modes():
        for tokens in (short, *dict.fromkeys(lengths)):
            run = _tried(module, inner, call, tokens, labelled=not found)
            if run is None or (found and run.how != found[0].how):
                return None
            if found and not _alike(found[0].log, run.log, (short, tokens), sizes=True):
                return None
            found = found or [run]
    return found[0].how


def _tried(
    module: nn.Module, inner: Callable[..., Any], call: Call, tokens: int, labelled: bool
) -> _Labels | None:
    before = Attributes(module.modules())
    _looking.append(module)
    kept = [vars(each).copy() for each in module.modules()]
    try:
        with without_memory(module, module.training), torch.no_grad():
            leaves = call.of_length(tokens)
            run = _Labels(tokens, leaves, labelled)
            x = leaves[call.at]
            if labelled:
                run.place(x, 1)
                for n, dim in call.along.items():
                    run.place(leaves[n], dim)
            for n in call.square:
                run.forbid(leaves[n])
            args, kwargs = call.given(list(leaves))
            with Attention(run.attend), run:
                out = inner(*args, **kwargs)
            outs = [x for x in tree_leaves(out) if x is not None]
            if len(outs) != 1 or not isinstance(outs[0], torch.Tensor) or outs[0] is x:
                return None
            if run.how is None or outs[0].shape[:2] != x.shape[:2] or not run.placed(outs[0], 1):
                return None
        changed = any(
            was.keys() != vars(each).keys()
            or any(vars(each)[k] is not v for k, v in was.items() if k != "training")
            for each, was in zip(module.modules(), kept, strict=True)
        )
    except Exception:  # noqa: BLE001  # whatever a block raises that cannot run so
        return None
    finally:
        _looking.pop()
        before.restore()
    return None if changed or kept_graphs(module.modules()) else run
