"""What a capture or a trial run leaves as it was: attributes of modules, values of buffers, and the
state of random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from evener.errors import UsageError


@contextlib.contextmanager
def as_it_was(*modules: Any, buffers: bool = True) -> Iterator[None]:
    """Put back what a call changes in modules: attributes, lists and dicts, and modes.

    Values of buffers that are written in place are not looked at. `buffers`: whether one that is
    another tensor now is put back.
    """
    every = [m for one in modules if isinstance(one, nn.Module) for m in one.modules()]
    leave = set() if buffers else {"_buffers", "_parameters"}
    before = [(m, dict(m.__dict__), {k: v.copy() for k, v in m.__dict__.items()
                                     if isinstance(v, dict | list | set) and k not in leave})
              for m in every]  # fmt: skip
    try:
        yield
    finally:
        for module, attributes, held in before:
            for name in set(module.__dict__) - set(attributes):
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, was in held.items():
                now = attributes[name]
                if isinstance(now, list):
                    now[:] = was
                else:
                    now.clear()
                    now.update(was)


@contextlib.contextmanager
def values_kept(*modules: nn.Module) -> Iterator[None]:
    """Put back the values of buffers, and of parameters that a forward writes to."""
    tensors = {id(t): t for m in modules for t in m.buffers()}
    versions = [(p, p._version) for m in modules for p in m.parameters()]
    before = {key: t.detach().clone() for key, t in tensors.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(before[key])
        if any(p._version != version for p, version in versions):
            raise UsageError(
                "the forward writes to its own parameters (an embedding with max_norm does)",
                "do it after optimizer.step(), or make what is written a buffer",
            )


@contextlib.contextmanager
def quiet_random(device: torch.device) -> Any:
    """Leave the state of random numbers as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
