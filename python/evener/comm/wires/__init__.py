"""The forms in which a shard crosses between nodes: `names()` lists them, `get(name)` gives one.

Read `base` first: it says what a form is and how to add one.
"""

from evener.comm.wires import dense, int8, topk  # noqa: F401 - they register themselves
from evener.comm.wires.base import (
    Limits,
    Wire,
    candidates,
    choose,
    get,
    ladder,
    milder,
    names,
    register,
    suitable,
)

__all__ = [
    "Limits",
    "Wire",
    "candidates",
    "choose",
    "get",
    "ladder",
    "milder",
    "names",
    "register",
    "suitable",
]
