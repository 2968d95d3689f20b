"""Imported once by the fork server of `tests.worlds`: what every rank will need.

torch._dynamo is what DistributedDataParallel imports when the first one is made, and with the other
modules of torch here what torch.export imports when the first model is traced; they take seconds.
The doors import theirs when they are first used, 0.4 s of each rank's processor time.
"""

import gc

import networkx  # noqa: F401
import pytest  # noqa: F401
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo
import torch._export.non_strict_utils
import torch._export.passes.replace_autocast_with_hop_pass
import torch._inductor.config
import torch._inductor.fx_passes.dedupe_symint_uses
import torch._inductor.sizevars
import torch.distributed.checkpoint.state_dict
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.export._trace
import torch.fx.experimental.validator  # noqa: F401

import evener.comm.reducer
import evener.ddp.line
import evener.ddp.model
import evener.embedding.torch
import evener.fsdp
import evener.horovod.torch
import evener.moe
import evener.pipeline
import evener.tools.lab
import evener.zero  # noqa: F401

# What is here stays in every rank: no collection looks at it, or copies its pages.
gc.collect()
gc.freeze()
