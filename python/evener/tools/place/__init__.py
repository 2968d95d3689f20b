"""Placement: which hosts, in which order, and which GPU each rank takes (TCCL's idea).

`place(fabric, ranks)` gives a Placement; `evener launch --map` and `evener place` use it.
"""

from evener.tools.place.plan import Placement, Rank, Scenario, place

__all__ = ["Placement", "Rank", "Scenario", "place"]
