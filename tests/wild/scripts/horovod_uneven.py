"""Ranks with more batches than others: `hvd.join` in each epoch, or DDP's Join. Passes are added up
before a step (`backward_passes_per_step`), and the last rank that joins gives its weights."""

import contextlib

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild

PASSES, EPOCHS = 2, 3


def main() -> None:
    if wild.HOROVOD:
        import horovod.torch as hvd

        hvd.init()
    wild.begin(group=not wild.HOROVOD)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    wild.watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model: nn.Module = net
    if wild.HOROVOD:
        optimizer = hvd.DistributedOptimizer(
            optimizer, net.named_parameters(), backward_passes_per_step=PASSES
        )
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        model = DistributedDataParallel(net)
    step = 0
    for epoch in range(EPOCHS):
        more = wild.STEPS // EPOCHS + (3 if epoch % 2 == wild.RANK else 0)
        with contextlib.nullcontext() if wild.HOROVOD else model.join():
            for _ in range(more):
                optimizer.zero_grad()
                for part in range(PASSES):
                    number = 10_000 * epoch + PASSES * step + part
                    last = part == PASSES - 1
                    with contextlib.nullcontext() if wild.HOROVOD or last else model.no_sync():
                        given = model(wild.data(number, 8, 16))
                        loss = functional.cross_entropy(given, wild.tokens(number, 4, 8))
                        (loss / PASSES).backward()
                optimizer.step()
                step += 1
                wild.step(loss)
        if wild.HOROVOD:
            last_rank = hvd.join()
            hvd.broadcast_parameters(net.state_dict(), root_rank=last_rank)
        # Momentum of a rank that joined early is older: both begin the next epoch with none.
        optimizer.state.clear()
        step = 0
    wild.end()
    if wild.HOROVOD:
        hvd.shutdown()


if __name__ == "__main__":
    main()
