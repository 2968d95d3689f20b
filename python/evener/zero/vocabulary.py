"""The last linear layer and the cross-entropy after it, in one: logits are never whole.

Logits of 8,192 tokens and 152,000 words take 2.5 GB in bfloat16 and 16 bytes each with the loss in
float32: 20 GB. Here the layer gives `LazyLogits`, which hold its input. A cross-entropy of them is
computed over parts of the vocabulary: first the norms of the rows (log-sum-exp, kept in float32),
then, in the backward pass, each part's logits once more, and its gradients. A weight's gradient is
one product as ever, and the input's is summed in float32, so the rounding is that of the plain way.

Lazy logits are in autograd's graph as what they stand for. Views, slices and casts of them stay
lazy. Whatever else is asked of any of them makes all whole, once and for good: from then on they
are plain tensors in all they do, and what is written to one is in all its views.

`Head` stands in for the layer of a model. A weight may be away when it is needed (see `loading`):
`hold` brings it for as long as it is used.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from evener.errors import UsageError

logger = logging.getLogger("evener.zero")

PART = 32 << 20
"""Logits that exist at a time."""

SMALLEST = 2048
"""Words below which a vocabulary is not worth it."""


class Head:
    """The layer `linear` of a model, made lazy; `hold` is set by who moves the weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.hold: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.on = True
        self.told = False
        self._inner = linear.forward
        linear.forward = self.forward  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        """The layer as it was."""
        self.linear.forward = self._inner  # type: ignore[method-assign]

    def lazy(self) -> bool:
        """Whether the layer gives lazy logits now: while training, and for a model's own loss."""
        return self.on and torch.is_grad_enabled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Lazy logits while training; else what the layer gives. Under autocast, and of another
        dtype, the layer says what logits are."""
        weight = self.linear.weight
        if not self.lazy() or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            whole: torch.Tensor = self._inner(x)
            return whole
        return LazyLogits.of(x, self)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of `hidden` [..., width], in the graph."""
        if not self.told:
            self.told = True
            logger.info(
                "logits were asked for and are made whole; a loss by functional.cross_entropy of "
                "them needs no more than a part at a time"
            )
        # Rows: logits of three dimensions would leave the function as a view, which may not be
        # written to.
        rows = hidden.reshape(-1, hidden.shape[-1])
        found: torch.Tensor = _Linear.apply(rows, self.linear.weight, self.linear.bias, self)
        return found.view(*hidden.shape[:-1], found.shape[-1])


def find(model: nn.Module, force: bool = False) -> nn.Linear | None:
    """The layer that makes a model's logits: what `get_output_embeddings` of transformers says;
    with `force`, of any size, and of another model the last linear layer outside of its blocks."""
    layer: Any = None
    ask = getattr(model, "get_output_embeddings", None)
    if callable(ask):
        try:
            layer = ask()
        except (AttributeError, NotImplementedError, KeyError):
            layer = None
    elif force:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        inside = {id(inner) for each in lists for inner in each.modules()}
        outside = [m for m in model.modules() if type(m) is nn.Linear and id(m) not in inside]
        layer = outside[-1] if outside else None
    if type(layer) is not nn.Linear or (layer.out_features < SMALLEST and not force):
        return None
    return layer


