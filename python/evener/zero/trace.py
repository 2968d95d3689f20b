"""A model's step measured without memory: on fake tensors, driven by the engine's own hooks.

Every parameter is replaced by a fake one, and one forward and backward pass runs twice: as it is,
and with all repeated units recomputed. Shapes, dtypes and lifetimes of all that autograd saves are
then the model's own, the loss included; `profile` says what is kept of it. The hooks are those of
`passes`, with a recorder in the place of loading and gradients, so the moments are the engine's.

Where an operation asks for a value, `answers` has one: the example's, or one that is drawn. What
cannot be faked at all raises TraceError: then the plan is made from shapes, and the first step
shows what is true.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from evener.base import torch_names
from evener.errors import EvenerError
from evener.zero import launches
from evener.zero.answers import Answers, Readers
from evener.zero.device import SimulatedDevice
from evener.zero.edges import WrittenError
from evener.zero.heads import in_parts
from evener.zero.loss import cross_entropy
from evener.zero.meter import Ledger, Meter, tensors
from evener.zero.passes import Passes
from evener.zero.pool import holes
from evener.zero.profile import Moment, Profile, Work
from evener.zero.rehearsal import specs
from evener.zero.sequence import counted
from evener.zero.spans import Spans
from evener.zero.transformers import as_real
from evener.zero.units import Group, Piece, Unit
from evener.zero.untouched import modules_kept, random_kept
from evener.zero.vocabulary import Head, LazyLogits


class TraceError(EvenerError):
    """The model's step cannot run on fake tensors."""


@dataclass(eq=False)
class _Ghost:
    """A chunk, as far as `passes` looks at it."""

    index: int
    group: Group
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    touched: bool = False


class _Recorder:
    """In the place of Loading and of Gradients."""

    def __init__(self, ledger: Ledger, events: list[tuple[int, int]], width: int) -> None:
        self.ledger = ledger
        self.events = events
        self.width = width
        """Bytes of an element of a gradient."""
        self.moments: list[Moment] = []
        self.active: set[int] = set()

    def moment(self, kind: str, index: int = -1) -> None:
        """What was the most since the last moment belongs to that one."""
        self.close()
        self.moments.append(Moment(kind, index, self.ledger.now, self.ledger.now))

    def close(self) -> None:
        """Give the last moment its peak."""
        peak = self.ledger.mark()
        if self.moments:
            self.moments[-1] = dataclasses.replace(self.moments[-1], peak=peak)

    def begin(self) -> None:
        """As Loading has it."""

    def enter(self, unit: int) -> None:
        """As Loading has it."""
        self.active.add(unit)
        self.moment("enter", unit)

    def leave(self, unit: int) -> None:
        """As Loading has it."""
        self.moment("leave", unit)
        self.active.discard(unit)

    def through(self, chunks: list[_Ghost]) -> None:
        """As Gradients has it."""

    def add(self, chunk: _Ghost, place: int, gradient: torch.Tensor) -> None:
        """As Gradients has it."""
        earlier = chunk.arrived.get(place)
        chunk.arrived[place] = gradient if earlier is None else earlier + gradient
        if len(chunk.arrived) == len(chunk.group.pieces):
            self.moment("gradient", chunk.index)
            key = len(self.events)
            self.events.append((key, chunk.group.numel * self.width))  # the flat one
            chunk.arrived.clear()
            chunk.touched = True
            del gradient, earlier
            self.events.append((key, 0))
            self.moment("other")

    def end(self, *_: Any) -> None:
        """As both have it."""


