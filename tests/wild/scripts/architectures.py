"""Models of other kinds than transformers and plain convolutions, each trained as its users do: one
function each, named by argument.

scan: a selective state space (Mamba), whose scan has a backward pass of its own. mixing: a time
mixing recurrence (RWKV) over chunks, with the state handed from chunk to chunk. graph: messages
over graphs of any size. convnext: depthwise convolutions in channels_last, layer scale, drop path,
mixup, averaged weights. flow: a UNet that learns a velocity, with its inputs' condition dropped.
queue: momentum contrast, with keys of all ranks in a queue.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.wild import harness as wild

STEPS = range(wild.STEPS)


def wrapped(
    module: nn.Module, optimizer: torch.optim.Optimizer, **ddp: bool
) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **ddp)
    wild.line(model, optimizer)
    return model


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices are decayed, vectors are not."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


class Scan(torch.autograd.Function):
    """h[t] = a[t] * h[t - 1] + b[t]; all (batch, time, channels, state)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        states = [b[:, 0]]
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
        h = torch.stack(states, 1)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, h = ctx.saved_tensors
        to_b = grad.clone()
        for t in range(grad.shape[1] - 2, -1, -1):
            to_b[:, t] += a[:, t + 1] * to_b[:, t + 1]
        to_a = torch.zeros_like(a)
        to_a[:, 1:] = to_b[:, 1:] * h[:, :-1]
        return to_a, to_b


class Selective(nn.Module):
    """A block of Mamba's: gate, short convolution, and a state whose decay depends on the input."""

    def __init__(self, width: int, inner: int, state: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.enter, self.leave = nn.Linear(width, 2 * inner, False), nn.Linear(inner, width, False)
        self.near = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.choose, self.rate = nn.Linear(inner, 2 * state + 1, False), nn.Linear(1, inner)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().expand(inner, -1).clone())
        self.past = nn.Parameter(torch.ones(inner))
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = functional.silu(self.near(y.mT)[..., : y.shape[1]].mT)
        rate, into, out = self.choose(y).split([1, self.state, self.state], -1)
        step = functional.softplus(self.rate(rate))
        a = torch.exp(-step[..., None] * self.decay.exp())
        h = Scan.apply(a, (step * y)[..., None] * into[:, :, None])
        y = (h * out[:, :, None]).sum(-1) + self.past * y
        return x + self.leave(y * functional.silu(gate))


