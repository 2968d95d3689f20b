"""What a probe cannot have found: a form that crosses faster than its bytes would as they are.

A probe of a few calls is noisy, above all for tensors of a few KB, where a call is all latency and
one form's is as long as another's. A form's exchange is one of its payload, and encoding and
decoding besides: it takes at least as long as an exact exchange of this many bytes. Held to that, a
form saves what its bytes save, and where latency is all there is, nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from evener.comm.planner.costs import Costs, Curve


def plausible(costs: Costs, shares: Mapping[str, float]) -> Costs:
    """`costs` with no form faster than its payload; `shares`: bytes that it sends for one of exact.

    Forms that are not in `shares` stay as they are.
    """
    exact = costs.exchange["exact"]
    exchange = dict(costs.exchange)
    for form, share in shares.items():
        if form == "exact" or form not in exchange:
            continue
        curve, least = exchange[form], min(1.0, share)
        sizes = [size for size, _ in curve.points]
        # Below the smallest that was probed too, where the straight line on may be too steep.
        sizes = [*(sizes[0] / part for part in (64, 8)), *sizes] if sizes else []
        exchange[form] = Curve(tuple((x, max(curve(x), exact(least * x))) for x in sizes))
    return dataclasses.replace(costs, exchange=exchange)
