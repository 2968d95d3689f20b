"""Residuals and velocities in checkpoints: out of buckets into parameters, and back, in any world.

A checkpoint holds for each parameter the sum of all ranks' residuals, in units of the gradient that
an optimizer sees, without the loss scale. A world of another size, with other buckets, divides it
among its own ranks: the sum is the same, so nothing is lost for the model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from evener.comm import wires
from evener.comm.assignment import Assignment
from evener.comm.buckets import Bucket, Buckets, Slot, place
from evener.comm.exchange import Exchange
from evener.comm.state import LossScale
from evener.errors import UsageError

VERSION = 1


class Owner(Protocol):
    """The reducer, as far as it matters here."""

    names: list[str]
    parameters: list[torch.nn.Parameter]
    assignment: Assignment
    loss_scale: LossScale
    steps: int

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of each bucket, by index."""

    @property
    def pending(self) -> bool:
        """Whether a step is under way."""


def collect(reducer: Owner) -> dict[str, Any]:
    """See `Reducer.state_dict`."""
    _require_between_steps(reducer)
    if (change := reducer.loss_scale.change()) is not None:
        for exchange in reducer.exchanges:  # the last step may have been skipped
            exchange.state.rescale(change)
    found: dict[str, Any] = {
        "version": VERSION,
        "steps": reducer.steps,
        "compressed_steps": {},
        "forms": {},
        "residual": {},
        "velocity": {},
    }
    scale = reducer.loss_scale.value()
    for exchange in _lasting(reducer):
        state = exchange.state
        for key, tensor, local in (
            ("residual", state.residual, True),
            ("velocity", state.velocity, state.velocity_local),
        ):
            if tensor is not None:
                whole = exchange.owed(tensor, local).div_(scale)
                _add(found[key], reducer, exchange.bucket, whole)
        for name in exchange.names:
            form, steps = exchange.wire.name, state.steps
            if (before := found["forms"].get(name, "exact")) != "exact":
                form = before if form == "exact" else wires.milder(form, before)
            found["forms"][name] = form
            found["compressed_steps"][name] = max(steps, found["compressed_steps"].get(name, 0))
    for key in ("residual", "velocity"):
        found[key] = _shaped(reducer, found[key])
    return found


def _lasting(reducer: Owner) -> list[Exchange]:
    """Those that may keep something from step to step: rows do not."""
    return [exchange for exchange in reducer.exchanges if not exchange.bucket.by_rows]


def _add(
    found: dict[str, torch.Tensor], reducer: Owner, bucket: Bucket, whole: torch.Tensor
) -> None:
    """Bring a bucket's parts of parameters into `found`: name to all of it, flat, on the CPU."""
    for slot in bucket.slots:
        name, numel = reducer.names[slot.index], reducer.parameters[slot.index].numel()
        if name not in found:
            found[name] = torch.zeros(numel, dtype=whole.dtype)
        part = whole[slot.offset : slot.offset + slot.numel]
        found[name][slot.start : slot.start + slot.numel] = part.cpu()


