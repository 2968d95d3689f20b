"""Logits that are never whole: the last linear layer of a model and the loss after it.

Logits of 8,192 tokens and 152,000 words take 2.5 GB in bfloat16 and 16 bytes each with the loss in
float32: 20 GB. Here the layer gives `LazyLogits`, which hold its input. What a loss asks of them is
computed over parts of the vocabulary (see `tiles`): cross-entropy, log-sum-exp, chosen words, sums,
the largest word, and those of their log-softmax.

Lazy logits are in autograd's graph as what they stand for. Views, slices and casts of them stay
lazy, and so do logits that are scaled or capped (`tanh(x / 30) * 30`). Whatever else is asked of
any of them makes all whole, once and for good: from then on they are plain tensors in all they do,
and what is written to one is in all its views. Without gradients (metrics), what only reads a slice
computes that slice, and the rest stays lazy.

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
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from evener.errors import UsageError
from evener.zero import tiles
from evener.zero.tiles import Step, Steps

logger = logging.getLogger("evener.zero")

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
        if ctx.raw is not None and not all(step.cast for step in ctx.raw.steps):
            with ctx.head.hold():
                layer = ctx.head.linear
                logits = functional.linear(hidden, layer.weight, layer.bias)
            gradient = tiles.pull(logits, ctx.raw.steps, lambda _: gradient)
        gradient = gradient.to(hidden.dtype)
        needs, flat = ctx.needs_input_grad, gradient.reshape(-1, gradient.shape[-1])
        back = grown = None
        if needs[0]:
            with ctx.head.hold():
                back = gradient @ ctx.head.linear.weight.detach()
        if needs[1]:
            grown = flat.t() @ hidden.reshape(-1, hidden.shape[-1])
        return back, grown, flat.sum(0) if needs[2] else None, None, None


def linear_cross_entropy(
    logits: LazyLogits,
    targets: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`functional.cross_entropy` of lazy logits [n, words] in float32, targets int64 [n]."""
    kept = targets != ignore_index
    tiles.in_vocabulary(targets, kept, logits.shape[-1])
    at = torch.where(kept, targets, 0)[:, None]
    norms, picked, totals = logits.reduce(at, norms=True, totals=label_smoothing > 0)
    assert norms is not None and picked is not None
    losses = norms - picked[:, 0]
    if totals is not None:
        even = norms - totals / logits.shape[-1]
        losses = losses.mul(1 - label_smoothing).add(even, alpha=label_smoothing)
    losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / kept.sum()


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
    if (
        any(given is not None for given in (weight, size_average, reduce))
        or not _loss_in_parts(input, target, reduction)
        or input.logs is not None
        or not 0 <= label_smoothing <= 1
    ):
        return functional.cross_entropy(
            _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction,
            label_smoothing,
        )  # fmt: skip
    found = linear_cross_entropy(input, target, ignore_index, reduction, label_smoothing)
    return found.to(input.dtype)


