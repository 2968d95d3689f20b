"""The forms in which a shard crosses between nodes: `names()` lists them, `get(name)` gives one.

Read `base` first: it says what a form is and how to add one. Every file of this folder is imported,
so that a new one needs to be named nowhere.
"""

import importlib
import pkgutil

from evener.comm.wires.base import (
    Limits,
    Paper,
    Wire,
    candidates,
    choose,
    get,
    ladder,
    milder,
    names,
    papers,
    register,
    suitable,
)

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")  # they register themselves

__all__ = [
    "Limits",
    "Paper",
    "Wire",
    "base",
    "blocks",
    "candidates",
    "choose",
    "get",
    "ladder",
    "milder",
    "names",
    "papers",
    "register",
    "suitable",
]
