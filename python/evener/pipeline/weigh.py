"""What a microbatch counts in the loss of its batch.

The mean of the microbatches' losses is the batch's loss only where the loss is a mean over rows and
all microbatches have as many. A sum counts each fully; a mean over labels that are not ignored, or
over a mask, counts each by how many it has. Which it is follows from the operations that end in the
loss. What they do not say (a product of means, negatives inside the batch) is compared: the loss of
a batch with that of its microbatches, without dropout.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import fx

from evener.base.log import logger
from evener.errors import UsageError
from evener.pipeline.capture import Captured
from evener.pipeline.example import Example
from evener.pipeline.operations import is_random, root_of, target_of, written_by
from evener.pipeline.put_back import quiet_random
from evener.pipeline.split import Draw, Seeded, attribute

_aten = torch.ops.aten

Kind = Literal["rows", "sum", "count", "any"]

# Operations through which a scalar goes as it is, or times a number.
_SAME = {
    "aten::to", "aten::_to_copy", "aten::alias", "aten::clone", "aten::view", "aten::reshape",
    "aten::squeeze", "aten::neg", "aten::contiguous", "aten::float", "aten::view_as",
}  # fmt: skip
# Losses with `reduction`: 1 is the mean, 2 the sum.
_LOSSES = {
    "aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss",
    "aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits", "aten::kl_div",
    "aten::soft_margin_loss", "aten::margin_ranking_loss", "aten::hinge_embedding_loss",
    "aten::cosine_embedding_loss", "aten::triplet_margin_loss", "aten::poisson_nll_loss",
}  # fmt: skip
_CHOSEN = {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d"}


@dataclass(frozen=True)
class Counted:
    """A denominator of the loss: `root` adds up over microbatches, `end` is made from it; or, for
    a mean over chosen classes, `root` is the target."""

    root: fx.Node
    end: fx.Node | None = None
    weight: fx.Node | None = None
    ignored: int = -100


@dataclass(frozen=True)
class Weighing:
    """How microbatches are weighed. "mean": all alike, whatever the loss is."""

    kind: Literal["rows", "sum", "count", "mean"]
    counted: Counted | None = None

    @classmethod
    def of(cls, captured: Captured, kind: Any) -> Weighing:
        """The one of this kind, on a rank that was told the kind."""
        said = weighing(captured) if kind == "count" else None
        return said or cls(kind)

    def shares(
        self, captured: Captured, leaves: list[list[Any]], rows: list[int]
    ) -> list[Fraction | float]:
        """What each microbatch's loss is multiplied by. `leaves`: the call's, by microbatch."""
        if self.kind == "sum":
            return [Fraction(1)] * len(rows)
        if self.kind == "mean":
            return [Fraction(1, len(rows))] * len(rows)
        if self.kind == "rows":
            return [Fraction(each, sum(rows)) for each in rows]
        assert self.counted is not None
        run = _Inputs(captured)
        counts = [run.count(self.counted, given) for given in leaves]
        root = [float(core) for core, _ in counts]
        if self.counted.end is None:
            whole = sum(root)
            parts = root
            if (none := next((m for m, part in enumerate(parts) if not part), None)) is not None:
                raise UsageError(
                    f"microbatch {none} has no label that counts, and its mean loss is 0 / 0",
                    "give fewer microbatches, other rows, or a loss that is a sum",
                )
        else:
            # Clamped, or with an epsilon: that of the whole batch is made from the sum.
            total = sum((core for core, _ in counts[1:]), counts[0][0])
            whole = float(run.end(self.counted, leaves[0], total))
            parts = [float(end) for _, end in counts]
        if all(float(part).is_integer() for part in (*parts, whole)) and whole:
            return [Fraction(int(part), int(whole)) for part in parts]
        return [part / whole if whole else float("nan") for part in parts]


def scaled(loss: torch.Tensor, share: Fraction | float) -> torch.Tensor:
    """`loss` times `share`; divided where that is what the caller would write."""
    if not isinstance(share, Fraction):
        return loss * share
    if share.denominator == 1:
        return loss if share == 1 else loss * int(share)
    return loss / share.denominator if share.numerator == 1 else loss * float(share)


def _here(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


class _Inputs:
    """What depends on inputs alone, computed for one microbatch's, on the CPU: labels are small."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured

    def value(self, node: fx.Node, given: list[Any], known: dict[fx.Node, Any]) -> Any:
        if node in known:
            return known[node]
        if node.op == "placeholder":
            found = _here(given[self.captured.inputs.index(node)])
        elif node.op == "get_attr":
            found = _here(attribute(self.captured.module, str(node.target)))
        else:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: self.value(n, given, known)
            )
            args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        known[node] = found
        return found

    @torch.no_grad()
    def count(self, counted: Counted, given: list[Any]) -> tuple[Any, Any]:
        known: dict[fx.Node, Any] = {}
        root = self.value(counted.root, given, known)
        if counted.end is not None:
            return root, self.value(counted.end, given, known)
        chosen = root != counted.ignored
        if counted.weight is None:
            return chosen.sum(), None
        weight = self.value(counted.weight, given, known)
        return weight[root[chosen]].double().sum(), None

    @torch.no_grad()
    def end(self, counted: Counted, given: list[Any], total: Any) -> Any:
        assert counted.end is not None
        return self.value(counted.end, given, {counted.root: total})


