"""The stages as modules: each holds its own parameters under their original names.

A stage takes the tensors that cross into it, in the order of `cuts.crossing_at`, and the model's
inputs by name, of which it picks those that it uses. It returns what crosses out, or the loss. What
only passes through leaves as it came. Constants of devices become the stage's own.

**Chance.** An operation that draws random numbers is seeded by (seed, step, microbatch, its place
in the whole model). What it draws does not depend on where the model is cut, and a forward that
runs again draws the same. The program's own generators are left as they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from evener.errors import UsageError
from evener.pipeline.capture import Captured
from evener.pipeline.cuts import crossing_at, crossings
from evener.pipeline.operations import Under, is_random, target_of, without_grad


@dataclass
class Draw:
    """What random operations of a stage are seeded by, beside their place."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    off: bool = False  # evaluation: dropout lets all through
    plain: bool = False  # comparison with the model: the generators are not seeded

    def key(self, place: int) -> int:
        """63 bits that differ wherever one of the four differs (splitmix64 of each in turn)."""
        mixed = 0
        for part in (self.seed, self.step, self.microbatch, place):
            mixed = _mix(mixed ^ (part & _ALL))
        return mixed >> 1


_ALL = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _ALL
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _ALL
    return value ^ (value >> 31)


class Seeded:
    """A random operation that seeds its device's generator first."""

    def __init__(
        self, target: Callable[..., Any], place: int, draw: Draw, device: torch.device
    ) -> None:
        self.target, self.place, self.draw, self.device = target, place, draw, device
        self.__name__ = getattr(target, "__name__", "seeded").replace(".", "_")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.draw.off:
            return _quiet(self.target, args, kwargs)
        if self.draw.plain:
            return self.target(*args, **kwargs)
        key = self.draw.key(self.place)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(key)
        else:
            torch.default_generator.manual_seed(key)
        return self.target(*args, **kwargs)


