"""Whether the stages compute what the model does: compared on one microbatch, before they train.

A trace sees the operations of a forward. What Python does in backward (an autograd.Function of
one's own, a hook), what it counts, and what it takes for a constant, a trace does not see. So the
model runs one microbatch as it is, forward and backward, and so do the stages, one after the other
in this process, with the same chance. Loss, gradients and buffers must be equal but for rounding.

A batch goes through a pipeline as microbatches. A buffer that counts calls, or averages over them,
then moves more often than in plain training. So two microbatches must leave the buffers as one
batch of both does. Batch norm may differ: its statistics are those of a microbatch, as under
gradient accumulation.

A model on the meta device has no values. It is looked at for functions of its own alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from evener.errors import UsageError
from evener.pipeline.capture import Captured, Trained, place_of
from evener.pipeline.example import Example
from evener.pipeline.operations import root_of, written_by
from evener.pipeline.put_back import as_it_was, quiet_random, values_kept
from evener.pipeline.split import Draw, Split, attribute

Loss = Callable[[Any, Any], torch.Tensor] | None

_SEED = 1234
_ALIKE = 5e-3
_SOME = 4096


@dataclass
class Pass:
    """What one forward and backward gave."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class Verified:
    """The verdict. `evaluates`: why an evaluation in the pipeline would be wrong; "": it is not.
    `unseen`: why stages and model were not compared; "": they were."""

    def __init__(self, evaluates: str = "", unseen: str = "") -> None:
        self.evaluates, self.unseen = evaluates, unseen


def verify(
    model: nn.Module,
    loss: Loss,
    captured: Captured,
    cuts: list[int],
    call: Example,
    both: Example | None = None,
    whole_batches: bool = True,
) -> Verified:
    """Compare on `call`, one microbatch. Raises UsageError that names what cannot be carried.

    both: this microbatch and one more; None: a batch is one microbatch. whole_batches: whether the
    result is to be that of whole batches.
    """
    whole = Trained(model, loss)
    place = place_of(model)
    call, both = pytree.tree_map(
        lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, (call, both)
    )
    given = _given(call)
    with quiet_random(place):
        if any(t.is_meta for t in (*whole.parameters(), *whole.buffers())):
            with as_it_was(whole), contextlib.suppress(NotImplementedError):
                _refuse_functions(whole(*given))
            if both is not None and whole_batches:
                _refuse_counting(_written(captured, whole))
            return Verified(_static(captured), "the model has no values (the meta device)")
        staged = _Staged(captured, cuts, whole, place)
        try:
            eager = list(_eager(whole, given))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} cannot run one microbatch of {call.rows} row(s): "
                f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                "give a batch that divides into microbatches along its first dimension",
            ) from error
        said = ""
        with contextlib.closing(staged.run(call, 2)) as stages:
            for k, (wanted, found) in enumerate(zip(eager, stages, strict=True)):
                if said := _differs(captured, wanted, found):
                    said += " in the second call" if k else ""
                    break
                wanted.gradients.clear()
                found.gradients.clear()
        if said:
            where = _first_operation(whole, given, captured, call)
            raise UsageError(
                f"a pipeline of {type(model).__name__} would compute something else: {said}{where}",
                "keep the forward free of what a trace does not see: counters, caches, hooks, "
                "branches on values; train it with evener.zero or FSDP2 otherwise",
            )
        if both is not None and whole_batches:
            _refuse_counting(_counting(whole, eager[0].buffers, call, both))
        return Verified(_evaluates(whole, given, staged, call, several=both is not None))


def _given(call: Example) -> tuple[Any, ...]:
    return call.args, call.kwargs, call.target


# --- The model as it is ---------------------------------------------------------------------------


def _eager(whole: Trained, given: tuple[Any, ...]) -> Iterator[Pass]:
    """Two calls: what a model counts shows in the second, of whose gradients some values do."""
    trained = {n: p for n, p in whole.named_parameters() if p.requires_grad}
    with as_it_was(whole), values_kept(whole):
        for k in range(2):
            torch.manual_seed(_SEED + k)
            value = whole(*given)
            _refuse_functions(value)
            gradients = _gradients(value, trained, _SOME if k else None)
            yield Pass(value.detach().clone(), gradients,
                       {n: b.detach().clone() for n, b in whole.named_buffers()})  # fmt: skip


