"""A model under the engine as a framework's loop wants it: called by itself, with real values in
`state_dict()`, and `load_state_dict()` that reaches the states.

While the engine runs, a model's own parameters hold values only while their unit runs. Values are
therefore taken from the states: in float32, exactly what the optimizer updates. A model that is
made in float32 and loads them goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from evener.errors import UsageError
from evener.zero.api import Batch, ZeroOptimizer, initialize
from evener.zero.chunk import Chunk
from evener.zero.config import Config
from evener.zero.engine import Engine
from evener.zero.ranks import world_size
from evener.zero.units import Piece


def refuse_ranks(name: str) -> None:
    """Raises UsageError where there are several processes."""
    if world_size() > 1:
        raise UsageError(
            f"{name} runs in {world_size()} processes: its checkpoints hold whole weights, and "
            "each process has a share",
            "use one process here, or zero.initialize and zero.save_checkpoint in a loop of "
            "your own",
        )


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Config,
    *,
    root: nn.Module | None = None,
    example: Any = None,
    batch: Batch | None = None,
) -> tuple[Engine, ZeroOptimizer]:
    """The engine takes `root` (the model, or what holds it), and `optimizer` keeps its groups: a
    scheduler that was made for it steers the engine's. `model` gets the faces."""
    engine, front, _, _ = initialize(
        model=root or model, optimizer=optimizer, config=settings, example=example, batch=batch
    )
    _show(model, engine)
    return engine, front


def _show(model: nn.Module, engine: Engine) -> None:
    """Real values in and out, and inputs that are cast and moved as the engine's own call does."""
    places = {
        id(piece.parameter): (chunk, piece)
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    }

    def out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        engine.drain()
        engine.flush()
        made: dict[int, torch.Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in places and prefix + name in state:
                if id(parameter) not in made:
                    made[id(parameter)] = value_of(*places[id(parameter)])
                state[prefix + name] = made[id(parameter)]

    plain = model.load_state_dict

    def load(
        state: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,  # noqa: ARG001
    ) -> _IncompatibleKeys:
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

    model.register_state_dict_post_hook(out)
    vars(model)["load_state_dict"] = load


def value_of(chunk: Chunk, piece: Piece) -> torch.Tensor:
    """A parameter's value on the CPU: float32 where it is trained, else as it is computed with."""
    begin, end = piece.offset, piece.offset + piece.numel
    trained = chunk.group.trainable
    full = chunk.full(begin, end) if trained else chunk.states.weights[begin:end]
    return full.detach().to("cpu", copy=True).view(piece.shape)


def _check_shapes(named: Mapping[str, tuple[Chunk, Piece]], state: Mapping[str, Any]) -> None:
    for name, (_, piece) in named.items():
        if name in state and tuple(state[name].shape) != tuple(piece.shape):
            raise RuntimeError(
                f"size mismatch for {name}: {tuple(state[name].shape)} in the state, "
                f"{tuple(piece.shape)} in the model"
            )


@torch.no_grad()
def _set(chunk: Chunk, piece: Piece, value: torch.Tensor) -> None:
    flat = value.detach().reshape(-1).to(chunk.states.weights.device)
    if chunk.group.trainable:
        chunk.store(piece.offset, flat.float())
    else:
        chunk.states.weights[piece.offset : piece.offset + piece.numel].copy_(flat)
    chunk.refresh()


@torch.no_grad()
def give_back(model: nn.Module, engine: Engine) -> None:
    """Close the engine; the model's parameters have their values again, on the CPU."""
    engine.drain()
    engine.flush()
    values = [
        (piece.parameter, value_of(chunk, piece))
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    ]
    engine.close()
    for parameter, value in values:
        parameter.data = value
    vars(model).pop("load_state_dict", None)
