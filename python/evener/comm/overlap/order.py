"""In which order buckets leave: as soon as there is one, and of several the one that the next
forward needs first.

Every rank must issue the same sequence, so it is made once, from rank 0's profile of a step, and a
bucket that is complete early waits for its turn. List scheduling on one resource, the network:
never idle while something is ready.
"""

from __future__ import annotations

from collections.abc import Sequence


def issue_order(
    ready: Sequence[float], need: Sequence[float], cost: Sequence[float]
) -> tuple[int, ...]:
    """Indices in the order of issue; all lists hold one time a bucket, in one unit.

    `ready`: when its gradients are complete; `need`: when the next forward uses it; `cost`: how
    long it occupies the network.
    """
    left, order, now = set(range(len(ready))), [], 0.0
    while left:
        here = [bucket for bucket in left if ready[bucket] <= now]
        if not here:
            now = min(ready[bucket] for bucket in left)
            continue
        first = min(here, key=lambda bucket: (need[bucket], bucket))
        order.append(first)
        left.remove(first)
        now += cost[first]
    return tuple(order)
