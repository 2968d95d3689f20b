"""The ground on which all rooms stand: settings, log, units, records, and the like.

Each module here is a face of its own: `from evener.base import settings`. None imports a pillar,
and only `kernels` and `optimizers` import torch.
"""
