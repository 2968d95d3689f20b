"""A model as a list of operations: what a pipeline is cut from.

torch.export traces the model in the mode that each of its modules is in, with the size of the batch
left open where the model allows it. What comes out is put into a form that can be cut anywhere:

- only what the loss needs is kept, and checks of shapes go;
- what depends on inputs and constants alone (masks, positions, sizes) is `free`: each stage that
  uses it computes it for itself, so that neither integers nor masks cross a cut;
- what cannot be taken apart is `glued`: an operation that returns several tensors and the
  operations that take them out, a tensor and all that writes into it in place;
- a region under autocast or no_grad becomes its operations, each under it (`Under`).

A trace keeps neither what Python does in backward (an autograd.Function of one's own, a hook) nor
values that it took for constants. The first is refused here or by `verify`; the second are guards:
numbers, flags, shapes and dtypes of a later call must be those of the example.

The rest, in the order of execution, are the operations that a cut divides: position k has the first
k of them on its left. Parameters keep their names; one tensor under several names is tied, and goes
under the first of them.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from evener.base.given import given
from evener.base.log import logger
from evener.errors import UsageError
from evener.pipeline.example import Example, Tensor, check_same, leaf_of
from evener.pipeline.operations import Under, is_op, is_random, root_of, target_of, written_by
from evener.pipeline.put_back import as_it_was

_DROPPED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


_PREFIX = "model."  # what `Trained` puts before the model's own names


@dataclass
class Captured:
    """A model in the form that a pipeline is cut from.

    `module`: holds the graph and, under their original names, the parameters. `ops`: operations
    that a cut divides, in order. `free`: nodes that each stage computes for itself. `glued[k]`:
    position k is no cut. `inputs`: placeholders, in the order of the flattened call. `batch`: the
    symbols that stand for the rows of the batch (empty: its size is fixed to `rows`). `split`:
    which leaves of a call have its rows. `leaves`: each leaf of the example, a tensor as (shape,
    dtype); `where`: how it is written. `guards`: raises for sizes that the trace does not hold for.
    `tied`: names that share one tensor, first the one in use. `kept`: the names of the model's
    state dict. `blocks`: each operation's. `autocast`: whether it was on when this was traced.
    """

    module: fx.GraphModule
    ops: list[fx.Node]
    free: set[fx.Node]
    glued: list[bool]
    inputs: list[fx.Node]
    loss: fx.Node
    spec: pytree.TreeSpec
    rows: int
    batch: tuple[Any, ...]
    split: tuple[bool, ...]
    leaves: list[Any]
    where: list[str]
    guards: Callable[..., Any] | None
    tied: list[tuple[str, ...]]
    aliases: dict[str, str]
    kept: set[str]
    blocks: list[str]
    autocast: tuple[Any, ...] = ()

    @property
    def dynamic(self) -> bool:
        """Whether other numbers of rows may be run."""
        return bool(self.batch)

    @property
    def tolerance(self) -> float:
        """Relative, of a tensor's length: of equal operations whose sums have another order."""
        kinds = {
            one.dtype
            for node in self.module.graph.nodes
            for one in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())
        }
        coarse = max((torch.finfo(kind).eps for kind in kinds), default=1e-7)
        return min(2e-2, 500 * coarse)

    def fits(self, rows: int) -> bool:
        """Whether what was traced holds for `rows` rows: a branch on their number may not."""
        if rows == self.rows:
            return True
        if not self.dynamic:
            return False
        if self.guards is None:
            return True
        given = [
            torch.empty((rows if split else leaf.shape[0], *leaf.shape[1:])
                        if leaf.shape else (), dtype=leaf.dtype, device="meta")
            if isinstance(leaf, Tensor) else leaf
            for leaf, split in zip(self.leaves, self.split, strict=True)
        ]  # fmt: skip
        try:
            self.guards(*given)
        except AssertionError:
            return False
        return True

    def size(self, value: Any, rows: int) -> int:
        """A size of a tensor, which may be symbolic, for batches of `rows` rows."""
        if isinstance(value, int):
            return value
        return int(value.node.expr.xreplace(dict.fromkeys(self.batch, rows)))

    def shape(self, value: torch.Tensor, rows: int) -> tuple[int, ...]:
        return tuple(self.size(one, rows) for one in value.shape)

    def bytes(self, node: fx.Node, rows: int) -> int:
        """Bytes of a node's tensor, or tensors, for batches of `rows`."""
        meta = node.meta.get("val")
        several = meta if isinstance(meta, tuple | list) else (meta,)
        return sum(
            math.prod(self.shape(one, rows)) * one.element_size()
            for one in several
            if isinstance(one, torch.Tensor)
        )

    def flatten(self, example: Example) -> list[Any]:
        """The leaves of a call, in the order of `inputs`. Raises UsageError for another call."""
        kwargs = example.kwargs
        if set(kwargs) != set(self._names):
            raise UsageError(
                f"the model is called with {sorted(kwargs)}, and was captured with "
                f"{sorted(self._names)}",
                "call it with the arguments of the example",
            )
        ordered = Example(example.args, {name: kwargs[name] for name in self._names},
                          example.target)  # fmt: skip
        leaves, spec = pytree.tree_flatten((ordered.args, ordered.kwargs, ordered.target))
        if spec != self.spec:
            raise UsageError(
                f"the model is called with {spec}, and was captured with {self.spec}",
                "call it with the arguments of the example",
            )
        rows = example.rows
        for name, leaf, known, split in zip(self.where, leaves, self.leaves, self.split,
                                            strict=True):  # fmt: skip
            check_same(name, leaf, known, split, rows)
        return leaves

    _names: tuple[str, ...] = ()