@contextlib.contextmanager
def _swapped(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype
             ) -> Iterator[dict[nn.Parameter, nn.Parameter]]:  # fmt: skip
    """The model with fake parameters and buffers; which stands for which."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, torch.Tensor] = {}
    try:
        with mode:
            for module in model.modules():
                for name, old in list(module._parameters.items()):
                    if old is None:
                        continue
                    if old not in made:
                        value = torch.empty(old.shape, dtype=dtype, device=device)
                        made[old] = nn.Parameter(value, old.requires_grad)
                    before.append((module._parameters, name, old))
                    module._parameters[name] = made[old]
                for name, buffer in list(module._buffers.items()):
                    if buffer is None:
                        continue
                    if id(buffer) not in copies:
                        copies[id(buffer)] = torch.empty(
                            buffer.shape, dtype=buffer.dtype, device=device
                        )
                    before.append((module._buffers, name, buffer))
                    module._buffers[name] = copies[id(buffer)]
        yield made
    finally:
        for place, name, value in reversed(before):
            place[name] = value


def _loss(out: Any, chunked: bool) -> torch.Tensor:
    """The model's own loss, or one that takes what losses of such outputs take."""
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(found, torch.Tensor) and found.requires_grad:
        return found.sum()
    leaves = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    wanted = [x for x in leaves if isinstance(x, LazyLogits) or x.requires_grad]
    if not wanted:
        raise TraceError("the model's output needs no gradient", "train a parameter of it")
    if all(x.dim() == 0 for x in wanted):
        return torch.stack(wanted).sum()  # models that detect give a loss for each task
    if wanted[0].dim() == 0:
        return wanted[0]
    x = max(wanted, key=lambda each: each.numel())
    if x.dim() == 1:
        return x.float().square().mean()
    rows = x.reshape(-1, x.shape[-1])
    at = torch.zeros(rows.shape[0], dtype=torch.int64, device=x.device)
    if isinstance(x, LazyLogits) or not chunked:
        return functional.cross_entropy(rows.float(), at)
    return cross_entropy(rows, at)


def _work(meter: Meter) -> Work:
    assert meter.work is not None
    found = tuple((flops, moved, count) for (flops, moved), count in meter.work.items())
    meter.work.clear()
    return found


_Run = tuple[tuple[Moment, ...], Work, Work, frozenset[str], int, str]
"""A step's run: its moments, the work of both passes, strays, what holes take, and which values
were asked for."""


