"""Residuals and velocities in checkpoints: out of buckets into parameters, and back, in any world.

A checkpoint holds for each parameter what all ranks together owe, in units of the gradient that an
optimizer sees, without the loss scale. A world of another size, with other buckets, divides it
among its own ranks: the sum is the same, so the model gets what it is owed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from evener.comm import wires
from evener.comm.buckets import Bucket, Buckets, place
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.comm.reducer import Reducer

VERSION = 1


def collect(reducer: Reducer) -> dict[str, Any]:
    """See `Reducer.state_dict`."""
    _require_between_steps(reducer)
    found: dict[str, Any] = {
        "version": VERSION,
        "steps": reducer.steps,
        "compressed_steps": {},
        "forms": {},
        "residual": {},
        "velocity": {},
    }
    scale = reducer.loss_scale.value()
    for exchange in reducer.exchanges:
        state = exchange.state
        for key, tensor, local in (
            ("residual", state.residual, True),
            ("velocity", state.velocity, state.velocity_local),
        ):
            if tensor is not None:
                whole = exchange.owed(tensor, local).div_(scale)
                found[key].update(_by_name(reducer, exchange.bucket, whole))
        for name in exchange.names:
            found["forms"][name] = exchange.wire.name
            found["compressed_steps"][name] = state.steps
    return found


def _by_name(reducer: Reducer, bucket: Bucket, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        reducer.names[slot.index]: place(whole, slot, reducer.parameters[slot.index])
        .contiguous()
        .to("cpu", copy=True)
        for slot in bucket.slots
    }


def check(reducer: Reducer, state: dict[str, Any]) -> None:
    """Raise UsageError unless `state` fits the reducer's parameters."""
    _require_between_steps(reducer)
    if state.get("version") != VERSION:
        raise UsageError(
            f"the compression state has version {state.get('version')!r}",
            f"load one of version {VERSION}, made by Reducer.state_dict()",
        )
    shapes = {n: p.shape for n, p in zip(reducer.names, reducer.parameters, strict=True)}
    for key in ("residual", "velocity"):
        for name, tensor in state[key].items():
            if shapes.get(name) != tensor.shape:
                have = shapes.get(name, "no such parameter")
                raise UsageError(
                    f"the checkpoint's {key} of {name} is {tuple(tensor.shape)}, here: {have}",
                    "load a checkpoint of the same model",
                )


def install(reducer: Reducer, state: dict[str, Any], *, forms: bool = True) -> None:
    """Divide what `check` has accepted among the ranks. The layout is settled.

    `forms`: take over too where the guard had fallen back.
    """
    for exchange in reducer.exchanges:
        mine = exchange.state
        steps = [int(state["compressed_steps"].get(name, 0)) for name in exchange.names]
        mine.steps = max(steps)
        mine.residual = mine.velocity = mine.sent = None
        if forms:
            before = {state["forms"].get(name) for name in exchange.names}
            _fall_back(reducer, exchange.bucket.index, before)
        if any(name in state["residual"] for name in exchange.names):
            whole = _whole(reducer, exchange.bucket, state["residual"])
            mine.residual = exchange.take_over(whole, local=True)
        if any(name in state["velocity"] for name in exchange.names):
            whole = _whole(reducer, exchange.bucket, state["velocity"])
            mine.velocity = exchange.take_over(whole, local=False)
            mine.velocity_local = False
    # The next step brings the residuals from an unscaled loss to whatever the scale is then.
    reducer.loss_scale.resume(1.0)


def _fall_back(reducer: Reducer, bucket: int, forms: set[str | None]) -> None:
    """Where the guard had fallen back from the form that is asked for here, do so again."""
    form = reducer.exchanges[bucket].wire.name
    milder = []
    while form != "exact":
        milder.append(form := wires.get(form).milder)
    fallen = [form for form in milder if form in forms and form != "exact"]
    if fallen:
        reducer.use(bucket, fallen[-1])


def _whole(reducer: Reducer, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    whole = torch.zeros(bucket.buffer.numel(), dtype=torch.float32)
    for slot in bucket.slots:
        tensor = tensors.get(reducer.names[slot.index])
        if tensor is not None:
            place(whole, slot, reducer.parameters[slot.index]).copy_(tensor)
    return whole


def move_velocity(reducer: Reducer, before: Buckets, velocity: dict[int, torch.Tensor]) -> None:
    """From the buckets of the first step, a guess, into those of its measured order."""
    if not velocity:
        return
    tensors: dict[str, torch.Tensor] = {}
    for bucket in before:
        tensors.update(_by_name(reducer, bucket, velocity[bucket.index]))
    for exchange in reducer.exchanges:
        whole = _whole(reducer, exchange.bucket, tensors)
        exchange.state.velocity = exchange.take_over(whole, local=False)


def _require_between_steps(reducer: Reducer) -> None:
    if reducer.pending:
        raise UsageError(
            "the state of the compression was asked for in the middle of a step",
            "save and load after optimizer.step()",
        )
