"""Imported once by the fork server of `tests.worlds`: what every rank will need.

torch._dynamo is what DistributedDataParallel imports when the first one is made; it takes seconds.
"""

import torch._dynamo  # noqa: F401

import evener.comm.reducer
import evener.ddp  # noqa: F401
