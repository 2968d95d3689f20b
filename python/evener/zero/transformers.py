"""What models of transformers need to be trained as they are. Nothing is imported from there.

A forward pass in training keeps keys and values of all tokens for a generation that never comes,
and a block that is recomputed would add its own a second time: `use_cache` is off while gradients
are on. On fake tensors attention would make masks that it does without on real ones: while a step
is traced it is told that it is not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def as_real() -> Iterator[None]:
    """What looks for fake tensors finds none."""
    names = ("transformers.masking_utils", "transformers.integrations.sdpa_attention")
    places = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), "is_tracing")]
    before = [(place, vars(place)["is_tracing"]) for place in places]
    for place in places:
        vars(place)["is_tracing"] = lambda *_: False
    try:
        yield
    finally:
        for place, value in before:
            vars(place)["is_tracing"] = value


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Buffers of a model that was made on the meta device as a whole: its own `_init_weights`
    computes those of rotary embeddings and norms. Others keep no value, and are refused later."""
    fill = getattr(model, "_init_weights", None)
    for module in model.modules():
        mine = {name: b for name, b in module._buffers.items() if b is not None}
        if not callable(fill) or not any(b.is_meta for b in mine.values()):
            continue
        if any(True for _ in module.parameters(recurse=False)):
            continue  # it would draw weights anew
        before = dict(module._buffers)
        for name, buffer in mine.items():
            module._buffers[name] = torch.full(
                buffer.shape,
                torch.nan if buffer.is_floating_point() else -1,
                dtype=buffer.dtype,
            )
        fill(module)
        filled = [module._buffers[name] for name in mine]
        if any(b is None or bool((b != b).any() if b.is_floating_point() else (b == -1).any())
               for b in filled):  # fmt: skip
            module._buffers.update(before)


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for each in (config, getattr(config, "text_config", None)):
            if each is not None and getattr(each, "use_cache", False) is True:
                found[id(each)] = each
    return list(found.values())


def without_cache(model: nn.Module) -> Callable[[], None]:
    """Wrap `model.forward`; returns what unwraps it."""
    configs = _configs(model)
    if not configs:
        return lambda: None
    inner = model.forward

    @functools.wraps(inner)  # generation looks at the names of its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        for config in configs:
            config.use_cache = False
        try:
            return inner(*args, **kwargs)
        finally:
            for config in configs:
                config.use_cache = True

    model.forward = forward

    def undo() -> None:
        model.forward = inner

    return undo
