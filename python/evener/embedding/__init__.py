"""Embeddings that grow: one store for PyTorch, TensorFlow and plain Python.

A `Store` maps any int64 (or any string) to a row of values with the optimizer's slots beside them.
It takes memory as keys come, gives it back as they go, and keys never collide.
`evener.embedding.torch` and `evener.embedding.tensorflow` are the doors to it; stores are found by
name, and all doors of a process share them. Nothing here imports torch or TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.embedding.options import (
        L2,
        Adagrad,
        Adam,
        AdamW,
        Bloom,
        Constant,
        Counter,
        Ftrl,
        GroupAdam,
        GroupFtrl,
        Lamb,
        LazyAdam,
        Lfu,
        Lru,
        Normal,
        Options,
        PartialRowWiseAdam,
        Probability,
        RowWiseAdagrad,
        Sgd,
        SsdTier,
        TruncatedNormal,
        Ttl,
        Uniform,
        Zeros,
        slots,
    )
    from evener.embedding.store import Rows, Store, forget, names, table

__all__ = [
    "L2",
    "Adagrad",
    "Adam",
    "AdamW",
    "Bloom",
    "Constant",
    "Counter",
    "Ftrl",
    "GroupAdam",
    "GroupFtrl",
    "Lamb",
    "LazyAdam",
    "Lfu",
    "Lru",
    "Normal",
    "Options",
    "PartialRowWiseAdam",
    "Probability",
    "RowWiseAdagrad",
    "Rows",
    "Sgd",
    "SsdTier",
    "Store",
    "TruncatedNormal",
    "Ttl",
    "Uniform",
    "Zeros",
    "forget",
    "names",
    "slots",
    "table",
]

_OF_STORE = {"Rows", "Store", "forget", "names", "table"}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: the command's help needs neither numpy nor the store."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{'store' if name in _OF_STORE else 'options'}")
    value = globals()[name] = getattr(module, name)
    return value
