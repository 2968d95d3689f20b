"""Ways of training of other kinds than a loop over one loss: one function each, named by argument.

swa: averaged weights, whose batch norms see the data once more. siamese: two forwards and a loss of
both. teacher: a mean teacher, whose labels the student learns. penalty: WGAN-GP's critic. maml: the
inner step of torch.func, in the model's forward. policy: REINFORCE, with episodes of any length.
albert: one layer's parameters, used again and again. depth: layers are dropped, alike on all ranks.
"""

import copy
import itertools
import sys

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from tests.wild import harness as wild

STEPS = range(wild.STEPS)


def net(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def wrapped(
    module: nn.Module, make: type = torch.optim.AdamW, **ddp: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(module, **ddp)
    optimizer = make(model.parameters(), lr=3e-3)
    wild.line(model, optimizer)
    return model, optimizer


def take(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def swa() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    averaged = AveragedModel(module)
    wild.watch(module, averaged)
    model, optimizer = wrapped(module, torch.optim.SGD)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    for step in STEPS:
        target = wild.tokens(step, 4, 8)
        loss = nn.functional.cross_entropy(model(wild.data(step, 8, 16)), target)
        take(optimizer, loss)
        if step > 10 and step % 5 == 0:
            averaged.update_parameters(module)
            schedule.step()
        wild.step(loss)
    update_bn([torch.randn(8, 16, generator=torch.Generator().manual_seed(s)) for s in range(4)],
              averaged)  # fmt: skip


def siamese() -> None:
    module = net(16, 32, 8)
    wild.watch(module)
    # With buffers to broadcast, two forwards before a backward are an error of DDP's own.
    model, optimizer = wrapped(module, broadcast_buffers=False)
    for step in STEPS:
        one, other = model(wild.data(step, 8, 16)), model(wild.data(step + 5000, 8, 16))
        same = wild.tokens(step, 2, 8)
        apart = nn.functional.pairwise_distance(one, other)
        loss = (same * apart.square() + (1 - same) * (1 - apart).clamp(min=0).square()).mean()
        take(optimizer, loss)
        wild.step(loss)


def teacher() -> None:
    module = net(16, 32, 4)
    mean = copy.deepcopy(module).requires_grad_(False)
    wild.watch(module, mean)
    model, optimizer = wrapped(module)
    for step in STEPS:
        x = wild.data(step, 8, 16)
        with torch.no_grad():
            wanted = mean(x + 0.1 * wild.data(step + 5000, 8, 16)).softmax(-1)
        given = model(x)
        loss = nn.functional.cross_entropy(given, wild.tokens(step, 4, 8))
        loss = loss + nn.functional.mse_loss(given.softmax(-1), wanted)
        take(optimizer, loss)
        with torch.no_grad():
            for ours, theirs in zip(mean.parameters(), module.parameters(), strict=True):
                ours.lerp_(theirs, 0.05)
        wild.step(loss)


def penalty() -> None:
    make, judge = net(8, 32, 16), net(16, 32, 1)
    wild.watch(make, judge)
    generator, for_g = wrapped(make)
    critic, for_c = wrapped(judge)
    for step in STEPS:
        with torch.no_grad():
            fake = generator(wild.data(step + 5000, 8, 8))
        real = wild.data(step, 8, 16)
        mixed = (real + (fake - real) * wild.data(step, 8, 1).sigmoid()).requires_grad_()
        score = critic(torch.cat([real, fake, mixed]))
        (slope,) = torch.autograd.grad(score[16:].sum(), mixed, create_graph=True)
        loss = score[8:16].mean() - score[:8].mean() + 10 * (slope.norm(2, 1) - 1).square().mean()
        take(for_c, loss)
        if step % 3 == 2:
            judge.requires_grad_(False)
            take(for_g, -judge(generator(wild.data(step + 9000, 8, 8))).mean())
            judge.requires_grad_(True)
        wild.step(loss)


class Adapts(nn.Module):
    """A forward whose own weights take one step on the support set before they see the query."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rate = net(4, 32, 1), nn.Parameter(torch.tensor(0.1))

    def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        weights = dict(self.inner.named_parameters())

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return (functional_call(self.inner, weights, (x[:, :4],)) - x[:, 4:]).square().mean()

        slopes = grad(loss)(weights, support)
        moved = {name: weight - self.rate * slopes[name] for name, weight in weights.items()}
        return loss(moved, query)


def maml() -> None:
    module = Adapts()
    wild.watch(module)
    model, optimizer = wrapped(module)
    for step in STEPS:
        loss = model(wild.data(step, 8, 5), wild.data(step + 5000, 8, 5))
        take(optimizer, loss)
        wild.step(loss)


def policy() -> None:
    module = net(6, 32, 3)
    wild.watch(module)
    model, optimizer = wrapped(module)
    baseline = 0.0
    for step in STEPS:
        length = 3 + int(wild.tokens(step, 6, 1))
        states = wild.data(step, length, 6)
        with torch.no_grad():  # the episode is played by the module itself
            odds = module(states).softmax(-1)
            actions = odds.multinomial(1, generator=torch.Generator().manual_seed(step)).squeeze(1)
        rewards = (actions == states.argmax(-1) % 3).float()
        gains = rewards.flip(0).cumsum(0).flip(0)
        chosen = model(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        take(optimizer, loss := -(chosen * (gains - baseline)).mean())
        baseline = 0.9 * baseline + 0.1 * float(gains.mean())
        wild.step(loss)


class Repeated(nn.Module):
    """One block, as deep as is said; `skip`: places at which it is left out."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.word = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(blocks)
        )
        self.out = nn.Linear(16, 50)

    def forward(self, x: torch.Tensor, depth: int, skip: tuple[int, ...] = ()) -> torch.Tensor:
        y = self.word(x)
        for place in range(depth):
            if place not in skip:
                y = self.blocks[place % len(self.blocks)](y)
        return self.out(y)


def albert() -> None:
    _language(Repeated(1), lambda step: (3 + step % 3, ()))


def depth() -> None:
    _language(
        Repeated(4), lambda step: (4, ((step * 7) % 4, (step * 3) % 5)), find_unused_parameters=True
    )


def _language(module: Repeated, how, **ddp: bool) -> None:  # type: ignore[no-untyped-def]
    wild.watch(module)
    model, optimizer = wrapped(module, **ddp)
    for step in STEPS:
        x = wild.tokens(step, 50, 4, 6)
        loss = nn.functional.cross_entropy(
            model(x, *how(step)).flatten(0, 1), x.roll(1, 1).flatten()
        )
        take(optimizer, loss)
        wild.step(loss)


KINDS = {f.__name__: f for f in (swa, siamese, teacher, penalty, maml, policy, albert, depth)}

if __name__ == "__main__":
    wild.begin(group=True)
    KINDS[sys.argv[1]]()
    wild.end()