def _gradients(
    value: torch.Tensor, of: Mapping[str, torch.Tensor], most: int | None = None
) -> dict[str, torch.Tensor]:
    """The gradients of `of`; of each the first `most` values alone."""
    if not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(of.values()), allow_unused=True)

    def part(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach() if most is None else gradient.flatten()[:most].clone()

    return {
        name: part(g.to_dense() if g.is_sparse else g)
        for name, g in zip(of, found, strict=True)
        if g is not None
    }


def _refuse_functions(value: torch.Tensor) -> None:
    """Raises UsageError where backward runs Python of the model's own."""
    seen: set[Any] = set()
    todo: list[Any] = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            if getattr(node, "_forward_cls", type).__module__.startswith("torch._higher_order_ops"):
                continue  # torch.cond and the like: an operation of the trace
            what, fix = f"the autograd.Function {name}", (
                "write it as operations (x + (f(x) - x).detach() passes a gradient straight "
                "through)"
            )  # fmt: skip
            if name == "CheckpointFunction":
                what, fix = "a reentrant checkpoint", "give use_reentrant=False"
            elif name == "BackwardHookFunction":
                what, fix = "a backward hook of a module", "remove the hook"
            raise UsageError(f"the model has {what}, whose backward a pipeline would lose", fix)
        todo += [one for one, _ in node.next_functions]


# --- The stages -----------------------------------------------------------------------------------


class _Staged:
    """All stages in this process, with the model's own tensors."""

    def __init__(
        self, captured: Captured, cuts: list[int], whole: Trained, place: torch.device
    ) -> None:
        self.captured, self.split, self.whole = captured, Split(captured, cuts), whole
        self.draw = Draw(plain=True)
        self.modules = [
            self.split.module(s, place, self.draw, place=lambda _name, held, _parameter: held)
            for s in range(len(cuts) + 1)
        ]

    def run(self, call: Example, passes: int, grad: bool = True) -> Generator[Pass, None, None]:
        leaves = dict(zip(self.split.input_names, self.captured.flatten(call), strict=True))
        with as_it_was(*self.modules), values_kept(self.whole, *self.modules):
            for k in range(passes):
                torch.manual_seed(_SEED + k)
                with torch.set_grad_enabled(grad):
                    value = self._forward(leaves, call.rows)
                buffers = {n: b.detach().clone() for m in self.modules
                           for n, b in m.named_buffers()}  # fmt: skip
                gradients = self._gradients(value, _SOME if k else None)
                yield Pass(value.detach().clone(), gradients, buffers)

    def _forward(self, leaves: dict[str, Any], rows: int) -> torch.Tensor:
        crossing: tuple[torch.Tensor, ...] = ()
        for s, module in enumerate(self.modules):
            edges = self.split.edge(self.split.bounds[s])
            crossing = tuple(
                self.split.laid(edge, tensor, rows)
                for edge, tensor in zip(edges, crossing, strict=True)
            )
            crossing = module(*crossing, **leaves)
        return crossing[0]

    def _gradients(self, value: torch.Tensor, most: int | None) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        several = {
            f"{s} {n}": p
            for s, module in enumerate(self.modules)
            for n, p in module.named_parameters()
            if p.requires_grad
        }
        for name, gradient in _gradients(value, several, most).items():
            used = name.partition(" ")[2]
            found[used] = found[used] + gradient if used in found else gradient
        return found


# --- Buffers that count calls ---------------------------------------------------------------------


def _counting(
    whole: Trained, after: Mapping[str, torch.Tensor], call: Example, both: Example
) -> str:
    """A buffer that two microbatches leave otherwise than one batch of both; "": none.
    `after`: the buffers after one microbatch."""
    norms = tuple(f"{name}." for name, module in whole.named_modules() if _is_batch_norm(module))
    moved = [
        name
        for name, buffer in whole.named_buffers()
        if not name.startswith(norms) and not _same(buffer, after.get(name))
    ]
    if not moved:
        return ""
    found = []
    for calls in ([call, both.part(call.rows, both.rows)], [both]):
        with as_it_was(whole), values_kept(whole), torch.no_grad():
            torch.manual_seed(_SEED)
            try:
                for one in calls:
                    whole(*_given(one))
            except Exception:  # noqa: BLE001 - a model may take one number of rows alone
                return moved[0]
            found.append({n: b.detach().clone() for n, b in whole.named_buffers()})
    several, once = found
    for name in moved:
        if name not in several or name not in once or not _close(once[name], several[name], 1e-4):
            return name
    return ""


def _written(captured: Captured, whole: Trained) -> str:
    """A buffer that an operation writes, beside batch norm's; "": none."""
    for node in captured.ops:
        for one in written_by(node):
            root, name = root_of(one), str(root_of(one).target)
            owner = name.rpartition(".")[0]
            if root.op == "get_attr" and not _is_batch_norm(whole.get_submodule(owner)):
                return name
    return ""


def _refuse_counting(name: str) -> None:
    if name:
        raise UsageError(
            f"the buffer {name.removeprefix('model.')} would move once per microbatch, and in "
            "plain training it moves once per batch",
            "give average='microbatches' to train as gradient accumulation does, or "
            "microbatches=1, or write the buffer outside of the forward",
        )


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())


