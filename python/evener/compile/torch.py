"""Shape buckets for torch.compile.

    from evener.compile.torch import bucketed
    model = bucketed(model)

The function's tensors are padded along one dimension by repeating their last row (a row that the
function can surely compute with), and what it gives is cut back. Gradients of padded rows are zero
by that cut, so a loss outside of the function needs no mask.

It is compiled in the call that comes first to a bucket, as torch.compile does: in a second thread
Dynamo is not safe (with torch 2.11 it ended the process). Outputs and gradients of the padded,
compiled form are compared with the plain form's first, for several sizes and paddings
(`independence`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from evener.base.given import given
from evener.compile import code, independence, isa, store
from evener.compile.decisions import Decisions
from evener.compile.driver import Bucketed, WrongError
from evener.compile.independence import Filling
from evener.compile.policy import Options
from evener.errors import UsageError

_PLAIN = (bool, int, float, str, type(None))
# Relative to the norm of what is compared.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


@given
def bucketed(
    function: Any,
    *,
    dim: int = 0,
    mask: str = "",
    name: str = "",
    options: Options | None = None,
    record: bool = True,
    **compile_options: Any,
) -> Any:
    """A function (or a module, whose `forward` is replaced) that is compiled per bucket of sizes.

    dim: the dimension that varies; each tensor that has there as much as the first one is padded.
    mask: the name of an argument that gets a float tensor [edge], 1 for real rows and 0 for padding
    (without padding all 1); needed where rows are not computed one by one. name: of the record.
    record: whether shapes are kept for the next process. compile_options: of torch.compile
    (backend, mode, options).

    The function must not change anything but what it gives. Modules are checked for that: one that
    changes its buffers (batch normalization in training) is left as it is, with a reason. Raises
    UsageError for what cannot be called, and for options that are none.
    """
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called", "give a function or a module")
    if "dynamic" in compile_options:
        raise UsageError("dynamic= is not for buckets", "leave it out: each bucket has one shape")
    known = inspect.signature(torch.compile).parameters
    if unknown := [name for name in compile_options if name not in known]:
        raise UsageError(
            f"bucketed() has no option {', '.join(unknown)}, and torch.compile has none",
            f"give of torch.compile's: {', '.join([*known][1:])}",
        )
    options = options or Options()
    if options.most > torch._dynamo.config.recompile_limit:
        limit = torch._dynamo.config.recompile_limit
        raise UsageError(
            f"most={options.most} is above torch's limit of {limit} forms per function",
            "give fewer, or raise torch._dynamo.config.recompile_limit",
        )
    if record:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(store.folder() / "inductor"))
    if isinstance(function, nn.Module):
        name = name or type(function).__name__
        settings = (dim, mask, name, options, record, compile_options)
        function.forward = Function(function.forward, function, *settings)
        return function
    name = name or getattr(function, "__qualname__", type(function).__name__)
    return Function(function, None, dim, mask, name, options, record, compile_options)


@dataclass
class _Call:
    leaves: list[Any]
    tree: Any
    padded: list[int]  # which leaves
    key: Hashable = None  # of the signature


class Function(Bucketed[_Call]):
    """What `bucketed` gives."""

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        dim: int,
        mask: str,
        name: str,
        options: Options,
        record: bool,
        compile_options: dict[str, Any],
    ) -> None:
        super().__init__(name, f"torch {torch.__version__}", options, record)
        self._function, self._module = function, module
        self._dim, self._mask = dim, mask
        self._settings = (dim, mask, name, options, record, compile_options)
        self._made = torch.compile(function, dynamic=False, **compile_options)
        # For each signature and edge: which outputs are cut.
        self._cut: dict[tuple[Hashable, int], list[bool]] = {}
        self._looked: set[str] = set()
        self._refused = ""  # for what a call was seen to do
        self._code = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        module = None if self._module is None else copy.deepcopy(self._module, memo)
        function = self._function
        if module is not None:
            function = function.__func__.__get__(module)  # type: ignore[attr-defined]
        return Function(function, module, *self._settings)

    def __reduce__(self) -> Any:
        raise UsageError(
            f"{self.name} is compiled by buckets and cannot be pickled",
            "save its state_dict(), or pickle it before bucketed()",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        dim = self._dim
        sizes = [x.shape[dim] for x in leaves if isinstance(x, torch.Tensor) and x.dim() > dim]
        size = sizes[0] if sizes else 0
        if torch.compiler.is_compiling():
            return self._function(*args, **self._masked(kwargs, size, size, leaves))
        if size == 0:
            if not sizes:
                why = f"it runs as it is: no argument is a tensor with a dimension {dim}"
                self._say(why, once=why)
            return self._function(*args, **self._masked(kwargs, size, size, leaves))
        padded = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == size
        ]
        key = self._key(leaves, padded)
        call = _Call(leaves, tree, padded, key)
        return self._run(call, size, key, lambda: self._signature(leaves, padded))

    def _key(self, leaves: list[Any], padded: list[int]) -> Hashable:
        """As `_signature`, without making a text."""
        dim = self._dim
        parts: list[Any] = [tuple(padded), torch.is_grad_enabled()]
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                shape = tuple(x.shape)
                if i in padded:
                    shape = (*shape[:dim], -1, *shape[dim + 1 :])
                parts.append((x.dtype, shape, x.requires_grad, x.device.type))
            else:
                parts.append(x if isinstance(x, _PLAIN) else repr(x)[:40])
                parts.append(type(x))  # 1, 1.0 and True are equal
        if self._module is not None:
            parts.append(self._module.training)
        device = _device(leaves)
        if torch.is_autocast_enabled(device):
            parts.append(torch.get_autocast_dtype(device))
        return tuple(parts)

    def _signature(self, leaves: list[Any], padded: list[int]) -> str:
        parts = []
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                shape = [
                    "n" if i in padded and j == self._dim else s for j, s in enumerate(x.shape)
                ]
                kind = f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
                parts.append(kind + (" grad" if x.requires_grad else "") + f" {x.device.type}")
            else:
                parts.append(repr(x)[:40])
        device = _device(leaves)
        if self._module is not None:
            parts.append("train" if self._module.training else "eval")
        parts.append("" if torch.is_grad_enabled() else "no grad")
        if torch.is_autocast_enabled(device):
            parts.append(f"autocast {torch.get_autocast_dtype(device)}")
        return "; ".join(filter(None, parts))

    # --- calls ---

    def _masked(
        self, kwargs: dict[str, Any], size: int, edge: int, leaves: list[Any]
    ) -> dict[str, Any]:
        if not self._mask:
            return kwargs
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        ones = (torch.arange(edge, device=device) < size).float()
        return {**kwargs, self._mask: ones}

    def _plain(self, call: _Call) -> Any:
        args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
        size = call.leaves[call.padded[0]].shape[self._dim]
        return self._function(*args, **self._masked(kwargs, size, size, call.leaves))

    def _compiled(self, call: _Call, size: int, edge: int) -> Any:
        found, tree = pytree.tree_flatten(self._whole(self._made, call, size, edge))
        cut = [
            x.narrow(self._dim, 0, size) if short else x
            for x, short in zip(found, self._cut[call.key, edge], strict=True)
        ]
        return pytree.tree_unflatten(cut, tree)

    def _whole(
        self,
        function: Callable[..., Any],
        call: _Call,
        size: int,
        edge: int,
        filling: Filling | None = None,
    ) -> Any:
        """What it gives for the padded inputs, not cut. `filling`: None for the last row."""
        leaves = list(call.leaves)
        if size < edge:
            for i in call.padded:
                x = leaves[i]
                if filling is not None:
                    leaves[i] = torch.cat([x, _filled(x, self._dim, filling)], self._dim)
                    continue
                last = x.narrow(self._dim, size - 1, 1)
                more = [edge - size if d == self._dim else -1 for d in range(x.dim())]
                leaves[i] = torch.cat([x, last.expand(more)], self._dim)
        args, kwargs = pytree.tree_unflatten(leaves, call.tree)
        return function(*args, **self._masked(kwargs, size, edge, leaves))

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return super()._now()

    # --- compiling ---

    def _quiet(self, call: _Call, size: int, edge: int) -> bool:
        """Never: see the head of this file. Looks once per mode at what a call leaves behind."""
        mode = self._mode()
        if mode not in self._looked:
            before = _random_state()
            call = self._kept(call)
            tensors = [x for x in call.leaves if isinstance(x, torch.Tensor)]
            versions = [x._version for x in tensors]
            decisions = Decisions(call.leaves[i] for i in call.padded)
            # The call itself raises what the function raises; this look leaves nothing behind.
            with torch.no_grad(), self._restored() as changed, contextlib.suppress(Exception):
                with decisions:
                    self._plain(call)
                self._looked.add(mode)
            _set_random_state(before)
            if not changed and versions != [x._version for x in tensors]:
                changed = ["an input"]
            if changed:
                self._refused = f"a call changes {changed[0]}: padded rows would count there"
            elif decisions.found:
                self._refused = (
                    "a call decides by values of its rows (if, float() or item() of a tensor): "
                    "padded rows would count there"
                )
        return False

    def _mode(self) -> str:
        return str(self._module.training) if self._module is not None else ""

    def _kept(self, call: _Call) -> _Call:
        leaves = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in call.leaves
        ]
        return _Call(leaves, call.tree, call.padded, call.key)

    def _prepare(
        self, call: _Call, size: int, edge: int, known: dict[str, Any] | None
    ) -> dict[str, Any]:
        self._code = self._code or code.digest(self._function, self._module, self._maker)
        if self._record:
            isa.remember()
        if self._refused:
            raise WrongError(self._refused)
        if self._mode() not in self._looked:
            raise WrongError("it raises where Evener looks at what a call leaves behind")
        call = self._kept(call)
        if edge < 2:
            raise WrongError("there is nothing to pad")
        if (
            known is not None
            and known["code"] == self._code
            and known.get("proof") == independence.PROOF
            and self._compile(self._some(call, range(min(size, edge - 1))), edge)
            == len(known["cut"])
        ):
            self._cut[call.key, edge] = known["cut"]
            return known
        before = _random_state()
        with self._without_dropout() as dropout, self._restored():
            # Random numbers differ with the shape. So where there is dropout, the plain form is
            # compared with itself, without it.
            try:
                cut = self._check(self._function if dropout else self._made, call, size, edge)
            finally:
                _set_random_state(before)
        if dropout:
            self._compile(self._some(call, range(min(size, edge - 1))), edge)
        self._cut[call.key, edge] = cut
        return {"code": self._code, "cut": cut, "proof": independence.PROOF}

    def _some(self, call: _Call, rows: range) -> _Call:
        """The call with these of its rows."""
        leaves = list(call.leaves)
        for i in call.padded:
            x = leaves[i]
            index = torch.tensor(rows, device=x.device)
            some = x.detach().index_select(self._dim, index)
            leaves[i] = some.requires_grad_(x.requires_grad)
        return _Call(leaves, call.tree, call.padded, call.key)

    def _compile(self, call: _Call, edge: int) -> int:
        """Run it, backward too; gives the number of outputs."""
        before = _random_state()
        size = call.leaves[call.padded[0]].shape[self._dim]
        found, _ = pytree.tree_flatten(self._whole(self._made, call, size, edge))
        _gradients(found, call.leaves)
        _set_random_state(before)
        return len(found)

    def _check(self, made_by: Callable[..., Any], call: _Call, size: int, edge: int) -> list[bool]:
        """Which outputs are cut. Raises WrongError where a real row depends on the padding."""
        seed = _random_state()
        cut: list[bool] = []
        for number, rows in enumerate(independence.samples(size, edge)):
            n, short = len(rows), self._some(call, rows)
            _set_random_state(seed)
            try:
                plain, tree = pytree.tree_flatten(self._plain(short))
            except Exception:
                if number == 0:
                    raise
                continue  # fewer rows than it works with
            right = _gradients(plain, short.leaves)
            first: list[Any] = []
            for filling in independence.fillings(n, edge - n, bool(self._mask)):
                if number and filling.rows != (n - 1,) * (edge - n):
                    continue  # once is enough: the padding is most of that batch
                if filling.wild and not _tame(short.leaves):
                    continue
                _set_random_state(seed)
                try:
                    made, other = pytree.tree_flatten(self._whole(made_by, short, n, edge, filling))
                except Exception:
                    if filling.wild:
                        continue  # numbers outside of its domain
                    raise
                if tree != other:
                    raise WrongError("the compiled form gives another structure")
                now = self._cuts(plain, made, n, edge)
                if cut and now != cut:
                    raise WrongError("which outputs have a row for each input depends on the size")
                cut = now
                made = [
                    m.narrow(self._dim, 0, n) if c else m for m, c in zip(made, cut, strict=True)
                ]
                if not first:
                    first = made
                    self._compare(plain, made, cut, f"on {edge - n} rows of padding behind {n}")
                else:
                    self._same(first, made, filling.name)
                if not filling.wild:
                    self._compare_gradients(right, _gradients(made, short.leaves))
        return cut

    def _cuts(self, plain: list[Any], made: list[Any], size: int, edge: int) -> list[bool]:
        cut = []
        for p, m in zip(plain, made, strict=True):
            both = isinstance(p, torch.Tensor) and isinstance(m, torch.Tensor)
            if not both and p is not m and not (type(p) is type(m) and p == m):
                raise WrongError(f"an output is {m!r:.40} with padding and {p!r:.40} without")
            short = both and p.shape != m.shape
            if short:
                at = [d for d in range(p.dim()) if p.shape[d] != m.shape[d]]
                if p.dim() != m.dim() or at != [self._dim] or m.shape[self._dim] != edge:
                    raise WrongError(
                        f"an output has the shape {list(m.shape)} with padding and "
                        f"{list(p.shape)} without: it cannot be cut in dimension {self._dim}"
                    )
                if p.shape[self._dim] != size:
                    raise WrongError("an output has another number of rows than the inputs")
            cut.append(short)
        return cut

    def _depends(self, index: int, how: str) -> WrongError:
        return WrongError(
            f"output {index} depends on the padding, {how}"
            + ("" if self._mask else "; rows are not computed one by one: give mask=")
        )

    def _compare(self, plain: list[Any], made: list[Any], cut: list[bool], where: str) -> None:
        for index, (p, m) in enumerate(zip(plain, made, strict=True)):
            if isinstance(p, torch.Tensor):
                far = _rows_apart(p, m, self._dim if cut[index] else None)
                if p.dtype != m.dtype or far > _tolerance(p):
                    raise self._depends(index, f"{where}, by {far:.2g} of a row's norm")

    def _same(self, first: list[Any], made: list[Any], filling: str) -> None:
        for index, (p, m) in enumerate(zip(first, made, strict=True)):
            if isinstance(p, torch.Tensor) and not _same(p, m):
                raise self._depends(index, f"where that is {filling}")

    def _compare_gradients(
        self, first: list[torch.Tensor | None], second: list[torch.Tensor | None]
    ) -> None:
        noise = _noise(first)
        for p, m in zip(first, second, strict=True):
            if p is None and m is None:
                continue
            if p is None or m is None or not _near(p, m, noise):
                raise WrongError("a gradient depends on the padding")

    @contextlib.contextmanager
    def _restored(self) -> Iterator[list[str]]:
        """The module's buffers are afterwards what they were; gives the names of those changed."""
        buffers = {
            name: buffer
            for module in [self._module, *_closed_over(self._function)]
            if module is not None
            for name, buffer in module.named_buffers()
        }
        # By value: torch's kernels change running statistics without a new version.
        kept = {key: b.detach().clone() for key, b in buffers.items()}
        changed: list[str] = []
        try:
            yield changed
        finally:
            changed += [key for key, b in buffers.items() if not _same(b, kept[key])]
            with torch.no_grad():
                for key in changed:
                    buffers[key].copy_(kept[key])

    @contextlib.contextmanager
    def _without_dropout(self) -> Iterator[bool]:
        """Gives whether there is some."""
        roots = [self._module, *_closed_over(self._function)]
        modules = [m for root in roots if root is not None for m in root.modules()]
        drops = [m for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        drops = [m for m in drops if m.training and m.p > 0]
        for m in drops:
            m.training = False
        try:
            yield bool(drops)
        finally:
            for m in drops:
                m.training = True


def _closed_over(function: Any) -> list[nn.Module]:
    """Modules that a function uses without being given them."""
    function = getattr(function, "__func__", function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    found = [*cells, *(known.get(name) for name in names), getattr(function, "__self__", None)]
    return [each for each in found if isinstance(each, nn.Module)]


def _filled(x: torch.Tensor, dim: int, filling: Filling) -> torch.Tensor:
    """The padding of a tensor."""
    rows = x.index_select(dim, torch.tensor(filling.rows, device=x.device))
    if filling.wild and x.is_floating_point() and x.numel():
        rows = rows * filling.factor + filling.shift * (x.detach().abs().max() + 1)
    return rows


def _tame(leaves: list[Any]) -> bool:
    """Whether a number outside of a function's domain ends in an exception at the worst.

    On a GPU one that becomes an index ends the process.
    """
    return all(x.device.type == "cpu" for x in leaves if isinstance(x, torch.Tensor))


def _device(leaves: list[Any]) -> str:
    return next(x.device.type for x in leaves if isinstance(x, torch.Tensor))


def _random_state() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _far(p: torch.Tensor, m: torch.Tensor) -> float:
    a, b = p.detach().double(), m.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())  # infinities too
    gap = torch.where(same, 0.0, a - b).norm()
    return float(gap / (torch.where(same & ~a.isfinite(), 0.0, a).norm() + 1e-12))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _noise(gradients: list[torch.Tensor | None]) -> float:
    """What rounding alone may change in a gradient, as a norm.

    A gradient can be nothing else: that of the keys' bias in attention is zero on paper.
    """
    norms = [float(g.detach().double().norm()) for g in gradients if g is not None]
    return 8 * torch.finfo(torch.float32).eps * math.hypot(*norms)


def _tolerance(x: torch.Tensor) -> float:
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return _TOLERANCE.get(x.dtype, 2e-3)


def _rows_apart(p: torch.Tensor, m: torch.Tensor, dim: int | None) -> float:
    def array(x: torch.Tensor) -> Any:
        x = x.detach().cpu()
        if x.is_complex():
            x = torch.view_as_real(x)
        return (x.double() if x.is_floating_point() else x).numpy()

    return independence.apart(array(p), array(m), dim)


def _near(p: torch.Tensor, m: torch.Tensor, noise: float = 0.0) -> bool:
    if p.shape != m.shape or p.dtype != m.dtype:
        return False
    if not p.dtype.is_floating_point:
        return bool(torch.equal(p, m))
    if p.isfinite().all() and float((p.detach().double() - m.detach().double()).norm()) <= noise:
        return True
    return _far(p, m) <= _tolerance(p)


def _gradients(outputs: list[Any], inputs: list[Any]) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of the outputs, for all parameters and inputs. Keeps .grad."""
    total, leaves = None, []
    for x in outputs:
        if isinstance(x, torch.Tensor) and x.requires_grad and x.dtype.is_floating_point:
            weights = torch.cos(torch.arange(x.numel(), device=x.device, dtype=torch.float32))
            part = (x.float() * weights.view(x.shape)).sum()
            total = part if total is None else total + part
    if total is None:
        return []
    seen, todo = set(), [total.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted += sorted((x for x in leaves if not any(x is w for w in wanted)), key=id)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))