class Trained(nn.Module):
    """The model and its loss as one module: the loss is cut and timed with the rest, and what else
    the model returns (logits, caches) is not kept."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        # A loss that a module keeps as an attribute (`aux_loss`) is there for `self.loss`, and gone
        # after it: torch.export takes no module that a call has changed.
        with as_it_was(self, buffers=False) if _tracing() else contextlib.nullcontext():
            output = self.model(*args, **kwargs)
            found = _own_loss(output) if self.loss is None else self.loss(output, target)
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
            return found.reshape(())
        raise UsageError(f"loss= returns no scalar, but {_said(found)}",
                         "return one number: the mean or the sum over the batch")  # fmt: skip


def _tracing() -> bool:
    return torch.compiler.is_exporting()


def _own_loss(output: Any) -> torch.Tensor:
    """The loss that a model returns: a scalar, or `loss` in a mapping. Raises UsageError."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.is_floating_point():
        return found
    raise UsageError(
        f"the model returns no loss, but {_said(output)}",
        "give loss=function(output, target) and target=, or the labels to a model of transformers",
    )


def _said(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return type(output).__name__


@given
def capture(
    model: nn.Module,
    example: Any,
    *,
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Captured:
    """Trace `model` (and `loss(output, target)`) on `example`.

    Each module is traced in the mode that it is in. The model is left as it was. It may be on the
    meta device. Without `loss` the model must return its loss: a scalar, or an output with `loss`
    in it, as transformers' models do when they are given labels. Raises UsageError where the model
    cannot be exported, with what torch said.
    """
    call = Example.of(example, target)
    if (loss is None) != (call.target is None):
        raise UsageError(
            "a loss function and a target belong together",
            "give both loss= and target=, or none where the model returns its loss",
        )
    # Shapes are traced, not values: inputs go to where the model is.
    place = place_of(model)
    call = pytree.tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, call)
    whole = Trained(model, loss)
    _refuse_hooks(whole)
    if not model.training:
        logger.warning(
            "pipeline: %s is in eval() mode and is trained so, without dropout: call model.train() "
            "first where it has some", type(model).__name__,
        )  # fmt: skip
    with as_it_was(whole):
        program, batch_of = _export(whole, call)
    module, guards = _opened(program)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    _inline_regions(module)
    found = pytree.tree_leaves(graph.output_node().args)[0]
    for node in list(graph.nodes):
        if target_of(node) in _DROPPED:
            graph.erase_node(node)
    aliases, tied = _names(module)
    _eliminate(graph)
    inputs = [node for node in placeholders if node in set(graph.nodes)]
    if len(inputs) != len(placeholders):
        raise AssertionError("a placeholder went lost")
    _sizes_of_inputs(graph, inputs, batch_of)
    _gather_getitems(graph)
    free = _free(graph, module)
    ops = [node for node in graph.nodes if is_op(node) and node not in free]
    if not ops:
        raise UsageError("the loss depends on no parameter", "give a model that can be trained")
    given = (call.args, call.kwargs, call.target)
    leaves, spec = pytree.tree_flatten(given)
    rows = call.rows
    split = tuple(isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == rows
                  for x in leaves)  # fmt: skip
    return Captured(
        module=module,
        ops=ops,
        free=free,
        glued=_glued(ops),
        inputs=inputs,
        loss=found,
        spec=spec,
        rows=rows,
        batch=batch_of,
        split=split,
        leaves=[leaf_of(value) for value in leaves],
        where=[_written(path) for path, _ in pytree.tree_flatten_with_path(given)[0]],
        guards=guards,
        tied=tied,
        aliases=aliases,
        kept={
            *model.state_dict(),
            *(
                f"loss.{name}"
                for name in (loss.state_dict() if isinstance(loss, nn.Module) else ())
            ),
        },
        blocks=[_block(node, model) for node in ops],
        autocast=autocast_now(),
        _names=tuple(call.kwargs),
    )


def place_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def autocast_now() -> tuple[Any, ...]:
    """Where autocast is on, and to what."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def _written(path: Any) -> str:
    """A leaf as the caller writes it: `input 0`, `labels`, `target`."""
    part, *inner = path
    rest = pytree.keystr(tuple(inner[1:]))
    if part.idx == 2:
        return f"target{pytree.keystr(tuple(inner))}"
    return f"{inner[0].key}{rest}" if part.idx == 1 else f"input {inner[0].idx}{rest}"


def _refuse_hooks(whole: Trained) -> None:
    """Raises UsageError for a parameter with a hook: a stage has a parameter of its own."""
    for name, parameter in whole.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name.removeprefix(_PREFIX)} has a hook on its gradient, which a pipeline would "
                "lose",
                "remove the hook, and change .grad after pipe.step()",
            )


@contextlib.contextmanager
def _no_hooks() -> Iterator[None]:
    """Refuse hooks that the forward puts on tensors: a trace keeps nothing of them."""

    def refused(*_: Any, **__: Any) -> Any:
        raise UsageError(
            "the forward registers a hook on a tensor, which a pipeline would lose",
            "write what the hook does as operations, or leave it out where it only looks",
        )

    with (
        mock.patch.object(torch.Tensor, "register_hook", refused),
        mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", refused),
    ):
        yield


def _opened(program: Any) -> tuple[fx.GraphModule, Callable[..., Any] | None]:
    """The program's module, and what checks sizes for it, taken out of its graph."""
    module = program.module(check_guards=True)
    guards = getattr(module, "_guards_fn", None)
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
    return module, guards


_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def _inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of regions into the graph itself, each under what the region is under.

    torch.export makes one operation of a region. A stage that holds it would hold all of it, and
    chance and writes inside of it would not be seen.
    """
    graph = module.graph
    while found := [node for node in graph.nodes if target_of(node) in (_AUTOCAST, _GRAD)]:
        _inline(module, found[0])


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    """Put one region's operations where it stands."""
    graph = module.graph
    inner: Any
    given: Any
    if target_of(node) is _AUTOCAST:
        device, dtype, enabled, _, inner, *given = node.args
        under: dict[str, Any] = {"autocast": (str(device), dtype, bool(enabled))}
    else:
        grad, inner, *given = node.args
        under = {"grad": bool(grad)}
    # A region inside another is under both.
    outer = []
    around: Any = node.target
    while isinstance(around, Under):
        outer.append({"autocast": around.autocast, "grad": around.grad})
        around = around.target
    body = getattr(module, str(inner.target))
    made: dict[fx.Node, Any] = {}
    inputs = iter(given)
    out: Any = None
    with graph.inserting_before(node):
        for one in body.graph.nodes:
            if one.op == "placeholder":
                made[one] = next(inputs)
            elif one.op == "output":
                out = fx.node.map_arg(one.args[0], lambda n: made[n])
            elif one.op == "get_attr":
                name = f"{inner.target}_{one.target}".replace(".", "_")
                if not hasattr(module, name):
                    setattr(module, name, _at(body, str(one.target)))
                made[one] = graph.get_attr(name)
                made[one].meta = dict(one.meta)
            else:
                new = made[one] = graph.node_copy(one, lambda n: made[n])
                if new.target is not operator.getitem:
                    for each in (under, *reversed(outer)):
                        new.target = Under(new.target, **each)  # type: ignore[arg-type]
    for user in list(node.users):
        at = user.args[1] if user.target is operator.getitem else None
        if not isinstance(at, int):
            raise AssertionError("a region under autocast returns several values")
        user.replace_all_uses_with(out[at])
        graph.erase_node(user)
    graph.erase_node(node)
    if not inner.users:
        graph.erase_node(inner)


def _at(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _export(whole: Trained, call: Example) -> tuple[Any, tuple[Any, ...]]:
    """The exported program, and the symbols of its batch; () where its size is fixed."""
    given = (call.args, call.kwargs, call.target)
    rows = call.rows

    def open_rows(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        return {0: Dim.AUTO} if batched else None

    first: Exception | None = None
    # One row would be taken for a constant by torch.export.
    if rows > 1:
        try:
            shapes = pytree.tree_map(open_rows, given)
            with _no_hooks():
                program = torch.export.export(whole, given, strict=False, dynamic_shapes=shapes)
            return program, _symbols(program)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - then with the size that it has
            first = error
    try:
        with _no_hooks():
            program = torch.export.export(whole, given, strict=False)
        if first is not None:
            logger.info("pipeline: the model was captured for %d row(s) a microbatch alone: %s",
                        rows, str(first).strip().split("\n")[0][:200])  # fmt: skip
        return program, ()
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever stops it is said
        said = str(error).strip().split("\n")[0][:300]
        raise UsageError(
            f"torch.export cannot trace {type(whole.model).__name__}: {said}",
            "make the forward free of branches on values; "
            "torch.export.export(model, args, strict=False) shows where it stops",
        ) from (first or error)


def _symbol(size: Any) -> Any:
    """The expression of a size that is open; None for a number."""
    if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
        return None
    return size.node.expr


def _symbols(program: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim():
            size = value.shape[0]
            if (symbol := _symbol(size)) is not None and symbol not in found:
                found.append(symbol)
    return tuple(found)


def _names(module: fx.GraphModule) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """Rename tensors to their names in the model, one name for one tensor.

    Returns every name of a tensor to the one in use, and the groups of names that are tied.
    """
    by_tensor: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    named = [*module.named_parameters(remove_duplicate=False),
             *module.named_buffers(remove_duplicate=False)]  # fmt: skip
    for name, tensor in named:
        by_tensor.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    aliases: dict[str, str] = {}
    for names in by_tensor.values():
        for name in names:
            aliases[name] = names[0]
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.target = aliases.get(str(node.target), str(node.target))
    short = {name: name.removeprefix(_PREFIX) for name in aliases}
    module.meta["evener_short"] = short
    tied = [tuple(short[name] for name in names) for names in by_tensor.values() if len(names) > 1]
    return {short[name]: short[first] for name, first in aliases.items()}, tied


def _eliminate(graph: fx.Graph) -> None:
    """Dead code goes; what writes in place stays only where something reads what it writes to."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for written in written_by(node):
            writers.setdefault(root_of(written), []).append(node)
    needed: set[fx.Node] = set()
    todo = [graph.output_node()]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        todo += node.all_input_nodes
        todo += writers.get(root_of(node), [])
    for node in reversed(list(graph.nodes)):
        # An update of a buffer (a counter, running statistics) is a part of training.
        if (node not in needed and node.op != "placeholder" and not _writes_state(node)
                and not node.users):  # fmt: skip
            graph.erase_node(node)


def _writes_state(node: fx.Node) -> bool:
    return any(root_of(written).op == "get_attr" for written in written_by(node))


def _sizes_of_inputs(graph: fx.Graph, inputs: list[fx.Node], batch: tuple[Any, ...]) -> None:
    """Where the size of an activation is the batch's, take it from an input."""
    if not batch:
        return
    source: dict[Any, fx.Node] = {}
    for node in inputs:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if (symbol := _symbol(value.shape[0])) is not None:
            source.setdefault(symbol, node)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or (
            target_of(node) is not torch.ops.aten.sym_size.int
        ):
            continue
        origin = source.get(value.node.expr)
        if origin is not None and node.args[0] is not origin:
            node.args = (origin, 0)


def _gather_getitems(graph: fx.Graph) -> None:
    """What takes one tensor out of several comes right after what made them."""
    for node in list(graph.nodes):
        takers = [user for user in node.users if user.target is operator.getitem]
        for taker in reversed(takers):
            node.append(taker)


def _free(graph: fx.Graph, module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on inputs and buffers alone, and on no chance and no writing."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    written = {root_of(one) for node in graph.nodes for one in written_by(node)}
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            free.add(node)
        elif node.op == "get_attr":
            if node.target not in parameters and node not in written:
                free.add(node)
        elif (is_op(node) and all(one in free or _is_module(one, module)
                                   for one in node.all_input_nodes)
              and not is_random(node) and not written_by(node)
              and root_of(node) not in written and node is not graph.output_node()):  # fmt: skip
            free.add(node)
    return free


def _is_module(node: fx.Node, module: fx.GraphModule) -> bool:
    return node.op == "get_attr" and isinstance(
        getattr(module, str(node.target), None), fx.GraphModule
    )


def _glued(ops: list[fx.Node]) -> list[bool]:
    """glued[k]: a cut before operation k would take apart what belongs together."""
    place = {node: k for k, node in enumerate(ops)}
    glued = [False] * (len(ops) + 1)

    def glue(first: int, last: int) -> None:
        for k in range(first + 1, last + 1):
            glued[k] = True

    for k, node in enumerate(ops):
        for one in written_by(node):
            root = root_of(one)
            if root in place:
                glue(place[root], k)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            uses = [place[user] for user in node.users if user in place]
            if uses:
                glue(k, max(uses))
    # A buffer that is written (running statistics): its readers stay with its writer.
    state: dict[str, list[int]] = {}
    changed = {str(root_of(one).target) for node in ops for one in written_by(node)
               if root_of(one).op == "get_attr"}  # fmt: skip
    for k, node in enumerate(ops):
        for one in node.all_input_nodes:
            if one.op == "get_attr" and str(one.target) in changed:
                state.setdefault(str(one.target), []).append(k)
    for uses in state.values():
        glue(min(uses), max(uses))
    return glued


def _block(node: fx.Node, model: nn.Module) -> str:
    """The repeated block (`layers.3`, `encoder.block.0`) that an operation is of; "" for none."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        name = str(path).removeprefix(_PREFIX)
        parent, _, _ = name.rpartition(".")
        if not parent:
            continue
        try:
            container = model.get_submodule(parent)
        except AttributeError:  # noqa: S112 - it is within no module
            continue
        if isinstance(container, nn.ModuleList | nn.Sequential) and len(container) > 1:
            return name
    return ""