# --- Losses of a batch ----------------------------------------------------------------------------


def refuse_mixing(
    model: nn.Module,
    loss: Loss,
    captured: Captured,
    both: Example,
    shares: Callable[[list[list[Any]], list[int]], list[Any]],
) -> str:
    """Raises UsageError where two microbatches' losses do not make that of one batch of both.
    Why that was not compared; "": it was, or something else says so.

    The model itself runs them, in evaluation mode, where nothing is drawn and batch norm takes its
    running statistics: a trace has one branch alone of those that depend on the number of rows.
    both: two microbatches. shares: `Weighing.shares` without its first argument.
    """
    whole, half = Trained(model, loss), both.rows // 2
    place = place_of(model)
    both = pytree.tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, both)
    parts = [both.part(0, half), both.part(half, both.rows)]
    if any(t.is_meta for t in (*whole.parameters(), *whole.buffers())):
        return ""  # `verify` says so
    outs: list[list[Any]] = []
    with quiet_random(place), as_it_was(whole), values_kept(whole), torch.no_grad():
        whole.eval()
        hook = model.register_forward_hook(lambda *x: outs.append(pytree.tree_leaves(x[-1])))
        try:
            found, *several = [float(whole(*_given(one))) for one in (both, *parts)]
        except Exception as error:  # noqa: BLE001 - a model may take one number of rows alone
            return f"the model in eval() raises {type(error).__name__}: {str(error)[:200]}"
        finally:
            hook.remove()
    cure = "give average='microbatches' to train as gradient accumulation does, or microbatches=1"
    why = "the model mixes rows, or branches on how many there are"
    # A loss alone may be near by chance.
    for at_once, *halves in zip(*outs, strict=False):
        rows = [x for x in (at_once, *halves) if isinstance(x, torch.Tensor) and x.dim()]
        if [len(x) for x in rows] == [both.rows, half, both.rows - half] and not _close(
            rows[0], torch.cat(rows[1:]), captured.tolerance
        ):
            raise UsageError(
                f"what {type(model).__name__} gives for {both.rows} rows is not what it gives for "
                f"each half of them: {why}",
                cure,
            )
    try:
        weights = [float(s) for s in shares([captured.flatten(p) for p in parts], [half, half])]
    except UsageError:  # rows without a label say nothing about the others; `agreed` says so
        return ""
    made = sum(share * value for share, value in zip(weights, several, strict=True))
    # Both are the model's own: what autocast rounds, it rounds alike in both.
    if abs(made - found) > min(captured.tolerance, _ALIKE) * max(abs(found), 1e-3):
        raise UsageError(
            f"the loss of {both.rows} rows is {found:.6g}, and those of its two microbatches "
            f"({several[0]:.6g} and {several[1]:.6g}) make {made:.6g}: {why}",
            cure,
        )
    return ""


# --- The comparison -------------------------------------------------------------------------------


def _differs(captured: Captured, eager: Pass, found: Pass, tolerance: float = 1.0) -> str:
    """What differs, in words; "" where nothing does."""
    tolerance = min(tolerance, captured.tolerance)
    if not _close(eager.loss, found.loss, tolerance):
        return f"its loss is {float(found.loss):.6g}, the model's {float(eager.loss):.6g}"
    of_model = {_used(captured, n): g for n, g in eager.gradients.items()}
    largest = max((float(g.norm()) for g in of_model.values()), default=0.0)
    for name, gradient in found.gradients.items():
        wanted = of_model.pop(name, None)
        if wanted is None:
            wanted = torch.zeros_like(gradient)
        if not _close(wanted, gradient, tolerance, largest):
            return f"the gradient of {name} differs"
    for name, wanted in of_model.items():
        if float(wanted.norm()) > tolerance * largest:
            return f"the gradient of {name} is lost"
    buffers = {_used(captured, n): b for n, b in eager.buffers.items()}
    for name, buffer in found.buffers.items():
        wanted = buffers.get(name)
        if wanted is not None and not _close(wanted, buffer, tolerance):
            return f"the buffer {name} differs after it"
    return ""