def _nll_loss(
    input: Any,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    if (
        any(given is not None for given in (weight, size_average, reduce))
        or not _loss_in_parts(input, target, reduction)
        or input.logs != 1.0
    ):
        return functional.nll_loss(
            _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction
        )
    return linear_cross_entropy(input, target, ignore_index, reduction).to(input.dtype)


def _loss_in_parts(input: Any, target: Any, reduction: str) -> bool:
    return (
        isinstance(input, LazyLogits)
        and input.parts
        and input.dim() == 2
        and reduction in ("mean", "sum", "none")
        and not isinstance(target, LazyLogits)
        and target.dtype == torch.int64
        and target.shape == input.shape[:1]
        and target.device == input.device
    )


def _real(value: Any) -> Any:
    return value.whole() if isinstance(value, LazyLogits) else value


def whole(tree: Any) -> Any:
    """`tree` with the lazy logits in it made whole."""
    return tree_map(_real, tree)


class _Raw:
    """Logits that several views share: `value` from when they are whole. `copies`: what was made
    of them and is lazy (casts, capped ones), which becomes whole at the same time, as what is
    written later is not in a copy. `steps`: from the layer's logits to these, `dtype` of them.
    `logs`: they are the log-softmax of that, times this number."""

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        steps: Steps = (),
        logs: float | None = None,
    ) -> None:
        self.value: torch.Tensor | None = None
        self.copies: list[weakref.ref[LazyLogits]] = []
        self.dtype, self.steps, self.logs = dtype, steps, logs

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

    @property
    def logs(self) -> float | None:
        """What the log-softmax is multiplied by that these are; None: they are none."""
        return self.raw.logs

    def cut(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same logits of `hidden`, which is this one's without its graph."""
        found = LazyLogits.of(hidden, self.head)
        for step in self.raw.steps:
            found = found.after(step)
        return found if self.logs is None else _logs(found, self.dtype, self.logs)

    def after(self, step: Step) -> LazyLogits:
        """These after one step more, lazy."""
        with _disable_current_modes():
            dtype = step.how(torch.empty(0, dtype=self.dtype)).dtype
        return self._next(self.hidden, step.how, _Raw(dtype, (*self.raw.steps, step)))

    def peek(self) -> torch.Tensor:
        """The values, without a graph; they stay lazy."""
        if self.raw.value is not None:
            return self.whole().detach()
        with torch.no_grad(), self.head.hold():
            linear = self.head.linear
            found = tiles.follow(
                functional.linear(self.hidden, linear.weight, linear.bias), self.raw.steps
            )
            if self.logs is not None:
                found = functional.log_softmax(tiles.wide(found), -1).mul_(self.logs)
            return found.to(self.dtype)

    def reduce(
        self, index: torch.Tensor | None = None, norms: bool = False, totals: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """`tiles.reduce` of these (not of a log-softmax)."""
        return tiles.reduce(self.hidden, self.head, self.raw.steps, index, norms, totals)

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
        if func in _LOSSES:
            return _LOSSES[func](*args, **kwargs)
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
        if func in _READ and not torch.is_grad_enabled():
            args, kwargs = tree_map(
                lambda x: x.peek() if isinstance(x, LazyLogits) else x, (args, kwargs)
            )
        else:
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

        args, kwargs = tree_map(
            lambda x: x.peek() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _cast(x: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    if x.dtype == dtype:
        return x
    if x.logs is not None:
        raw = _Raw(dtype, x.raw.steps, x.logs)
        return x._next(x.hidden, lambda logits: logits.to(dtype), raw)
    return x.after(Step(lambda logits: logits.to(dtype), cast=True))


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
    return x._next(x.hidden, lambda logits: logits.contiguous(), _copy(x))


def _copy(x: LazyLogits) -> _Raw:
    return _Raw(x.dtype, x.raw.steps, x.logs)


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
    return x._next(hidden, how, x.raw if viewed else _copy(x))


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
    return _index(x, index)


def _index(x: LazyLogits, index: Any) -> LazyLogits:
    return x._next(x.hidden[index], lambda logits: logits[index], x.raw)


def _unbind(x: LazyLogits, dim: int = 0) -> tuple[LazyLogits, ...] | None:
    if dim != 0 or x.dim() < 2:
        return None
    return tuple(_index(x, n) for n in range(len(x)))


def _split(x: LazyLogits, size: Any, dim: int = 0) -> tuple[LazyLogits, ...] | None:
    if dim != 0 or x.dim() < 2 or not isinstance(size, int) or size < 1:
        return None
    return tuple(_index(x, slice(n, n + size)) for n in range(0, max(1, len(x)), size))


def _scaled(x: LazyLogits, by: Any, times: Callable[[Any], Any], factor: float) -> Any:
    if isinstance(by, bool) or not isinstance(by, int | float):
        return None
    if x.logs is not None:
        return x._next(x.hidden, times, _Raw(x.dtype, x.raw.steps, x.logs * factor))
    return x.after(Step(times))


def _mul(x: LazyLogits, by: Any, **kwargs: Any) -> Any:
    return None if kwargs else _scaled(x, by, lambda logits: logits * by, by)


def _div(x: LazyLogits, by: Any, **kwargs: Any) -> Any:
    return None if kwargs or by == 0 else _scaled(x, by, lambda logits: logits / by, 1 / by)


def _neg(x: LazyLogits) -> Any:
    return _scaled(x, -1, lambda logits: -logits, -1)


def _tanh(x: LazyLogits, **kwargs: Any) -> LazyLogits | None:
    return None if kwargs or x.logs is not None else x.after(Step(torch.tanh))


def _logs(x: LazyLogits, dtype: torch.dtype, scale: float = 1.0) -> LazyLogits:
    def how(logits: torch.Tensor) -> torch.Tensor:
        found = functional.log_softmax(logits, -1, dtype=dtype)
        return found if scale == 1.0 else found * scale

    return x._next(x.hidden, how, _Raw(dtype, x.raw.steps, scale))


def _log_softmax(
    x: LazyLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> LazyLogits | None:
    return _logs(x, dtype or x.dtype) if _last(x, dim) and x.logs is None else None


def _last(x: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, x.dim() - 1)


def _logsumexp(x: LazyLogits, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or x.logs is not None or not _last(x, dim):
        return None
    norms, _, _ = x.reduce(norms=True)
    assert norms is not None
    return (norms[..., None] if keepdim else norms).to(x.dtype)


def _gather(x: LazyLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    fits = (
        type(index) is torch.Tensor
        and index.dtype == torch.int64
        and index.shape[:-1] == x.shape[:-1]
    )
    if kwargs or not _last(x, dim) or not fits or x.dim() < 2:
        return None
    norms, picked, _ = x.reduce(index, norms=x.logs is not None)
    assert picked is not None
    if norms is not None and x.logs is not None:
        picked = (picked - norms[..., None]) * x.logs
    return picked.to(x.dtype)


def _sum(
    x: LazyLogits, dim: Any = None, keepdim: bool = False, dtype: Any = None, **kwargs: Any
) -> Any:
    if kwargs or not _last(x, dim):
        return None
    norms, _, totals = x.reduce(norms=x.logs is not None, totals=True)
    assert totals is not None
    if norms is not None and x.logs is not None:
        totals = (totals - x.shape[-1] * norms) * x.logs
    return (totals[..., None] if keepdim else totals).to(dtype or x.dtype)


def _argmax(x: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _last(x, dim) or x.logs is not None:
        return None
    found = tiles.argmax(x.hidden, x.head, x.raw.steps)
    return found[..., None] if keepdim else found


_LOSSES = {functional.cross_entropy: _cross_entropy, functional.nll_loss: _nll_loss}

_LAZY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.float: lambda x: _cast(x, torch.float32),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.view: _true_view,
    torch.Tensor.reshape: _view,
    torch.reshape: _view,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _item,
    torch.Tensor.unbind: _unbind,
    torch.unbind: _unbind,
    torch.Tensor.split: _split,
    torch.split: _split,
    torch.Tensor.mul: _mul,
    torch.mul: _mul,
    torch.Tensor.__mul__: _mul,
    torch.Tensor.__rmul__: _mul,
    torch.Tensor.div: _div,
    torch.div: _div,
    torch.Tensor.__truediv__: _div,
    torch.Tensor.neg: _neg,
    torch.neg: _neg,
    torch.Tensor.__neg__: _neg,
    torch.Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    torch.Tensor.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    functional.log_softmax: _log_softmax,
    torch.Tensor.logsumexp: _logsumexp,
    torch.logsumexp: _logsumexp,
    torch.Tensor.gather: _gather,
    torch.gather: _gather,
    torch.Tensor.sum: _sum,
    torch.sum: _sum,
    torch.Tensor.argmax: _argmax,
    torch.argmax: _argmax,
}
"""What can be done to lazy logits: it gives lazy ones, or what a loss asks of them. None, where
that is not so for these arguments."""
_READ = {
    *(torch.exp, torch.Tensor.exp, torch.softmax, torch.Tensor.softmax, functional.softmax),
    *(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.add, torch.Tensor.add),
    *(torch.Tensor.__add__, torch.sub, torch.Tensor.sub, torch.Tensor.__sub__, torch.sum),
    *(torch.Tensor.sum, torch.max, torch.Tensor.max, torch.topk, torch.Tensor.topk),
    *(torch.logsumexp, torch.Tensor.logsumexp, torch.Tensor.mean, torch.mean),
}
"""What only reads, and gives no view."""
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
