"""DistributedDataParallel with less network: one line for a script that wraps its model in DDP.

    model = DistributedDataParallel(model)
    model = evener.ddp.accelerate(model, optimizer)

`line` is that line, `model` the class that it gives a model, `local` the one that averages weights
every N steps instead of gradients in each, `nodes` the same between nodes that come and go,
`shard` each rank's share of the data there, `torch_reducer` DDP's own reducer for
where that is the fastest. `integrations` holds what frameworks need besides. `evener.door` comes in
without a line. Names are loaded when they are used: frameworks look at `integrations` at every
start, and torch should not be imported for that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.ddp.line import MODES, accelerate, refuse_unsupported
    from evener.ddp.local import LocalDataParallel
    from evener.ddp.model import AcceleratedDataParallel, restore
    from evener.ddp.nodes import NodeDataParallel
    from evener.ddp.shard import data_shard

__all__ = [
    "MODES",
    "AcceleratedDataParallel",
    "LocalDataParallel",
    "NodeDataParallel",
    "accelerate",
    "data_shard",
    "integrations",
    "refuse_unsupported",
    "restore",
]

_FROM = {
    "MODES": "line",
    "AcceleratedDataParallel": "model",
    "LocalDataParallel": "local",
    "NodeDataParallel": "nodes",
    "accelerate": "line",
    "data_shard": "shard",
    "refuse_unsupported": "line",
    "restore": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    return value
