"""Imported once by the fork server of `tests.worlds`: what every rank will need.

torch._dynamo is what DistributedDataParallel imports when the first one is made, and with the other
modules of torch here what torch.export imports when the first model is traced; they take seconds.
"""

import networkx  # noqa: F401
import pytest  # noqa: F401
import sympy.combinatorics  # noqa: F401
import torch._dynamo
import torch._export.non_strict_utils
import torch._inductor.config
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.export._trace  # noqa: F401

import evener.comm.reducer
import evener.ddp
import evener.moe
import evener.pipeline
import evener.zero  # noqa: F401