def weighing(captured: Captured) -> Weighing | None:
    """What the operations say; None: they do not."""
    kind, counted = _kind(captured, captured.loss)
    if kind in ("rows", "sum") or (kind == "count" and counted is not None):
        return Weighing(kind, counted)
    return None


_Found = tuple[Kind | None, Counted | None]


def _kind(captured: Captured, node: Any) -> _Found:
    if not isinstance(node, fx.Node) or not _depends(node):
        return "any", None
    target = target_of(node)
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    args = node.args
    if name in _SAME:
        return _kind(captured, args[0])
    if name == "aten::mul":
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            if not isinstance(other, fx.Node) or not _depends(other):
                return _kind(captured, one)
        return None, None
    if name == "aten::div":
        kind, counted = _kind(captured, args[0])
        if not isinstance(args[1], fx.Node) or not _depends(args[1]):
            return kind, counted
        if kind == "sum" and args[1] in captured.free:
            return "count", _denominator(args[1])
        return None, None
    if name in ("aten::add", "aten::sub"):
        return _both(_kind(captured, args[0]), _kind(captured, args[1]))
    if name == "aten::sum":
        return ("sum", None) if _of_all_rows(captured, args[0]) else (None, None)
    if name == "aten::mean":
        return ("rows", None) if _of_all_rows(captured, args[0]) else (None, None)
    if name in _LOSSES:
        kinds: dict[int, Kind] = {1: "rows", 2: "sum"}
        return kinds.get(_given(node, "reduction", 1)), None
    if name in _CHOSEN:
        return _of_classes(captured, node)
    return None, None


def _of_classes(captured: Captured, node: fx.Node) -> _Found:
    """A cross-entropy: its mean is over the labels that are not ignored."""
    reduction = _given(node, "reduction", 1)
    if reduction == 2:
        return "sum", None
    target, weight = node.args[1], _given(node, "weight", None)
    if reduction != 1 or not isinstance(target, fx.Node):
        return None, None
    meta = target.meta.get("val")
    if isinstance(meta, torch.Tensor) and meta.is_floating_point():
        return "rows", None
    if target not in captured.free:
        return None, None
    if weight is not None and (weight not in captured.free or not _has_values(captured, weight)):
        return None, None
    return "count", Counted(target, None, weight, int(_given(node, "ignore_index", -100)))


def _has_values(captured: Captured, node: fx.Node) -> bool:
    """Whether what a node is made from is there, and not on the meta device."""
    todo = [node]
    while todo:
        one = todo.pop()
        if one.op == "placeholder":
            return False
        if one.op == "get_attr" and attribute(captured.module, str(one.target)).is_meta:
            return False
        todo += one.all_input_nodes
    return True


def _both(one: _Found, other: _Found) -> _Found:
    """How a sum of two terms is weighed. A term that no input changes goes with every mean."""
    if one[0] == "any":
        one, other = other, one
    if other[0] == "any":
        return one if one[0] != "sum" else (None, None)
    return one if one == other and one[0] is not None else (None, None)


def _denominator(node: fx.Node) -> Counted | None:
    """A number that inputs make: what adds up in it, and what is made from that."""
    at = node
    while True:
        target = target_of(at)
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        if name in ("aten::sum", "aten::count_nonzero") or target is _aten.sym_size.int:
            return Counted(at, node)
        if name == "aten::numel" or target is _aten.sym_numel.default:
            return Counted(at, node)
        inner = [one for one in at.all_input_nodes if _depends(one)]
        if len(inner) != 1 or name not in (
            *_SAME, "aten::clamp", "aten::clamp_min", "aten::add", "aten::mul", "aten::div",
            "aten::maximum",
        ):  # fmt: skip
            if target in (operator.mul, operator.add) and len(inner) == 1:
                at = inner[0]
                continue
            return None
        at = inner[0]


def _of_all_rows(captured: Captured, node: Any) -> bool:
    """Whether a tensor has as many values as its batch has rows, times a number."""
    meta = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(meta, torch.Tensor):
        return False
    if not captured.dynamic:
        return bool(meta.dim()) and (meta.shape[0] % captured.rows == 0)
    one, many = (torch.Size(captured.shape(meta, rows)).numel() for rows in (3, 12))
    return one > 0 and many == 4 * one


def _depends(node: fx.Node) -> bool:
    """Whether an input of the model goes into it."""
    todo = [node]
    seen: set[fx.Node] = set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder":
            return True
        todo += one.all_input_nodes
    return False