def _width(rows: int, words: int) -> int:
    return min(words, max(256, PART // max(1, rows) // 256 * 256))


class _Linear(torch.autograd.Function):
    """Whole logits: the layer, with its weight brought for the backward pass as well. With `raw`
    the logits are lazy, and their gradient comes from what autograd hands on without asking them
    (functions of one's own, in older versions of torch)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _weight: torch.Tensor,
        _bias: torch.Tensor | None,
        head: Head,
        raw: _Raw | None = None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.head, ctx.raw = head, raw
        if raw is not None:
            shape = (*hidden.shape[:-1], head.linear.out_features)
            return torch.Tensor._make_wrapper_subclass(
                LazyLogits, shape, dtype=raw.dtype or hidden.dtype, device=hidden.device
            )
        with head.hold():
            # Not the arguments: what the parameter is now, it was bound by `hold`.
            return functional.linear(hidden, head.linear.weight, head.linear.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.raw is not None and ctx.raw.changed:
            raise UsageError(
                "logits that were written to went into an autograd.Function as they were before",
                "write to a copy: logits.clone()",
            )
        (hidden,) = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        needs, flat = ctx.needs_input_grad, gradient.reshape(-1, gradient.shape[-1])
        back = grown = None
        if needs[0]:
            with ctx.head.hold():
                back = gradient @ ctx.head.linear.weight.detach()
        if needs[1]:
            grown = flat.t() @ hidden.reshape(-1, hidden.shape[-1])
        return back, grown, flat.sum(0) if needs[2] else None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses of rows, float32 [n], of hidden [n, width] and a weight [words, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _weight: torch.Tensor,
        _bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore: int,
        head: Head,
    ) -> torch.Tensor:
        rows, words = hidden.shape[0], head.linear.out_features
        kept = targets != ignore
        in_vocabulary(targets, kept, words)
        at = torch.where(kept, targets, 0)
        norms = hidden.new_full((rows,), -torch.inf, dtype=torch.float32)
        picked = hidden.new_zeros((rows,), dtype=torch.float32)
        step = _width(rows, words)
        with head.hold():
            # Not `weight`: what the parameter is now, it was bound by `hold`.
            w, b = head.linear.weight.detach(), head.linear.bias
            for begin in range(0, words, step):
                end = min(begin + step, words)
                part = None if b is None else b.detach()[begin:end]
                wide = functional.linear(hidden, w[begin:end], part).float()
                inside = (at >= begin) & (at < end)
                place = (at - begin).clamp(0, end - begin - 1)
                found = wide.gather(1, place[:, None]).squeeze(1)
                picked = torch.where(inside, found, picked)
                norms = torch.logaddexp(norms, torch.logsumexp(wide, 1)) if begin else (
                    torch.logsumexp(wide, 1)
                )  # fmt: skip
                del wide
        ctx.save_for_backward(hidden, at, kept, norms)
        ctx.head = head
        return torch.where(kept, norms - picked, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, at, kept, norms = ctx.saved_tensors
        head: Head = ctx.head
        rows, words = hidden.shape[0], head.linear.out_features
        _, weights, biases, *_ = ctx.needs_input_grad
        factor = torch.where(kept, gradient, 0.0)[:, None]
        step = _width(rows, words)
        into = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        with head.hold():
            w, b = head.linear.weight.detach(), head.linear.bias
            grown = torch.empty_like(w) if weights else None
            lifted = torch.empty_like(b) if biases and b is not None else None
            for begin in range(0, words, step):
                end = min(begin + step, words)
                part = None if b is None else b.detach()[begin:end]
                wide = functional.linear(hidden, w[begin:end], part).float()
                wide.sub_(norms[:, None]).exp_()
                inside = ((at >= begin) & (at < end)).to(wide.dtype)
                place = (at - begin).clamp(0, end - begin - 1)
                wide.scatter_add_(1, place[:, None], -inside[:, None])
                found = wide.mul_(factor).to(hidden.dtype)
                del wide
                if into is not None:
                    into.add_(found @ w[begin:end])
                if grown is not None:
                    torch.mm(found.t(), hidden, out=grown[begin:end])
                if lifted is not None:
                    lifted[begin:end] = found.sum(0)
                del found
        back = None if into is None else into.to(hidden.dtype)
        return back, grown, lifted, None, None, None


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


def linear_cross_entropy(
    logits: LazyLogits, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """`functional.cross_entropy` of lazy logits [n, words] in float32, targets int64 [n]."""
    head = logits.head
    losses: torch.Tensor = _LinearCrossEntropy.apply(
        logits.hidden, head.linear.weight, head.linear.bias, targets, ignore_index, head
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if (
        not plain
        or not isinstance(input, LazyLogits)
        or not input.parts
        or input.dim() != 2
        or reduction not in ("mean", "sum", "none")
        or isinstance(target, LazyLogits)
        or target.dtype != torch.int64
        or target.shape != input.shape[:1]
        or target.device != input.device
    ):
        return functional.cross_entropy(
            _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction,
            label_smoothing,
        )  # fmt: skip
    return linear_cross_entropy(input, target, ignore_index, reduction).to(input.dtype)


def _real(value: Any) -> Any:
    return value.whole() if isinstance(value, LazyLogits) else value


def whole(tree: Any) -> Any:
    """`tree` with the lazy logits in it made whole."""
    return tree_map(_real, tree)


class _Raw:
    """Logits that several views share: `value` from when they are whole. `copies`: lazy casts,
    which become whole at the same time, as what is written later is not in a cast. `dtype`: of a
    cast."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.value: torch.Tensor | None = None
        self.copies: list[weakref.ref[LazyLogits]] = []
        self.dtype = dtype

    @property
    def changed(self) -> bool:
        """Whether something was written to them."""
        return self.value is not None and self.value._version > 0


class LazyLogits(torch.Tensor):
    """Logits [..., words] of `hidden` [..., width], not computed yet. `source`: the logits that
    these are a view or a copy of, and how."""

    hidden: torch.Tensor
    head: Head
    raw: _Raw
    source: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def of(hidden: torch.Tensor, head: Head, raw: _Raw | None = None) -> LazyLogits:
        """Logits of `hidden`, in its dtype or in that of `raw`."""
        raw = raw or _Raw()
        with torch._C.DisableTorchFunctionSubclass():
            made: LazyLogits = _Linear.apply(
                hidden, head.linear.weight, head.linear.bias, head, raw
            )
        made.hidden, made.head, made.raw, made.source = hidden, head, raw, None
        return made

    @property
    def parts(self) -> bool:
        """Whether a loss may compute them in parts: nothing has made them whole."""
        return self.raw.value is None

    def whole(self) -> torch.Tensor:
        """The logits as a plain tensor in the graph; computed at the first call."""
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if self.source is not None and self.source[0].raw is self.raw:
                source, view = self.source
                return view(source.whole())
            if self.raw.value is None:
                if self.source is None:
                    self.raw.value = self.head.whole(self.hidden)
                else:
                    source, copy = self.source
                    self.raw.value = copy(source.whole())
                for each in self.raw.copies:
                    if (other := each()) is not None:
                        other.whole()
            return self.raw.value

    def cut(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same logits of `hidden`, which is this one's without its graph."""
        found: torch.Tensor = LazyLogits.of(hidden, self.head)
        return found.to(self.dtype)

    def _next(
        self, hidden: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor], raw: _Raw
    ) -> LazyLogits:
        made = LazyLogits.of(hidden, self.head, raw)
        made.source = self, how
        if raw is not self.raw:
            self.raw.copies.append(weakref.ref(made))
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _PLAIN or (
            getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ in _ATTRIBUTES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and func in _LAZY and first.parts:
            found = _LAZY[func](first, *args[1:], **kwargs)
            if found is not None:
                return found
        args, kwargs = whole((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What did not ask `__torch_function__` (C++) gets values; it may not write to them."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func._schema.is_mutable:
            raise UsageError(
                f"{func} would write to logits that are not computed yet", "use logits.clone()"
            )

        def values(x: Any) -> Any:
            if not isinstance(x, LazyLogits):
                return x
            if x.raw.value is not None:
                return x.whole().detach()
            with x.head.hold():
                linear = x.head.linear
                return functional.linear(x.hidden, linear.weight, linear.bias).to(x.dtype)

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast(x: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    if x.dtype == dtype:
        return x
    raw = _Raw(dtype)
    return x._next(x.hidden, lambda logits: logits.to(dtype), raw)


def _to(x: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits | None:
    dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device):
            device = given
        elif not isinstance(given, bool) or given:
            return None  # another tensor, or a copy that is asked for
    if kwargs or (device is not None and torch.device(device) != x.device):
        return None
    return x if dtype is None else _cast(x, dtype)


def _contiguous(x: LazyLogits, **kwargs: Any) -> LazyLogits | None:
    if kwargs:
        return None
    if _geometry(x).is_contiguous():
        return x
    return x._next(x.hidden, lambda logits: logits.contiguous(), _Raw(x.dtype))


def _geometry(x: LazyLogits) -> torch.Tensor:
    """A tensor with the sizes and strides that `x` will have, without memory."""
    with _disable_current_modes(), torch.no_grad():
        if x.source is None:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        source, how = x.source
        return how(_geometry(source))


def _rows(
    x: LazyLogits, hidden: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]
) -> LazyLogits:
    """Whole rows of `x` by `how`: a view, or a copy where torch cannot make one."""
    view = _geometry(x)
    with _disable_current_modes():
        viewed = how(view)._is_view()
    return x._next(hidden, how, x.raw if viewed else _Raw(x.dtype))


def _view(x: LazyLogits, *shape: Any, **kwargs: Any) -> LazyLogits | None:
    wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    words = x.shape[-1]
    if kwargs or isinstance(wanted, torch.dtype) or not wanted:
        return None
    wanted = tuple(wanted)
    if wanted[-1] == -1:
        rows = 1
        for n in wanted[:-1]:
            rows *= n
        if rows < 0 or rows * words != x.numel():
            return None
    elif wanted[-1] != words:
        return None
    hidden = x.hidden.reshape(*wanted[:-1], x.hidden.shape[-1])
    return _rows(x, hidden, lambda logits: logits.reshape(wanted))


def _true_view(x: LazyLogits, *shape: Any, **kwargs: Any) -> LazyLogits | None:
    found = _view(x, *shape, **kwargs)
    return found if found is not None and found.raw is x.raw else None  # torch says why


def _flatten(x: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> LazyLogits | None:
    last = end_dim % x.dim()
    if last == x.dim() - 1:
        return None
    hidden = x.hidden.flatten(start_dim, last)
    return _rows(x, hidden, lambda logits: logits.flatten(start_dim, last))


def _item(x: LazyLogits, index: Any) -> LazyLogits | None:
    """The item at an index that takes whole rows."""
    given = index if isinstance(index, tuple) else (index,)
    every = slice(None)
    for each in given:
        if isinstance(each, bool) or not (each is Ellipsis or isinstance(each, int | slice)):
            return None
    if Ellipsis in given:
        after = given[given.index(Ellipsis) + 1 :]
        if after and after[-1] != every:
            return None
    elif len(given) >= x.dim() and given[-1] != every:
        return None
    return x._next(x.hidden[index], lambda logits: logits[index], x.raw)


_LAZY: dict[Any, Callable[..., LazyLogits | None]] = {
    torch.Tensor.float: lambda x: _cast(x, torch.float32),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.view: _true_view,
    torch.Tensor.reshape: _view,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.reshape: _view,
    torch.Tensor.__getitem__: _item,
}
"""What gives logits that are lazy too."""
_ATTRIBUTES = {
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_leaf", "grad_fn", "names", "itemsize", "nbytes", "is_nested",
    "is_mps", "is_xpu", "is_mkldnn", "is_sparse_csr",
}  # fmt: skip
_PLAIN = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.ndimension,
    torch.Tensor.is_floating_point,
    torch.Tensor.__hash__,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
    torch.Tensor.get_device,
}
