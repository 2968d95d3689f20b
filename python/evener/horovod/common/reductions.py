"""Horovod's reductions, by upstream's numbers."""

from __future__ import annotations

Average, Sum, Adasum, Min, Max, Product = range(6)