def _shaped(reducer: Owner, flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `_add` has brought together, in the shape of the parameters."""
    parameters = dict(zip(reducer.names, reducer.parameters, strict=True))
    return {
        name: place(whole, Slot(0, 0, whole.numel()), parameters[name]).contiguous()
        for name, whole in flat.items()
    }


def check(reducer: Owner, state: dict[str, Any]) -> dict[str, Any]:
    """The state, by the reducer's names; raises UsageError unless it fits its parameters."""
    _require_between_steps(reducer)
    if state.get("version") != VERSION:
        raise UsageError(
            f"the compression state has version {state.get('version')!r}",
            f"load one of version {VERSION}, made by Reducer.state_dict()",
        )
    # Older versions named the parts of a compiled model as torch.compile does.
    state = {
        key: {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        if isinstance(found, dict)
        else found
        for key, found in state.items()
    }
    shapes = {n: p.shape for n, p in zip(reducer.names, reducer.parameters, strict=True)}
    for key in ("residual", "velocity"):
        for name, tensor in state[key].items():
            if shapes.get(name) != tensor.shape:
                have = shapes.get(name, "no such parameter")
                raise UsageError(
                    f"the checkpoint's {key} of {name} is {tuple(tensor.shape)}, here: {have}",
                    "load a checkpoint of the same model",
                )
    return state


def install(
    reducer: Owner, state: dict[str, Any], *, forms: bool = True, first_step_taken: bool = False
) -> None:
    """Divide what `check` has accepted among the ranks. The layout is settled.

    `forms`: take over too where the guard had fallen back. `first_step_taken`: with the velocity,
    see `install_velocity`, so that all but it is to be divided, in units of the scale of now.
    """
    scale = reducer.loss_scale.value() if first_step_taken else 1.0
    for exchange in _lasting(reducer):
        mine = exchange.state
        steps = [int(state["compressed_steps"].get(name, 0)) for name in exchange.names]
        mine.steps = max(steps)
        mine.residual = mine.sent = mine.memory = None
        if forms:
            before = {state["forms"].get(name) for name in exchange.names}
            _fall_back(reducer, exchange.bucket.index, before)
        if any(name in state["residual"] for name in exchange.names):
            whole = _whole(reducer, exchange.bucket, state["residual"])
            mine.residual = exchange.take_over(whole.mul_(scale), local=True)
    if not first_step_taken:
        install_velocity(reducer, state)


def install_velocity(reducer: Owner, state: dict[str, Any]) -> None:
    """Divide the velocities among the ranks, in whatever layout there is."""
    for exchange in _lasting(reducer):
        mine = exchange.state
        mine.velocity = mine.velocity_before = None
        mine.velocity_local = False
        if any(name in state["velocity"] for name in exchange.names):
            whole = _whole(reducer, exchange.bucket, state["velocity"])
            mine.velocity = exchange.take_over(whole, local=False)
    # The next step brings what is kept from an unscaled loss to whatever the scale is then.
    reducer.loss_scale.resume(1.0)


def _fall_back(reducer: Owner, bucket: int, forms: set[str | None]) -> None:
    """Where the guard had fallen back from the form that is asked for here, do so again."""
    form = reducer.exchanges[bucket].wire.name
    milder = []
    while form != "exact":
        milder.append(form := wires.get(form).milder)
    fallen = [form for form in milder if form in forms and form != "exact"]
    if fallen:
        reducer.assignment.use(bucket, fallen[-1])


def _whole(reducer: Owner, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    whole = torch.zeros(bucket.buffer.numel(), dtype=torch.float32)
    for slot in bucket.slots:
        tensor = tensors.get(reducer.names[slot.index])
        if tensor is not None:
            parameter = reducer.parameters[slot.index]
            flat = torch.empty(parameter.numel())
            place(flat, Slot(0, 0, parameter.numel()), parameter).copy_(tensor)
            part = flat[slot.start : slot.start + slot.numel]
            whole[slot.offset : slot.offset + slot.numel] = part
    return whole


def residuals(reducer: Owner) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """See `Reducer.residuals`."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for exchange in reducer.exchanges:
        residual = exchange.state.residual
        if residual is None:
            continue
        start, end = exchange.place()
        for slot in exchange.bucket.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, end)
            if low < high:
                part = residual[low - start : high - start]
                first = slot.start + low - slot.offset
                found.setdefault(reducer.names[slot.index], []).append((first, part))
    return found


def velocities(reducer: Owner) -> dict[int, torch.Tensor]:
    """By bucket, of all ranks as one: for `move_velocity`. Collective."""
    return {
        exchange.bucket.index: exchange.owed(exchange.state.velocity, local=False)
        for exchange in reducer.exchanges
        if exchange.state.velocity is not None
    }


def move_velocity(reducer: Owner, before: Buckets, velocity: dict[int, torch.Tensor]) -> None:
    """From the buckets of the first step, a guess, into those of its measured order."""
    if not velocity:
        return
    tensors: dict[str, torch.Tensor] = {}
    for bucket in before:
        _add(tensors, reducer, bucket, velocity[bucket.index])
    tensors = _shaped(reducer, tensors)
    for exchange in reducer.exchanges:
        whole = _whole(reducer, exchange.bucket, tensors)
        exchange.state.velocity = exchange.take_over(whole, local=False)


def _require_between_steps(reducer: Owner) -> None:
    if reducer.pending:
        raise UsageError(
            "the state of the compression was asked for in the middle of a step",
            "save and load after optimizer.step()",
        )
