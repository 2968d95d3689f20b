"""What a model is called with: guessed from the model where nobody says (for `trace`), told from
other calls, and moved to the accelerator.

A model of transformers names its main input and has labels in its signature; any other model is
tried with tokens. Only shapes are looked at, so the tensors are on the meta device.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_with_path

from evener.errors import UsageError

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call_of(example: Any) -> Call:
    """Arguments from an example of them: a mapping is keywords, a tuple or list positions."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}


SEEN = 64
"""Elements that are looked at first: data of whole numbers has nothing else in these."""


@torch.no_grad()
def changed(value: torch.Tensor, dtype: torch.dtype) -> float | None:
    """The first whole number that `dtype` does not have, of a tensor that holds whole numbers alone
    (time steps, counts, ids in a floating-point dtype); None where there is none."""
    if not value.is_floating_point() or value.dtype == dtype or value.numel() == 0:
        return None
    if value.is_meta or value.layout != torch.strided:
        return None
    if torch.finfo(dtype).eps <= torch.finfo(value.dtype).eps:
        return None
    value = value.detach()
    for part in (value.reshape(-1)[:SEEN], value):
        if not bool((part == part.round()).all()):
            return None
    lost = value.to(dtype).to(value.dtype) != value
    return float(value[lost][0]) if bool(lost.any()) else None


def moved(args: Any, kwargs: Any, to: torch.device, cast: torch.dtype) -> tuple[Any, Any]:
    """A call's arguments on a device, floating-point ones in a dtype. Raises UsageError for whole
    numbers that it cannot hold: 999 would be 1000 in bf16."""

    def move(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (lost := changed(value, cast)) is not None:
            raise UsageError(
                f"{said(path)} holds whole numbers, and {cast} has none of "
                f"{lost:.0f}: it would become {float(torch.tensor(lost).to(cast)):.0f}",
                "give them as integers, and cast where the model computes with them; or scale "
                "them down",
            )
        value = value.to(to, non_blocking=True)
        return value.to(cast) if value.is_floating_point() else value

    there: tuple[Any, Any] = tree_map_with_path(move, (args, kwargs))
    return there


def said(path: Any) -> str:
    """An argument's name, from its place in (args, kwargs)."""
    named, *inner = (getattr(key, "key", getattr(key, "idx", key)) for key in path)
    first, *rest = inner
    where = "".join(f"[{each!r}]" for each in rest)
    return f"input {first}{where}" if named else f"input number {first + 1}{where}"


def signature(args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """What tells one call's memory from another's: shapes and dtypes, which names are given, and
    flags and words, as they choose between branches (numbers often count steps, and do not).
    `dtype`: what floating-point inputs are cast to."""

    def kind(tensor: torch.Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    def told(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), kind(leaf)
        return leaf if isinstance(leaf, bool | str) else type(leaf)

    leaves, spec = tree_flatten((args, kwargs))
    return tuple(map(told, leaves)), str(spec)


def positions(model: nn.Module) -> int | None:
    """The most tokens that a sequence of it has, where its configuration says so."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def guess(model: nn.Module, rows: int, length: int) -> Call:
    """A call with `rows` sequences of `length` tokens (or images, or sounds)."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    named = _names(model)

    def whole(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    def real(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="meta")

    if config is None or main is None:
        return (whole(rows, length),), {}
    given: dict[str, Any] = {}
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        high, wide = (size, size) if isinstance(size, int) else tuple(size)
        given[main] = real(rows, getattr(config, "num_channels", 3), high, wide)
        if "labels" in named:
            given["labels"] = whole(rows)
        return (), given
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        given[main] = real(rows, bins, 2 * getattr(config, "max_source_positions", 1500))
        top = getattr(config, "max_target_positions", length)
        if "labels" in named:
            given["labels"] = whole(rows, min(length, top))
        return (), given
    if main == "input_values":
        ratio = getattr(config, "inputs_to_logits_ratio", 320)
        given[main] = real(rows, length * ratio)
        if "labels" in named:
            given["labels"] = whole(rows, max(1, length // 8))
        return (), given
    if "return_loss" in named and hasattr(config, "vision_config"):  # two towers, as CLIP has
        text, seen = config.text_config, config.vision_config
        given[main] = whole(rows, min(length, getattr(text, "max_position_embeddings", length)))
        size = getattr(seen, "image_size", 224)
        given["pixel_values"] = real(rows, getattr(seen, "num_channels", 3), size, size)
        return (), {**given, "return_loss": True}
    length = min(length, positions(model) or length)
    given[main] = whole(rows, length)
    if "labels" in named:
        one = type(model).__name__.endswith("SequenceClassification")
        given["labels"] = whole(rows) if one else whole(rows, length)
    return (), given


def _names(model: nn.Module) -> set[str]:
    inner = getattr(model, "get_base_model", None)  # of a model of peft
    target = inner() if callable(inner) else model
    try:
        return set(inspect.signature(type(target).forward).parameters)
    except (TypeError, ValueError):
        return set()