def _used(captured: Captured, name: str) -> str:
    """The name in the stages of a tensor of the whole model."""
    short = name.removeprefix("model.")
    return captured.aliases.get(short, short)


def _close(wanted: torch.Tensor, found: torch.Tensor, tolerance: float, scale: float = 0.0) -> bool:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return bool(torch.equal(wanted, found))
    if torch.equal(wanted, found):
        return True
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (wanted, found))
    if not bool(a.isfinite().all()):
        return bool(torch.equal(a.isfinite(), b.isfinite()))
    apart, length = float((a - b).norm()), float(a.norm())
    return apart <= tolerance * (length + 1e-3 * scale)


class _Seen(TorchDispatchMode):
    """What each operation gave, as (name, a sum that tells values apart)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.numel():
                flat = one.detach().to(torch.complex128).flatten()
                self.found.append((str(func), float((flat * (1 + 0.5j)).abs().sum())))
        return out


def _first_operation(
    whole: Trained, given: tuple[Any, ...], captured: Captured, call: Example
) -> str:
    """The first operation that the model did not run so, and its module, in words."""
    try:
        eager = _Seen()
        with as_it_was(whole), values_kept(whole), torch.no_grad():
            torch.manual_seed(_SEED)
            with eager:
                whole(*given)
            known = {(name, round(value, 4)) for name, value in eager.found}
            torch.manual_seed(_SEED)
            values = iter(captured.flatten(call))
            here: dict[fx.Node, Any] = {}
            for node in captured.module.graph.nodes:
                if node.op == "placeholder":
                    here[node] = next(values)
                elif node.op == "get_attr":
                    here[node] = attribute(captured.module, str(node.target))
                elif node.op == "call_function":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: here[n])
                    with _Seen() as ran:
                        here[node] = node.target(*args, **kwargs)
                    if any((n, round(v, 4)) not in known for n, v in ran.found):
                        stack = list((node.meta.get("nn_module_stack") or {}).values())
                        path = str(stack[-1][0]).removeprefix("model.") if stack else ""
                        return f"; the first operation that differs is {node.target}" + (
                            f" of {path}" if path else ""
                        )
    except Exception:  # noqa: BLE001 - the difference itself is said
        return ""
    return ""


# --- Evaluation -----------------------------------------------------------------------------------


def _static(captured: Captured) -> str:
    """Why an evaluation would be wrong, from the operations alone."""
    for node in captured.ops:
        name = str(node.target)
        if "batch_norm" in name:
            return "batch norm takes its statistics from the batch in training"
        if any(word in name for word in ("rand", "bernoulli", "normal", "multinomial", "uniform")):
            return f"{name} draws in training"
    return ""


def _evaluates(
    whole: Trained, given: tuple[Any, ...], staged: _Staged, call: Example, several: bool
) -> str:
    """Why the stages without dropout do not give what the model gives in eval(); "": they do.
    `several`: whether a batch is several microbatches."""
    before = {n: b.detach().clone() for n, b in whole.named_buffers()}
    with as_it_was(whole), values_kept(whole), torch.no_grad():
        whole.eval()
        try:
            value = whole(*given)
        except Exception as error:  # noqa: BLE001 - a model may train alone
            return f"in eval() the model raises {type(error).__name__}"
        wanted = Pass(value.detach().clone(), {},
                      {n: b.detach().clone() for n, b in whole.named_buffers()})  # fmt: skip
    if several:
        for name, buffer in wanted.buffers.items():
            if not _same(buffer, before.get(name)):
                return (f"in eval() it moves the buffer {name.removeprefix('model.')}, which "
                        "would happen once per microbatch")  # fmt: skip
    staged.draw.off = True
    try:
        with torch.no_grad():
            (found,) = staged.run(call, 1, grad=False)
    finally:
        staged.draw.off = False
    # The same operations on the same numbers, in 16 bits too; and a loss alone, without gradients,
    # may be near by chance.
    said = _differs(staged.captured, wanted, found, 500 * torch.finfo(torch.float32).eps)
    return said and f"in eval() the model does something else than leave out dropout ({said})"
