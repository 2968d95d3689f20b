"""ignite: its engine, its metrics and its auto_ helpers, on its Horovod backend or on gloo."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import PiecewiseLinear
from ignite.metrics import Accuracy
from torch import nn

from tests.wild import harness as wild


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(4, (512,), generator=generator))


def main() -> None:
    wild.begin()
    idist.initialize("horovod" if wild.HOROVOD else "gloo")
    net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        for parameter in net.parameters():  # each rank begins elsewhere: auto_model tells rank 0's
            parameter.add_(0.01 * wild.RANK)
    model = idist.auto_model(net)
    wild.watch(net)
    optimizer = idist.auto_optim(torch.optim.Adam(net.parameters(), lr=1e-2))
    loader = idist.auto_dataloader(data(), batch_size=16)

    def train(engine, batch):
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    trainer = Engine(train)
    schedule = PiecewiseLinear(optimizer, "lr", [(0, 1e-3), (10, 1e-2), (wild.STEPS, 0.0)])
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: wild.step(e.state.output))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=wild.STEPS), lambda engine: engine.terminate()
    )
    evaluator = Engine(lambda _, batch: (net(batch[0]).detach(), batch[1]))
    accuracy = Accuracy()
    accuracy.attach(evaluator, "accuracy")
    trainer.run(loader, max_epochs=100)
    evaluator.run(loader)
    # The metric is of all ranks, so that it is one more thing to compare.
    wild.step(evaluator.state.metrics["accuracy"])
    wild.end()
    if wild.HOROVOD:
        idist.finalize()


if __name__ == "__main__":
    main()
