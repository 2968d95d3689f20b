"""Which modules do the same to each token, and to each by itself: an MLP, a norm, a residual block
of both. What they make of a sequence is then what they make of its parts, one after the other.

Nothing goes by name. A module with one input runs without memory (on the meta device), and every
operation that it calls is looked at. Its input is `[batch, tokens, width]`; a tensor that follows
from it has rows, one per token. Operations may change each number by itself, the numbers of a row
together (a norm, a softmax over the last dimension), or multiply rows by a weight. Whatever else
touches a row, is random or writes to what the module did not make itself makes it one that is left
alone. So does what depends on how many tokens there are: the module runs with several shapes, and
must call the same operations with the same numbers. A mistake here would be a wrong result, so an
operation that is not known counts as mixing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from evener.zero import launches
from evener.zero.untouched import Attributes, kept_graphs

SHAPES = ((1, 4), (3, 2), (1, 1 << 20), (2, 1 << 12))
"""(batch, tokens) of the runs. Large ones cost nothing: no memory is behind them."""

WORTH = 2.0
"""Numbers that a module makes, as a multiple of its result's, from which on parts are worth it. A
linear layer makes its result alone."""

_VIEWS = {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze"}
_SAME = {"detach", "alias", "clone", "_to_copy", "contiguous"}
_OVER_ROW = {"mean", "sum", "amax", "amin", "var", "var_mean", "linalg_vector_norm"}
_SOFTMAX = {"_softmax", "_log_softmax"}
_OF_ROW = {"split", "split_with_sizes", "chunk", "slice", "narrow", "cat"}
_NORMS = {"native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"}


class MixesError(Exception):
    """An operation that is not known to leave tokens apart."""


@dataclass
class Rows(TorchDispatchMode):
    """Sees the operations of one run. `tokens`: rows there are. Raises MixesError."""

    tokens: int
    log: list[Any] = field(default_factory=list)
    """What was called, with the numbers that it was given."""
    made: int = 0
    """Numbers per token that were made, the results included."""

    def __post_init__(self) -> None:
        super().__init__()
        self._rows: dict[int, torch.Tensor] = {}
        self._given: set[int] = set()
        """Storages that are not the module's own."""

    def know(self, x: torch.Tensor) -> None:
        """`x` has rows."""
        if not self._rows:
            self._given.add(x.untyped_storage()._cdata)
        if x.dim() < 2 or x.shape[:-1].numel() != self.tokens:
            raise MixesError(f"a result of shape {tuple(x.shape)}")
        self._rows[id(x)] = x

    def has(self, x: Any) -> bool:
        """Whether `x` has."""
        return isinstance(x, torch.Tensor) and self._rows.get(id(x)) is x

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tags = func.tags
        name = str(func._overloadpacket)[5:]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        rows = [x for x in given if self.has(x)]
        own = self.has(args[0]) and args[0].untyped_storage()._cdata not in self._given
        written = func._schema.is_mutable and not (own and torch.Tag.pointwise in tags)
        if written or torch.Tag.nondeterministic_seeded in tags:
            raise MixesError(name)
        out = func(*args, **kwargs)
        said = args if name not in _VIEWS else [x for x in args if isinstance(x, torch.Tensor)]
        self.log.append((name, tree_map(self._told, (list(said), kwargs))))
        if not rows:
            return out
        if not self._apart(name, torch.Tag.pointwise in tags, args, kwargs, rows, given):
            raise MixesError(name)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.know(x)
                if name not in _VIEWS and name not in _OF_ROW - {"cat"} and name != "detach":
                    self.made += x.shape[-1]
        return out

    def _told(self, x: Any) -> Any:
        if self.has(x):
            return "rows", x.shape[-1], x.dtype
        return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x

    def _apart(
        self,
        name: str,
        pointwise: bool,
        args: Any,
        kwargs: dict[str, Any],
        rows: list[torch.Tensor],
        given: list[torch.Tensor],
    ) -> bool:
        """Whether the operation leaves tokens apart."""
        first, last = args[0], rows[0].dim() - 1
        others = [x for x in given if not self.has(x)]
        if pointwise or name in _SAME:
            leading = {x.shape[:-1] for x in rows}
            # What all tokens share has no dimension of tokens.
            return len(leading) == 1 and all(x.shape[:-1].numel() <= 1 for x in others)
        if name in ("mm", "linear"):
            return self.has(first) and len(rows) == 1
        if name == "addmm":
            return self.has(args[1]) and len(rows) == 1 and args[0].dim() == 1
        if name in _VIEWS:  # rows stay whole and in their order: `know` looks at their number
            sizes = args[1] if len(args) > 1 else None
            return isinstance(sizes, list | tuple) and sizes[-1] in (first.shape[-1], -1) and (
                name != "expand" or first.shape[:-1].numel() == self.tokens
            )  # fmt: skip
        if name in _OVER_ROW:
            dims = args[2] if name == "linalg_vector_norm" and len(args) > 2 else (
                args[1] if len(args) > 1 else kwargs.get("dim")
            )  # fmt: skip
            keeps = kwargs.get("keepdim", any(x is True for x in args[2:]))
            dims = [dims] if isinstance(dims, int) else dims
            return bool(keeps) and dims is not None and [d % (last + 1) for d in dims] == [last]
        if name in _SOFTMAX:
            return bool(args[1] % (last + 1) == last)
        if name == "cat":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return len(rows) == len(args[0]) and bool(dim % (last + 1) == last)
        if name in _OF_ROW:
            at = 2 if name in ("split", "split_with_sizes", "chunk") else 1
            dim = args[at] if len(args) > at else kwargs.get("dim", 0)
            return bool(dim % (last + 1) == last)
        if name in _NORMS:
            return self.has(first) and len(rows) == 1 and list(args[1]) == [first.shape[-1]]
        return False


