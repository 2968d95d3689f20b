"""What each cut costs: which tensors cross it, and how many bytes they are.

A tensor that is used several stages later (an encoder's output) crosses every cut on its way, as
stages talk with their neighbours only. Parameters and what is free (see `capture`) do not cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from evener.pipeline.capture import Captured


@dataclass(frozen=True)
class Crossing:
    """Values by the position of the operation that makes them, and of the last that uses them."""

    node: fx.Node
    made: int
    last: int


def crossings(captured: Captured) -> list[Crossing]:
    """All values that could cross a cut, in the order in which they are made."""
    place = {node: k for k, node in enumerate(captured.ops)}
    found = []
    for k, node in enumerate(captured.ops):
        uses = [place[user] for user in node.users if user in place]
        last = len(captured.ops) if node is captured.loss else max(uses, default=k)
        if last > k:
            found.append(Crossing(node, k, last))
    return found


def crossing_at(values: list[Crossing], position: int) -> list[fx.Node]:
    """The values that cross a cut before operation `position`, in order."""
    return [v.node for v in values if v.made < position <= v.last and position <= v.last]


def cut_bytes(captured: Captured, rows: int) -> tuple[Any, Any]:
    """(forward, backward) bytes across each position 0..n, for microbatches of `rows`.

    Gradients come back for floating-point tensors only.
    """
    count = len(captured.ops)
    forward, backward = np.zeros(count + 2), np.zeros(count + 2)
    for value in crossings(captured):
        meta = value.node.meta.get("val")
        if value.node is captured.loss and value.last == count:
            continue
        size = captured.bytes(value.node, rows)
        forward[value.made + 1] += size
        forward[value.last + 1] -= size
        if isinstance(meta, torch.Tensor) and meta.is_floating_point():
            backward[value.made + 1] += size
            backward[value.last + 1] -= size
    return np.cumsum(forward)[: count + 1], np.cumsum(backward)[: count + 1]


def candidates(captured: Captured, seconds: Any, size: Any, limit: int = 600) -> list[int]:
    """Positions where a cut may be: all that are not glued, or the cheapest of each `limit`-th part
    of the time where there are more. 0 and n are not among them."""
    free = [k for k in range(1, len(captured.ops)) if not captured.glued[k]]
    if len(free) <= limit:
        return free
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    window = total[-1] / limit
    best: dict[int, int] = {}
    for k in free:
        part = int(total[k] / window) if window else k
        if part not in best or size[k] < size[best[part]]:
            best[part] = k
    return sorted(best.values())