def trace(
    model: nn.Module,
    units: Sequence[Unit],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    chunked: bool = False,
    head: Head | None = None,
    cores: int = 0,
    draw: bool = False,
) -> Profile:
    """The profile of a training step with these inputs (real, fake or on the meta device: of those
    that are real, values are used where the model asks). `cores`: multiprocessors of a CUDA GPU
    that is not here. `draw`: values that follow from activations are drawn (see `answers`). Raises
    TraceError."""
    repeated = frozenset(number for number, unit in enumerate(units) if unit.repeated)
    runs: list[_Run] = []
    calls: dict[int, Any] = {}
    for recompute in (frozenset(), repeated):
        if recompute or not runs:
            with _remembered(units, calls):
                given = model, units, args, kwargs, device, dtype, chunked, head
                try:
                    runs.append(_run(*given, recompute, cores, draw))
                except WrittenError:
                    repeated = frozenset()
    plain, forward, backward, strays, lost, asked = runs[0]
    again, _, slow, more, also, _ = runs[-1]
    leaves = [x for x in tree_leaves((list(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    return Profile(
        plain=plain,
        recomputed=again if repeated else (),
        repeated=repeated,
        forward=forward,
        backward=backward,
        backward_recomputed=slow if repeated else (),
        strays=strays | more,
        rows=max((x.shape[0] for x in leaves if x.dim()), default=1),
        inputs=_inputs(again, repeated),
        late=frozenset(n for n in repeated if in_parts(units[n].module)),
        calls=calls,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        holes=(lost, also),
        asked=asked,
    )


@contextlib.contextmanager
def _remembered(units: Sequence[Unit], calls: dict[int, Any]) -> Iterator[None]:
    """Inside, what each unit is called with first goes into `calls`, by its number."""

    def before(number: int) -> Any:
        return lambda _, args, kwargs: calls.setdefault(number, specs(args, kwargs)) and None

    handles = [
        unit.module.register_forward_pre_hook(before(number), with_kwargs=True)
        for number, unit in enumerate(units)
        if unit.module is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inputs(moments: Sequence[Moment], repeated: frozenset[int]) -> dict[int, int]:
    """What each recomputed unit left behind in the forward pass."""
    entered: dict[int, int] = {}
    found: dict[int, int] = {}
    for moment in moments:
        if moment.kind == "enter" and moment.index in repeated:
            entered.setdefault(moment.index, moment.level)
        elif moment.kind == "leave" and moment.index in entered and moment.index not in found:
            found[moment.index] = max(0, moment.level - entered[moment.index])
    return found


def _run(
    model: nn.Module,
    units: Sequence[Unit],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    chunked: bool,
    head: Head | None,
    recompute: frozenset[int],
    cores: int,
    draw: bool = False,
) -> _Run:
    ledger = Ledger()
    if not cores and device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    meter = Meter(ledger, count_work=True, cores=cores)
    meter.events = []
    recorder = _Recorder(ledger, meter.events, dtype.itemsize)
    mode = torch_names.without_addresses(FakeTensorMode(allow_non_fake_inputs=True))
    strays: set[str] = set()
    with (
        random_kept(),
        modules_kept(model.modules(), values=True),
        _swapped(model, mode, device, dtype) as made,
    ):
        ghosts: list[tuple[Unit, list[Any]]] = []
        owner: dict[int, tuple[int, str]] = {}
        number = 0
        for index, unit in enumerate(units):
            mine = []
            groups = []
            for group in unit.groups:
                pieces = [Piece(p.name, made[p.parameter], p.shape, p.offset) for p in group.pieces]
                groups.append(dataclasses.replace(group, pieces=pieces))
                mine.append(_Ghost(number, groups[-1]))
                number += 1
                for piece in pieces:
                    if unit.module is not None:
                        key = piece.parameter.untyped_storage()._cdata
                        owner[key] = index, piece.name
            ghosts.append((dataclasses.replace(unit, groups=groups), mine))

        def seen(given: Any, named: Any) -> None:
            for x in tensors((given, *named.values())):
                if x.layout == torch.strided:
                    place = owner.get(x.untyped_storage()._cdata)
                    if place is not None and place[0] not in recorder.active:
                        strays.add(place[1])

        meter.seen = seen

        def launched(kernel: str, given: list[torch.Tensor]) -> None:
            seen(given, {})
            answers.launched(kernel, given)

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            wide = value.is_floating_point()
            kind = dtype if wide else value.dtype
            made_up = torch.empty(value.shape, dtype=kind, device=device)
            answers.know(made_up, value)
            return made_up.requires_grad_(value.requires_grad) if wide else made_up

        answers = Answers(every=not any("mask" in name for name in kwargs), draw=draw)
        recompute_now = set(recompute)
        passes = Passes(
            model,
            ghosts,
            recorder,  # type: ignore[arg-type]
            recorder,  # type: ignore[arg-type]
            Spans(SimulatedDevice()),
            recompute=recompute_now,
            offload=None,
            compiler=False,
            before=lambda: None,
            head=head,
            early=True,
            tracing=True,
        )
        try:
            with (
                counted(meter.repeated),
                mode,
                torch.enable_grad(),
                meter,
                answers,
                Readers(answers),
                as_real(),
                launches.seen(launched),
            ):
                inputs, named = tree_map(fake, (list(args), dict(kwargs)))
                recorder.moment("other")
                out = model(*inputs, **named)
                loss = _loss(out, chunked)
                forward = _work(meter)
                loss.backward()
                backward = _work(meter)
                recorder.close()
                del loss, out, inputs, named
        except (TraceError, WrittenError):
            raise
        except Exception as error:
            raise TraceError(
                f"the model's step cannot run on fake tensors: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}",
                "the plan is made from shapes then, and the first step shows what is true",
            ) from error
        finally:
            passes.close()
            for _, mine in ghosts:
                for ghost in mine:
                    ghost.arrived.clear()
    moments, lost = tuple(recorder.moments), holes(meter.events)
    return moments, forward, backward, frozenset(strays), lost, answers.said()


def timed_trace(*args: Any, **kwargs: Any) -> tuple[Profile | None, str]:
    """A profile, or None and why; and always in how many seconds. A model that asks for values of
    activations is traced with drawn ones."""
    begun = time.perf_counter()
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    level = noise.level
    noise.setLevel(logging.CRITICAL)  # it shows what is raised, too
    # Some operations have shapes for bfloat16 alone (grouped products, in torch 2.11).
    ways: list[tuple[bool, dict[str, Any], int]] = [(False, kwargs, 1), (True, kwargs, 1)]
    if kwargs["dtype"] == torch.float32:
        half = {**kwargs, "dtype": torch.bfloat16}
        ways = [*ways, (False, half, 2), (True, half, 2)]
    found: Profile | None = None
    why = ""
    try:
        for draw, named, times in ways:
            try:
                found = trace(*args, **named, draw=draw).times(times)
                break
            except TraceError as error:
                why = why or str(error)
    finally:
        noise.setLevel(level)
    gc.collect()
    if found is None:
        return None, why
    asked = f": {found.asked}" if found.asked else ""
    return found, f"traced in {time.perf_counter() - begun:.1f} s{asked}"