class Language(nn.Module):
    """Blocks between an embedding and a head of the same weights."""

    def __init__(self, *blocks: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.blocks = nn.ModuleList(blocks)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return self.head(y)


def scan() -> None:
    module = Language(*(Selective(16, 32, 4) for _ in range(2)))
    wild.watch(module)
    optimizer = torch.optim.AdamW(two_groups(module), lr=3e-3, betas=(0.9, 0.95), foreach=True)
    model = wrapped(module, optimizer, gradient_as_bucket_view=True)
    for step in STEPS:
        x = wild.tokens(step, 50, 4, 13)
        logits = model(x[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wild.step(loss)


class Mixing(nn.Module):
    """Time and channel mixing of RWKV's. `state`: of the chunk before, (3, batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Parameter(torch.rand(3, width))
        self.decay, self.first = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.kvr = nn.ModuleList(nn.Linear(width, width, False) for _ in range(3))
        self.out = nn.Linear(width, width, False)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norms[0](x)
        before = torch.cat([state[0][:, None], y[:, :-1]], 1)
        mixed = (torch.lerp(before, y, mix) for mix in self.mix)
        k, v, r = (line(z) for line, z in zip(self.kvr, mixed, strict=True))
        top, bottom, found = state[1], state[2], []
        for t in range(x.shape[1]):
            now = (self.first + k[:, t]).exp()
            found.append((top + now * v[:, t]) / (bottom + now))
            kept = torch.exp(-self.decay.exp())
            top = kept * top + k[:, t].exp() * v[:, t]
            bottom = kept * bottom + k[:, t].exp()
        x = x + self.out(r.sigmoid() * torch.stack(found, 1))
        x = x + self.narrow(functional.relu(self.wide(self.norms[1](x))).square())
        return x, torch.stack([y[:, -1], top, bottom])


class Recurrent(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.ModuleList(Mixing(width) for _ in range(2))
        self.begin = nn.Parameter(torch.zeros(2, 3, 1, width))

    def forward(
        self, x: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if states is None:  # the state at the start is learned, and unused in later chunks
            states = self.begin.expand(-1, -1, len(x), -1)
        y, left = self.words(x), []
        for block, state in zip(self.blocks, states, strict=True):
            y, state = block(y, state)
            left.append(state)
        return self.head(y), torch.stack(left)


def mixing() -> None:
    module = Recurrent()
    wild.watch(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    model = wrapped(module, optimizer, find_unused_parameters=True)
    states = None
    for step in STEPS:
        x = wild.tokens(step, 50, 4, 7)
        logits, states = model(x[:, :-1], states if step % 4 else None)
        states = states.detach()
        loss = functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wild.step(loss)


class Messages(nn.Module):
    """Nodes take the sum and the greatest of what their neighbours say; then one vector a graph."""

    def __init__(self, kinds: int, width: int, rounds: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(kinds, width)
        self.says = nn.ModuleList(nn.Linear(2 * width + 1, width) for _ in range(rounds))
        self.takes = nn.ModuleList(nn.GRUCell(2 * width, width) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(rounds))
        self.out = nn.Linear(width, 1)

    def forward(
        self, kind: torch.Tensor, edges: torch.Tensor, long: torch.Tensor, graph: torch.Tensor
    ) -> torch.Tensor:
        x = self.kinds(kind)
        for says, takes, norm in zip(self.says, self.takes, self.norms, strict=True):
            said = functional.silu(says(torch.cat([x[edges[0]], x[edges[1]], long], 1)))
            summed = torch.zeros_like(x).index_add(0, edges[1], said)
            most = torch.zeros_like(x).scatter_reduce(
                0, edges[1][:, None].expand_as(said), said, "amax", include_self=False
            )
            x = norm(takes(torch.cat([summed, most], 1), x))
        pooled = torch.zeros(int(graph.max()) + 1, x.shape[1]).index_add(0, graph, x)
        return self.out(pooled).squeeze(1)


def graph() -> None:
    module = Messages(5, 16, 3)
    wild.watch(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, amsgrad=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    model = wrapped(module, optimizer)
    for step in STEPS:
        sizes = 3 + wild.tokens(step, 6, 4)
        owner = torch.arange(4).repeat_interleave(sizes)
        nodes = int(sizes.sum())
        edges = wild.tokens(step + 5000, nodes, 2, 3 * nodes)
        long = wild.data(step, 3 * nodes, 1).abs()
        kind = wild.tokens(step + 9000, 5, nodes)
        wanted = torch.zeros(4).index_add(0, owner, (kind == 2).float())
        loss = functional.smooth_l1_loss(model(kind, edges, long, owner), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
        schedule.step(seen)
        wild.step(loss)


class Depthwise(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-2 * torch.ones(width))
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.near(x).permute(0, 2, 3, 1))
        y = (self.narrow(functional.gelu(self.wide(y))) * self.scale).permute(0, 3, 1, 2)
        if self.training and self.drop:
            kept = torch.rand(len(x), 1, 1, 1) >= self.drop
            y = y * kept / (1 - self.drop)
        return x + y


def convnext() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 12, 4, 4), Depthwise(12, 0.0), nn.GroupNorm(1, 12), nn.Conv2d(12, 24, 2, 2),
        Depthwise(24, 0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    wild.watch(module, averaged)
    optimizer = torch.optim.AdamW(two_groups(module), lr=4e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, wild.STEPS)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [5])
    model = wrapped(module, optimizer)
    torch.manual_seed(wild.RANK)  # each rank drops other paths
    for step in STEPS:
        x = wild.data(step, 8, 3, 32, 32).to(memory_format=torch.channels_last)
        y = functional.one_hot(wild.tokens(step, 5, 8), 5).float()
        share = float(torch.distributions.Beta(0.8, 0.8).sample())
        x, y = share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)
        loss = functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        averaged.update_parameters(model.module)
        wild.step(loss)


class Velocity(nn.Module):
    """A UNet of two levels. `label` 0 stands for none."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.label = nn.Embedding(5, 2 * width, padding_idx=0)
        self.enter, self.down = nn.Conv2d(1, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Conv2d(2 * width, 1, 3, 1, 1)
        nn.init.zeros_(self.leave.weight)
        self.register_buffer("rates", torch.logspace(0, 2, 4), persistent=False)

    def forward(self, x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * self.rates
        seen = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.label(label)
        high = functional.silu(self.enter(x))
        low = functional.silu(self.down(high)) + seen[:, :, None, None]
        flat = low.flatten(2).mT
        low = (flat + self.middle(flat, flat, flat, need_weights=False)[0]).mT.view_as(low)
        return self.leave(torch.cat([high, self.up(low)], 1))


def flow() -> None:
    module = Velocity()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    wild.watch(module, averaged)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    model = wrapped(module, optimizer, broadcast_buffers=False)
    for step in STEPS:
        optimizer.zero_grad()
        for part in range(2):
            number = 2 * step + part
            image, noise = wild.data(number, 4, 1, 8, 8), wild.data(number + 5000, 4, 1, 8, 8)
            t = wild.data(number + 9000, 4).sigmoid()
            label = wild.tokens(number, 5, 4)
            at = t[:, None, None, None]
            model.require_backward_grad_sync = part == 1
            with torch.autocast("cpu", torch.bfloat16):
                found = model(at * image + (1 - at) * noise, t, label)
            loss = functional.mse_loss(found.float(), image - noise)
            (loss / 2).backward()
        optimizer.step()
        averaged.update_parameters(module)
        wild.step(loss)


class Contrast(nn.Module):
    """MoCo: queries learn, keys follow; keys of all ranks go into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = self._encoder(), self._encoder().requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", functional.normalize(torch.randn(32, 8), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @staticmethod
    def _encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    @torch.no_grad()
    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data = ours.data * 0.9 + theirs.data * 0.1
        # Whose batch norms see whom is drawn anew, so that a rank cannot cheat by its own.
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x)
        order = torch.randperm(len(x) * len(everyone))
        dist.broadcast(order, 0)
        mine = order.view(len(everyone), -1)[dist.get_rank()]
        found = functional.normalize(self.key(torch.cat(everyone)[mine]), dim=1)
        keys = [torch.empty_like(found) for _ in everyone]
        dist.all_gather(keys, found)
        back = torch.cat(keys)[order.argsort()].view(len(everyone), len(x), -1)
        self.fresh = back.flatten(0, 1)
        return back[dist.get_rank()]

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q = functional.normalize(self.query(one), dim=1)
        k = self._keys(other)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1)
        place = int(self.place)
        self.queue[place : place + len(self.fresh)] = self.fresh
        self.place[0] = (place + len(self.fresh)) % len(self.queue)
        return scores / 0.2


def queue() -> None:
    module = Contrast()
    wild.watch(module)
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model = wrapped(module, optimizer)
    for step in STEPS:
        x = wild.data(step, 8, 16)
        scores = model(x + 0.1 * wild.data(step + 5000, 8, 16), x)
        loss = functional.cross_entropy(scores, torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wild.step(loss)


KINDS = {f.__name__: f for f in (scan, mixing, graph, convnext, flow, queue)}

if __name__ == "__main__":
    wild.begin(group=True)
    KINDS[sys.argv[1]]()
    wild.end()