def one_input(module: nn.Module) -> bool:
    """Whether its forward pass needs one argument."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind in places]
    odd = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    return len(needed) == 1 and parameters[0] is needed[0] and not odd


class StandIn:
    """Something that runs in the place of a module's forward pass, from `begin` to `end`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._instance = "forward" in vars(module)
        self.inner: Callable[..., Any] = module.forward
        """The module's own."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What runs."""
        raise NotImplementedError

    def begin(self) -> None:
        """Stand in."""

        @functools.wraps(self.inner)
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(args, kwargs)

        forward.part = self  # type: ignore[attr-defined]
        self.module.forward = forward

    def end(self) -> None:
        """The module's own forward pass again."""
        self.module.forward = self.inner
        if not self._instance:
            del self.module.forward


def hooked(module: nn.Module) -> bool:
    """Whether someone listens to a part of it: parts would then be called more than once."""
    return any(
        inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks
        for inner in module.modules()
        if inner is not module
    )


@contextlib.contextmanager
def without_memory(module: nn.Module, training: bool) -> Iterator[None]:
    """Inside, parameters and buffers are on the meta device, and a kernel of Triton's mixes."""
    modes = [(inner, inner.training) for inner in module.modules()]
    held: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (given, given.copy())
        for inner in module.modules()
        for given in (inner._parameters, inner._buffers)
    ]
    made: dict[int, torch.Tensor] = {}
    try:
        for inner, _ in modes:
            inner.training = training
        for places, before in held:
            for name, old in before.items():
                if old is not None and id(old) not in made:
                    made[id(old)] = torch.empty(old.shape, dtype=old.dtype, device="meta")
                if old is not None:
                    places[name] = made[id(old)]
        with launches.seen(_mixes):
            yield
    finally:
        for places, before in held:
            places.update(before)
        for inner, was in modes:
            inner.training = was


def _mixes(kernel: str, _given: list[torch.Tensor]) -> None:
    raise MixesError(kernel)


def width_of(module: nn.Module) -> int:
    """The width of the tokens that a module treats one by one, where that takes memory beside its
    result; 0 where it does not treat them so, or has no need to be done in parts."""
    if not one_input(module) or hooked(module):
        return 0
    found = [p for p in module.parameters() if p.dim()]
    if len({p.dtype for p in found}) != 1:
        return 0
    for width in dict.fromkeys(p.shape[-1] for p in found):
        if made := _tried(module, width, found[0].dtype):
            return width if made >= WORTH else 0
    return 0


def _tried(module: nn.Module, width: int, dtype: torch.dtype) -> float:
    """Numbers per token that are made, as a multiple of those of the result; 0: tokens mix."""
    logs: list[Any] = []
    share = 0.0
    for training in (True, False):
        for batch, length in SHAPES:
            before = Attributes(module.modules())
            kept = [vars(inner).copy() for inner in module.modules()]
            try:
                with without_memory(module, training), torch.no_grad():
                    x = torch.empty(batch, length, width, dtype=dtype, device="meta")
                    rows = Rows(batch * length)
                    rows.know(x)
                    with rows:
                        out = module.forward(x)
                    if not rows.has(out) or out.shape[:-1] != x.shape[:-1] or out is x:
                        return 0.0
                    share = max(share, rows.made / out.shape[-1])
                changed = any(
                    was.keys() != vars(inner).keys()
                    or any(vars(inner)[k] is not v for k, v in was.items() if k != "training")
                    for inner, was in zip(module.modules(), kept, strict=True)
                )
            except Exception:  # noqa: BLE001  # whatever a module raises for a width that is not its own
                return 0.0
            finally:
                before.restore()
            if changed or kept_graphs(module.modules()):
                return 0.0
            logs.append(rows.log)
        if any(log != logs[0] for log in logs):
            return 0.0
        logs.clear()
    return share
