"""Computing with a model beside its training, so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def aside(model: torch.nn.Module, train: bool = False) -> Iterator[None]:
    """Whatever the model computes in it: modes, buffers and random numbers are as before.

    train: the modules stay in the mode that they are in; else all are in eval mode.
    DistributedDataParallel changes buffers in any mode: a forward pass sends rank 0's to the
    others, and the one after a pass without gradients does not.
    """
    parallel = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    sends = [(module, module.require_forward_param_sync) for module in parallel]
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    places = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(sorted(p.index for p in places)):
        if not train:
            model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for wrapper, sync in sends:
                wrapper.require_forward_param_sync = sync
            with torch.no_grad():
                for buffer, before in kept:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