def _quiet(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random operation without its chance."""
    inner: Any = target
    while isinstance(inner, Under):
        inner = inner.target
    schema = inner._schema
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in given:
        given["dropout_p"] = 0.0
    elif "train" in names:
        given["train"] = False
    return target(**given)


@contextlib.contextmanager
def own_chance(device: torch.device, random: bool) -> Iterator[None]:
    """Leave the device's generator as it was, where something inside draws."""
    if not random:
        yield
        return
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    try:
        yield  # left by an exception too: a checkpoint ends its second forward by one
    finally:
        if cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


class StageModule(nn.Module):
    """One stage. Its `state_dict` has the model's own names, without a prefix.

    `received`, `sends`: (shape, dtype, differentiable) of what crosses, with the rows left open:
    see `Split.edge`. `needs`: names of the model's inputs that it uses.
    """

    def __init__(
        self, graph: fx.GraphModule, received: int, needs: list[str], draw: Draw,
        device: torch.device, random: bool, recompute: bool, apart: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        # Not registered: its parameters are this module's, under their own names.
        self.graph_module: Callable[..., Any]
        self.__dict__["graph_module"] = graph
        for name, child in graph.named_children():
            self.add_module(name, child)
        for name, parameter in graph.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in graph.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.received, self.needs, self.draw = received, needs, draw
        self.device, self.random, self.recompute = device, random, recompute
        # Split backward cuts what is sent off its graph: it must be no tensor that the graph keeps.
        self.apart = apart
        # What is done to a tensor that comes in and to one that goes out, where the stage's own are
        # divided over ranks.
        self.enter: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.leave: Callable[[Any], Any] | None = None

    def forward(self, *crossing: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, ...]:
        if self.enter is not None:
            crossing = tuple(self.enter(tensor) for tensor in crossing)
        given = [*crossing, *(inputs[name] for name in self.needs)]
        microbatch, step = self.draw.microbatch, self.draw.step

        def run(*values: Any) -> tuple[torch.Tensor, ...]:
            # When it runs again, in backward, other microbatches have come between.
            before = self.draw.microbatch, self.draw.step
            self.draw.microbatch, self.draw.step = microbatch, step
            try:
                with own_chance(self.device, self.random and not self.draw.plain):
                    found: tuple[torch.Tensor, ...] = self.graph_module(*values)
                    return found
            finally:
                self.draw.microbatch, self.draw.step = before

        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out = run(*given)
        if self.leave is not None:
            out = tuple(self.leave(value) for value in out)
        return tuple(_sendable(value, self.apart) for value in out)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        for name, parameter in self.named_parameters(recurse=False):
            setattr(self.graph_module, name, parameter)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self.graph_module, name, buffer)
        return result


def _sendable(value: torch.Tensor, apart: bool) -> torch.Tensor:
    """Contiguous and no view, or torch cannot send it or cut it off after backward."""
    if value.dim() and (apart or not value.is_contiguous() or value._is_view()):
        return value.clone(memory_format=torch.contiguous_format)
    return value


@dataclass(frozen=True)
class Edge:
    """A tensor that crosses a cut: its node says shape and dtype."""

    node: fx.Node
    differentiable: bool


class Split:
    """A captured model and its cuts. `input_names`: of the leaves of a call, in order."""

    def __init__(self, captured: Captured, cuts: list[int]) -> None:
        count = len(captured.ops)
        if sorted(set(cuts)) != list(cuts) or (cuts and not 0 < cuts[0] <= cuts[-1] < count):
            raise UsageError(f"cuts {cuts} do not divide {count} operations", "plan again")
        if wrong := [cut for cut in cuts if captured.glued[cut]]:
            raise UsageError(f"cuts {wrong} take apart what belongs together", "plan again")
        self.captured, self.cuts = captured, cuts
        self.bounds = [0, *cuts, count]
        self.input_names = [node.name for node in captured.inputs]
        self._values = crossings(captured)
        self._graded = _differentiable(captured)

    def edge(self, position: int) -> list[Edge]:
        """What crosses the cut at `position`."""
        if position in (0, len(self.captured.ops)):
            return []
        return [Edge(node, node in self._graded) for node in crossing_at(self._values, position)]

    def laid(self, edge: Edge, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """A tensor that came over a cut, in the order in memory that the model has there.

        It travels contiguous, and a view after the cut may need another order.
        """
        meta = edge.node.meta["val"]
        strides = [self.captured.size(stride, rows) for stride in meta.stride()]
        order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1),
                       key=lambda d: -strides[d])  # fmt: skip
        step = 1
        for d in reversed(order):
            if strides[d] != step:
                return tensor  # expanded, or a part of a larger one
            step *= tensor.shape[d]
        if order == sorted(order):
            return tensor
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)

    def stage_of(self, parameter: str) -> list[int]:
        """The stages that use a parameter (its name in the graph)."""
        found = []
        for stage, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if any(one.op == "get_attr" and str(one.target) == parameter
                   for node in self.captured.ops[begin:end]
                   for one in node.all_input_nodes):  # fmt: skip
                found.append(stage)
        return found

    def module(
        self, stage: int, device: torch.device, draw: Draw, recompute: bool = False,
        apart: bool = False,
        place: Callable[[str, torch.Tensor, bool], torch.Tensor] | None = None,
    ) -> StageModule:  # fmt: skip
        """Build a stage on `device`.

        place(name, tensor, is_parameter): the stage's own tensor for one of the model; default: a
        copy on the device.
        """
        captured = self.captured
        begin, end = self.bounds[stage], self.bounds[stage + 1]
        root = nn.Module()
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        incoming = self.edge(begin)
        for edge in incoming:
            made[edge.node] = graph.placeholder(edge.node.name)
        needed = self._needed(begin, end)
        needs = []
        for node in captured.inputs:
            if node in needed:
                made[node] = graph.placeholder(f"input_{node.name}")
                needs.append(node.name)
        own = set(captured.ops[begin:end])
        place_of = {node: k for k, node in enumerate(captured.ops)}
        short = captured.module.meta["evener_short"]
        random = False
        for node in captured.module.graph.nodes:
            if node in made or (node not in own and node not in needed):
                continue
            if node.op == "get_attr":
                name = str(node.target)
                held = attribute(captured.module, name)
                if isinstance(held, fx.GraphModule):
                    root.add_module(name, copy.deepcopy(held))
                    made[node] = graph.get_attr(name)
                    continue
                target = short.get(name, name)
                if not _has(root, target):
                    _put(root, target, held, device, place)
                made[node] = graph.get_attr(target)
                continue
            new = graph.node_copy(node, lambda n: made[n])
            new.args = fx.node.map_aggregate(new.args, lambda v: _on(v, device))
            new.kwargs = fx.node.map_aggregate(new.kwargs, lambda v: _on(v, device))
            if is_random(node):
                random = True
                new.target = Seeded(node.target, place_of[node], draw, device)
            made[node] = new
        outgoing = self.edge(end) if end < len(captured.ops) else []
        out = [made[edge.node] for edge in outgoing]
        if end == len(captured.ops):
            out = [made[captured.loss]]
        graph.output(tuple(out))
        module = fx.GraphModule(root, graph)
        return StageModule(module, len(incoming), needs, draw, device, random, recompute, apart)

    def _needed(self, begin: int, end: int) -> set[fx.Node]:
        """Free nodes, inputs and parameters that the operations begin..end depend on."""
        found: set[fx.Node] = set()
        todo = [one for node in self.captured.ops[begin:end] for one in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            if node in self.captured.free or node.op == "get_attr":
                found.add(node)
                todo += node.all_input_nodes
        return found


def check_split_backward(captured: Captured, cuts: list[int]) -> None:
    """Refuse cuts with which torch's split backward loses gradients. Raises UsageError.

    It finds the parameters of a stage by the gradients that go to the stage's inputs. In a stage
    after the first, a parameter whose use depends on no input (an embedding of the decoder's
    tokens) is not on such a way.
    """
    graded = _differentiable(captured)
    for k in range(cuts[0] if cuts else len(captured.ops), len(captured.ops)):
        node = captured.ops[k]
        ways = [one for one in node.all_input_nodes if one in graded]
        if ways and all(one.op == "get_attr" for one in ways):
            name = captured.module.meta["evener_short"].get(str(ways[0].target), ways[0].target)
            stage = sum(cut <= k for cut in cuts)
            raise UsageError(
                f"zero-bubble schedules lose the gradient of {name}: stage {stage} uses it on "
                "nothing that comes from the stage before",
                "take schedule='1F1B' or 'Interleaved1F1B'",
            )


def _differentiable(captured: Captured) -> set[fx.Node]:
    """Nodes through which a gradient goes: floating point, and made from a trained parameter."""
    trained = {n for n, p in captured.module.named_parameters(remove_duplicate=False)
               if p.requires_grad}  # fmt: skip
    found: set[fx.Node] = set()
    for node in captured.module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in trained:
            found.add(node)
        elif node.op == "call_function" and any(one in found for one in node.all_input_nodes):
            value = node.meta.get("val")
            several = isinstance(value, tuple | list)
            quiet = without_grad(node) or str(target_of(node)).startswith("aten.detach")
            differs = isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex()
            )
            if not quiet and (several or differs):
                found.add(node)
    return found


def _on(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) else value


def attribute(module: nn.Module, name: str) -> Any:
    """What a module has under a name with dots."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _has(root: nn.Module, name: str) -> bool:
    try:
        attribute(root, name)
    except AttributeError:
        return False
    return True


def _put(
    root: nn.Module, name: str, held: torch.Tensor, device: torch.device,
    place: Callable[[str, torch.Tensor, bool], torch.Tensor] | None,
) -> None:  # fmt: skip
    """A tensor of the model at its name in the stage."""
    *path, last = name.split(".")
    at = root
    for part in path:
        if not hasattr(at, part):
            at.add_module(part, nn.Module())
        at = getattr(at, part)
    parameter = isinstance(held, nn.Parameter)
    if place is not None:
        value = place(name, held.detach(), parameter)
    elif held.is_meta:
        raise UsageError(
            f"{name} has no values: the model is on the meta device",
            "give weights=function(name, tensor) that returns them, or a model with values",
        )
    else:
        value = held.detach().to(device, copy=True)
    if parameter:
        at.register_parameter(last, nn.Parameter(value, requires_grad=held.requires_grad))
    else:
        at.register_buffer(last, value)
