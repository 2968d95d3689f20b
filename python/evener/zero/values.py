"""The values of a model under the engine: `state_dict()` and `load_state_dict()` that reach the
states, and the way back to a plain model.

Values are those that the optimizer updates: float32 where a parameter is trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from evener.base.given import given
from evener.errors import UsageError
from evener.zero import packed, weight
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.units import Piece

shown: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""The hooks of each model."""


def show(model: nn.Module, engine: Engine) -> None:
    """Real values in and out, and inputs that are cast and moved as the engine's own call does."""
    places = {
        id(piece.parameter): (chunk, piece)
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    }

    def before(module: nn.Module, *_: Any) -> None:
        if engine.world > 1:
            raise UsageError(
                f"the weights are shared out over {engine.world} ranks: no rank has a state_dict",
                "use zero.export or zero.save_checkpoint",
            )
        for parameter in module.parameters():
            weight.lend(parameter)

    def out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        engine.drain()
        engine.flush()
        made: dict[int, torch.Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in places and prefix + name in state:
                if id(parameter) not in made:
                    made[id(parameter)] = value_of(*places[id(parameter)])
                state[prefix + name] = made[id(parameter)]
        for chunk in engine.chunks():
            if not chunk.loaded:
                chunk.guard()

    def copied(_: Any) -> Any:
        raise UsageError(
            "a copy of a model under the engine would have no weights, and run this model's",
            "load engine.module.state_dict() into a model of its own, or zero.give_back(engine)",
        )

    plain = model.load_state_dict

    def load(
        state: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> _IncompatibleKeys:
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) would take the parameters from the engine",
                "leave assign out: values are copied into the engine",
            )
        engine.drain()
        engine.flush()
        named = {
            name: places[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in places
        }
        _check_shapes(named, state)
        rest = {name: value for name, value in state.items() if name not in named}
        missing, unexpected = plain(rest, strict=False)
        missing = [name for name in missing if name not in state]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}: "
                f"missing {missing}, unexpected {unexpected}"
            )
        for name, place in named.items():
            if name in state:
                _set(*place, state[name])
        return _IncompatibleKeys(missing, unexpected)

    def before_part(module: nn.Module, prefix: str, _: bool) -> None:
        if not prefix:
            before(module)

    def out_of_part(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        if not prefix:
            out(module, state, prefix, meta)

    hooks = [
        model.register_state_dict_pre_hook(before),
        model.register_state_dict_post_hook(out),
    ]
    for part in model.modules():  # asked by itself, as peft does with `modules_to_save`
        if part is not model:
            hooks.append(part.register_state_dict_pre_hook(before_part))
            hooks.append(part.register_state_dict_post_hook(out_of_part))
    shown[model] = tuple(hooks)
    vars(model)["load_state_dict"] = load
    vars(model)["__deepcopy__"] = copied


def value_of(chunk: Chunk, piece: Piece) -> torch.Tensor:
    """A parameter's value on the CPU: float32 where it is trained, else as it is computed with;
    of one in 4 bits its bytes."""
    begin, end = piece.offset, piece.offset + piece.numel
    trained = chunk.group.trainable
    full = chunk.full(begin, end) if trained else chunk.states.weights[begin:end]
    value = full.detach().to("cpu", copy=True).view(piece.shape)
    four_bits = packed.of(piece.parameter)
    return value if four_bits is None else four_bits.bytes_of(value)


def _check_shapes(named: Mapping[str, tuple[Chunk, Piece]], state: Mapping[str, Any]) -> None:
    for name, (_, piece) in named.items():
        four_bits = packed.of(piece.parameter)
        shape = tuple(piece.shape if four_bits is None else four_bits.shape)
        if name in state and tuple(state[name].shape) != shape:
            raise RuntimeError(
                f"size mismatch for {name}: {tuple(state[name].shape)} in the state, "
                f"{shape} in the model"
            )


@torch.no_grad()
def _set(chunk: Chunk, piece: Piece, value: torch.Tensor) -> None:
    four_bits = packed.of(piece.parameter)
    if four_bits is not None:
        if not torch.equal(_bytes(value), _bytes(value_of(chunk, piece))):
            raise UsageError(
                f"the value of {piece.name} is in 4 bits, and of other scales than the model's",
                "load the adapter alone, or initialize with the model that has these weights",
            )
        return
    flat = value.detach().reshape(-1).to(chunk.states.weights.device)
    if chunk.group.trainable:
        chunk.store(piece.offset, flat.float())
    else:
        chunk.states.weights[piece.offset : piece.offset + piece.numel].copy_(flat)
    chunk.refresh()


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu").contiguous().view(-1).view(torch.uint8)


@given
@torch.no_grad()
def give_back(engine: Engine, model: nn.Module | None = None) -> nn.Module:
    """Close the engine and return its model with plain parameters, on the CPU: trained ones in
    float32, as the optimizer has them. `model`: a part of it that has a state_dict of its own."""
    model = engine.module if model is None else model
    if engine.world > 1:
        raise UsageError(
            f"the weights are shared out over {engine.world} ranks", "use zero.export, and load it"
        )
    engine.drain()
    engine.flush()
    values = [
        (piece.parameter, value_of(chunk, piece))
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    ]
    engine.close()
    for parameter, value in values:
        weight.free(parameter)
        parameter.data = value
    packed.give_back(engine.module)
    for module in (model, engine.module):
        vars(module).pop("load_state_dict", None)
        vars(module).pop("__deepcopy__", None)
        for hook in shown.pop(module, ()):
            hook.remove()
    return engine.module