def _given(node: fx.Node, name: str, default: Any) -> Any:
    """An argument of an operation, by its name."""
    for at, argument in enumerate(target_of(node)._schema.arguments):
        if argument.name == name:
            return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)
    return default


# --- The comparison -------------------------------------------------------------------------------


def agreed(captured: Captured, call: Example, sizes: list[int], place: torch.device) -> Weighing:
    """How the microbatches of `call` are weighed, seen on one or two of them.

    Raises UsageError where no weights make the loss of a batch from those of its microbatches.
    """
    said = weighing(captured)
    meta = any(t.is_meta for t in (*captured.module.parameters(), *captured.module.buffers()))
    if len(sizes) == 1:
        return said or Weighing("mean")
    rows = [sizes[0], max(1, sizes[0] - 1)] if sizes[0] > 1 else [1, 1]
    if call.rows < sum(rows) or not captured.fits(sum(rows)) or not captured.fits(rows[1]):
        rows = [sizes[0], sizes[0]]
    if meta or not captured.fits(sum(rows)) or _coupled(captured):
        if said is None:
            raise _refused("how its loss is made from the rows is not seen in its operations")
        return said
    terms = _terms(captured)
    shares: list[float]
    with quiet_random(place), torch.no_grad():
        leaves = captured.flatten(call)
        parts, begin = [], 0
        for each in rows:
            parts.append(_rows(captured, leaves, begin, begin + each, place))
            begin += each
        whole = _values(captured, terms, _rows(captured, leaves, 0, begin, place))
        several = [_values(captured, terms, part) for part in parts]
    for one in [said] if said is not None else [Weighing("rows"), Weighing("sum")]:
        try:
            shares = [float(share) for share in one.shares(captured, parts, rows)]
        except UsageError as error:  # rows without a label say nothing about the others
            logger.warning(
                "pipeline: how microbatches are weighed follows from the loss's operations alone, "
                "and was not compared on the example: %s",
                error.problem,
            )
            return one
        sums = [
            sum(share * values[k] for share, values in zip(shares, several, strict=True))
            for k in range(len(terms))
        ]
        # Each term by its own size: a small one would go under in the whole.
        if all(abs(made - term) <= captured.tolerance * max(abs(term), 1e-3 * abs(whole[0]))
               for made, term in zip(sums, whole, strict=True)):  # fmt: skip
            return one
    raise _refused(
        f"the loss of {sum(rows)} rows is {whole[0]:.6g}, and of {rows[0]} and {rows[1]} of "
        f"them {several[0][0]:.6g} and {several[1][0]:.6g}"
    )


def _refused(why: str) -> UsageError:
    return UsageError(
        f"the loss of a batch is no weighted mean or sum of its microbatches' losses: {why}",
        "give average='microbatches' to train with the plain mean of the microbatches' losses, as "
        "gradient accumulation does, or microbatches=1",
    )


def _coupled(captured: Captured) -> bool:
    """Whether rows of a batch depend on each other by what accumulation leaves to each microbatch:
    batch norm, buffers that a forward writes, noise that cannot be left out."""
    for node in captured.ops:
        target = target_of(node)
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        if "batch_norm" in name and _given(node, "training", True):
            return True
        if any(root_of(one).op == "get_attr" for one in written_by(node)):
            return True
        if is_random(node) and not any(
            argument.name in ("dropout_p", "train") for argument in target._schema.arguments
        ):
            return True
    return False


def _terms(captured: Captured) -> list[fx.Node]:
    """The loss, and what is added up in it."""
    found, todo = [captured.loss], [captured.loss]
    while todo:
        node = todo.pop()
        target = target_of(node)
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        inner = [one for one in node.all_input_nodes if _depends(one)]
        if name in ("aten::add", "aten::sub") or (
            len(inner) == 1 and name in (*_SAME, "aten::mul", "aten::div")
        ):
            if name in ("aten::add", "aten::sub"):
                found += inner
            todo += inner
    return found


def _values(captured: Captured, wanted: list[fx.Node], leaves: list[Any]) -> list[float]:
    """The values of nodes for one call, without chance."""
    given, here, draw = iter(leaves), dict[fx.Node, Any](), Draw(off=True)
    last = {one: node for node in captured.module.graph.nodes for one in node.all_input_nodes}
    found: dict[fx.Node, float] = {}
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            here[node] = next(given)
        elif node.op == "get_attr":
            here[node] = attribute(captured.module, str(node.target))
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: here[n])
            target: Any = node.target
            if is_random(node):
                target = Seeded(target, 0, draw, torch.device("cpu"))
            here[node] = target(*args, **kwargs)
        if node in wanted:
            found[node] = float(here[node].double().sum())
        for one in node.all_input_nodes:
            if last[one] is node:
                del here[one]
    return [found[node] for node in wanted]


def _rows(
    captured: Captured, leaves: list[Any], begin: int, end: int, place: torch.device
) -> list[Any]:
    return [
        (leaf[begin:end] if split else leaf).to(place) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, split in zip(leaves, captured.split, strict=True)
    ]
