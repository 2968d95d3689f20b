"""What programs do with a DistributedDataParallel: the same bits as without Evener, on all ranks,
with the optimizer given to accelerate() and without."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import hashlib
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evener.ddp import AcceleratedDataParallel, accelerate, restore
from tests import worlds
from tests.comm import models
from tests.lacks import lacking

# (model, optimizer) to the model to train with.
Wrap = Callable[..., Any]
Result = dict[str, torch.Tensor]


def data(step: int, rank: int, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, width, generator=generator)


class Layers(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """`b` is used where it is said."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layers(), Layers()

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        y = self.a(x)
        return self.b(y) if use_b else y


def plain(model: Any, optimizer: Any = None) -> Any:
    return model


def given_the_model(model: Any, optimizer: Any = None) -> Any:
    return accelerate(model, bucket_bytes=2048)


def given_both(model: Any, optimizer: Any = None) -> Any:
    return accelerate(model, optimizer, bucket_bytes=2048)


def train(model: Any, optimizer: Any, rank: int, steps: int = 6) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(data(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(module: nn.Module, **more: Any) -> Result:
    found = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return found | {name: torch.as_tensor(value) for name, value in more.items()}


# --- the programs ---


def unused_under_no_sync(wrap: Wrap, rank: int) -> Result:
    """A branch is used by one rank only, in a micro-batch that is not synchronised."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            model(data(step, rank), rank == 0).square().mean().backward()
        model(data(100 + step, rank), False).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def own_hooks(wrap: Wrap, rank: int) -> Result:
    """The program hooks its parameters after the wrap, and changes gradients there."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)

    def clamp(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]

    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return weights(model.module, losses=train(model, optimizer, rank))


def wrapped_again(wrap: Wrap, rank: int) -> Result:
    """Three trainings of one module, each with a wrapper and an optimizer of its own."""
    module, kept, losses = Layers(), [], []
    for fold in range(3):
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model = wrap(model, optimizer)
        losses += train(model, optimizer, rank)
        if fold == 0:
            kept.append(model)  # as Accelerate does
    return weights(module, losses=losses)


def plain_afterwards(wrap: Wrap, rank: int) -> Result:
    """The wrapper is dropped, and a second one, plain DDP, goes on."""
    module = Layers()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    losses = train(model, optimizer, rank)
    del model
    gc.collect()
    second = DistributedDataParallel(module)
    losses += train(second, torch.optim.SGD(module.parameters(), lr=0.1), rank)
    return weights(module, losses=losses)


def plain_beside(wrap: Wrap, rank: int) -> Result:
    """The wrapper lives on, and a second one, plain DDP, goes on; then the first again."""
    module = Layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first = wrap(DistributedDataParallel(module), optimizer)
    losses = train(first, optimizer, rank)
    second = DistributedDataParallel(module)
    losses += train(second, optimizer, rank) + train(first, optimizer, rank)
    return weights(module, losses=losses)


def older_used_again(wrap: Wrap, rank: int) -> Result:
    """Two wrappers of one module, used in turns."""
    module = Layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first = wrap(DistributedDataParallel(module), optimizer)
    losses = train(first, optimizer, rank)
    second = wrap(DistributedDataParallel(module), optimizer)
    losses += train(second, optimizer, rank) + train(first, optimizer, rank)
    return weights(module, losses=losses)


class Checkpointed(nn.Module):
    """Segments whose activations are computed again, in backwards of their own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.segments = nn.ModuleList(Layers() for _ in range(3))
        if shared:
            self.segments.append(self.segments[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=True)
        return x


def reentrant(wrap: Wrap, rank: int) -> Result:
    model = DistributedDataParallel(Checkpointed(shared=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    found = weights(model.module, losses=train(model, optimizer, rank))
    if isinstance(model, AcceleratedDataParallel):
        model.evener_steps.finish("")
        assert model.evener.steps == 6, model.evener.steps
    return found


def reentrant_shared(wrap: Wrap, rank: int) -> Result:
    model = DistributedDataParallel(Checkpointed(shared=True), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    return weights(model.module, losses=train(model, optimizer, rank))


def closures(wrap: Wrap, rank: int) -> Result:
    """Lightning's way: all of a step is in the closure."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    losses, deferred = [], 0
    for step in range(8):

        def closure(step: int = step) -> torch.Tensor:
            loss = model(data(step, rank)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
        overlap = model.evener_steps.overlap if hasattr(model, "evener_steps") else None
        deferred += overlap is not None and overlap.state.name == "DEFERRED"
    if wrap is given_both:
        assert deferred >= 4, deferred
    return weights(model.module, losses=losses)


class Own(DistributedDataParallel):
    """A subclass with methods, and attributes of the module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*inputs, **kwargs)

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def subclass(wrap: Wrap, rank: int) -> Result:
    model = Own(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model.train_step(data(step, rank)).backward()
        optimizer.step()
    assert isinstance(model, Own)
    assert model.calls == 6
    assert len(model.layers) == 3
    return weights(model.module)


def copies(wrap: Wrap, rank: int) -> Result:
    """Averages and copies of the wrapped model; a copy trains on as DDP."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(6):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    made, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(made) is type(loaded) is DistributedDataParallel
    losses = train(made, torch.optim.SGD(made.parameters(), lr=0.1), rank)
    found = weights(model.module, losses=losses)
    for name, other in {"average": average.module, "copy": made, "loaded": loaded}.items():
        found |= {f"{name}.{key}": value for key, value in weights(other).items()}
    return found


def compiled(wrap: Wrap, rank: int) -> Result:
    model = torch.compile(DistributedDataParallel(Layers()), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    return weights(model, losses=train(model, optimizer, rank))


@contextlib.contextmanager
def toggled(model: Any) -> Iterator[None]:
    """What Lightning's manual optimization does around a forward."""
    yield
    model.require_backward_grad_sync = True


def frameworks(wrap: Wrap, rank: int) -> Result:
    """Those that decide themselves which backward is synchronised."""
    model = DistributedDataParallel(Layers(), find_unused_parameters=True)
    assert model._get_ddp_logging_data()["world_size"] == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    assert model._get_ddp_logging_data()["world_size"] == 2
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(data(step, rank)).square().mean()
        # Lightning: overrides/distributed.py; Accelerate: trigger_sync_in_backward
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([loss])
        loss.backward()
        optimizer.step()
    return weights(model.module)


def static_later(wrap: Wrap, rank: int) -> Result:
    model = DistributedDataParallel(Branches())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model = wrap(model, optimizer)
    model._set_static_graph()
    for step in range(6):
        optimizer.zero_grad()
        model(data(step, rank), False).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def uneven(wrap: Wrap, rank: int) -> Result:
    """Ranks with more inputs than others; what they do afterwards is together again."""
    model = DistributedDataParallel(nn.Sequential(Layers(), nn.BatchNorm1d(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for epoch in range(3):
        with model.join():
            for step in range(3 + 4 * (rank if epoch < 2 else 1 - rank)):
                optimizer.zero_grad()
                if step == 4:
                    with model.no_sync():
                        model(data(50 + step, rank)).square().mean().backward()
                model(data(10 * epoch + step, rank)).abs().mean().backward()
                optimizer.step()
    return weights(model.module)


def uneven_average(wrap: Wrap, rank: int) -> Result:
    """The average over those that have inputs: here over one of two. `b` keeps the gradient of the
    first step, in which alone it is used."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.module.a.parameters(), lr=0.1)
    model = wrap(model)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            model(data(step, rank), step == 0).square().mean().backward()
            optimizer.step()
    kept = [parameter.grad for parameter in model.module.b.parameters()]
    ends = [torch.zeros(sum(g.numel() for g in kept)) for _ in range(2)]
    dist.all_gather(ends, torch.cat([g.flatten() for g in kept]))
    return weights(model.module, ends=torch.stack(ends))


def uneven_update(wrap: Wrap, rank: int) -> Result:
    """A rank without inputs goes on updating its share of the weights, by its own last gradients:
    DDP does not touch them. What it used last counts as used for the others."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    model = wrap(model, optimizer)
    held, before = torch.zeros(()), torch.zeros(())
    for epoch in range(2):
        with Join([model, optimizer]):
            for step in range(3 + 4 * (rank if epoch else 1 - rank)):
                optimizer.zero_grad()
                model(data(10 * epoch + step, rank), step in (0, 2, 5)).square().mean().backward()
                optimizer.step()
                if epoch == 0 and step == 2 and rank == 1:  # its last one
                    held = next(model.parameters()).grad
                    before = held.clone()
    ends = [torch.zeros(4, 16, 16) for _ in range(2)]
    last = [layer.weight.grad for layer in model.module.a.layers]
    dist.all_gather(ends, torch.stack([*last, held - before + torch.zeros(16, 16)]))
    return weights(model.module, ends=torch.stack(ends))


def early_end(wrap: Wrap, rank: int) -> Result:
    """All stop where one has no more inputs."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    stops = pytest.raises(RuntimeError, match="exhausted")
    with stops, model.join(throw_on_early_termination=True):
        train(model, optimizer, rank, 5 + rank)
    return weights(model.module)


def made_plain_again(wrap: Wrap, rank: int) -> Result:
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    losses = train(model, optimizer, rank)
    if isinstance(model, AcceleratedDataParallel):
        restore(model)
    assert type(model) is DistributedDataParallel
    return weights(model.module, losses=losses + train(model, optimizer, rank))


def unfrozen_later(wrap: Wrap, rank: int) -> Result:
    """Frozen between the wrap and the line, and unfrozen in the fourth step: DDP took it."""
    model = DistributedDataParallel(Layers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.layers[0].requires_grad_(False)
    model = wrap(model, optimizer)
    losses = train(model, optimizer, rank, 3)
    model.module.layers[0].requires_grad_(True)
    return weights(model.module, losses=losses + train(model, optimizer, rank))


def frozen_at_the_wrap(wrap: Wrap, rank: int) -> Result:
    """DDP did not take it: what unfreezes it steps it on each rank alone."""
    module = Layers()
    module.layers[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.layers[0].requires_grad_(True)
    model = wrap(model, optimizer)
    losses = train(model, optimizer, rank)
    if isinstance(model, AcceleratedDataParallel):
        restore(model)
    losses += train(model, optimizer, rank)
    return {k: v for k, v in weights(module, losses=losses).items() if "layers.0" not in k}


def halves_in_turns(wrap: Wrap, rank: int) -> Result:
    """One DDP, of which one half after the other is frozen."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for step in range(8):
        model.module.a.requires_grad_(step % 2 == 0)
        model.module.b.requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        model(data(step, rank), True).square().mean().backward()
        optimizer.step()
    if isinstance(model, AcceleratedDataParallel):
        restore(model)
    return weights(model.module, losses=train_branches(model, optimizer, rank))


def train_branches(model: Any, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(data(step, rank), True).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adversaries(wrap: Wrap, rank: int) -> Result:
    """StyleGAN2's order: the other network is frozen, whole, in each half of a step."""
    nets, optimizers = [], []
    for _ in range(2):
        net = DistributedDataParallel(Layers())
        optimizers.append(torch.optim.Adam(net.parameters(), lr=1e-2))
        nets.append(wrap(net, optimizers[-1]))
    for step in range(8):
        for turn in (0, 1):
            nets[turn].requires_grad_(True)
            nets[1 - turn].requires_grad_(False)
            optimizers[turn].zero_grad()
            nets[1](nets[0](data(10 * step + turn, rank))).square().mean().backward()
            optimizers[turn].step()
    return {f"{i}.{k}": v for i in (0, 1) for k, v in weights(nets[i].module).items()}


def around_the_model(wrap: Wrap, rank: int) -> Result:
    """Rank 0 alone wants a gradient of one input, and adds a penalty to its own `p.grad`."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    losses = []
    for step in range(8):
        losses += train(model, optimizer, rank, 1)
        if rank == 0 and step % 2:
            optimizer.zero_grad()
            model.module(data(50 + step, 0)[:1]).sum().backward()
        if step % 3:
            optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()  # with what is there
        if step == 6:  # on all ranks, and no average
            model.module(data(70, 0)).sum().backward()
        optimizer.step()
    return weights(model.module, losses=losses)


def a_forward_raises(wrap: Wrap, rank: int) -> Result:
    """On both ranks, and what follows is a backward of the module's own."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for step in range(6):
        with pytest.raises(RuntimeError):
            model(data(step, rank, width=5))
        optimizer.zero_grad()
        model.module(data(step, 0)).square().mean().backward()
        optimizer.step()
        train(model, optimizer, rank, 1)
    return weights(model.module)


def edits_state(wrap: Wrap, rank: int) -> Result:
    """Moments that are restarted, scaled by references that were kept, and replaced."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    for step in range(14):
        train(model, optimizer, rank, 1)
        if step == 6:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        elif step == 7:
            kept = [state["exp_avg_sq"] for state in optimizer.state.values()]
        elif 8 <= step < 10:
            torch._foreach_mul_(kept, 0.5)
        elif step == 11:
            optimizer.state = collections.defaultdict(dict)
        elif step == 12:
            found = copy.deepcopy(optimizer).state_dict()["state"][0]["exp_avg"]
    return weights(model.module, found=found, moment=optimizer.state_dict()["state"][0]["exp_avg"])


def keeps_gradients(wrap: Wrap, rank: int) -> Result:
    """Gradients that are kept: added to in place, dropped and looked at later, as flat views."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    seen, kept, flat = [], [], []
    for step in range(16):
        if 6 <= step < 9:
            torch._foreach_zero_(kept)
        else:
            optimizer.zero_grad()
        if step == 12:
            with model.no_sync():
                model(data(40, rank)).square().mean().backward()
            kept = [p.grad for p in model.parameters()]
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
        if step in (5, 9):
            kept = [p.grad for p in model.parameters()]
        elif step == 10:
            flat = [p.grad.view(-1) for p in model.parameters()]
        seen += [gradient.double().sum() for gradient in (*kept, *flat)]
    return weights(model.module, seen=torch.stack(seen))


def keeps_weights(wrap: Wrap, rank: int) -> Result:
    """What lies in the memory of parameters is looked at right after a step."""
    model = DistributedDataParallel(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    kept = [p.data for p in model.parameters()]
    array = next(model.parameters()).detach().numpy()
    seen = []
    for step in range(8):
        train(model, optimizer, rank, 1)
        seen += [weight.double().sum() for weight in kept]
        seen.append(torch.tensor(float(array.sum()), dtype=torch.float64))
        if step == 5:
            kept = []
    return weights(model.module, seen=torch.stack(seen))


class Functional(nn.Module):
    """Weights as arguments of torch.func, beside ordinary use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        own = dict(self.second.named_parameters())
        y = torch.func.vjp(lambda w: torch.func.functional_call(self.second, w, (y,)), own)[0]
        return y + torch.func.vmap(lambda row: self.second(row))(x)


def functional(wrap: Wrap, rank: int) -> Result:
    model = DistributedDataParallel(Functional())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    seen = []
    for _ in range(8):
        train(model, optimizer, rank, 1)
        own = dict(model.module.first.named_parameters())
        (_, pull) = torch.func.vjp(
            lambda w: torch.func.functional_call(model.module.first, w, (data(0, 0),)), own
        )
        seen.append(pull(torch.ones(8, 16))[0]["weight"].detach().sum())
    return weights(model.module, seen=torch.stack(seen))


def compiled_forward(wrap: Wrap, rank: int) -> Result:
    """The method was compiled, and the batch changes its size."""
    module = Layers()
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = wrap(model, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        model(data(step, rank)[: 8 if step % 4 else 5]).square().mean().backward()
        optimizer.step()
    return weights(module)


PROGRAMS = (
    edits_state,
    keeps_gradients,
    keeps_weights,
    functional,
    compiled_forward,
    unfrozen_later,
    frozen_at_the_wrap,
    halves_in_turns,
    adversaries,
    around_the_model,
    a_forward_raises,
    unused_under_no_sync,
    own_hooks,
    wrapped_again,
    plain_afterwards,
    plain_beside,
    older_used_again,
    reentrant,
    reentrant_shared,
    closures,
    subclass,
    copies,
    compiled,
    frameworks,
    static_later,
    uneven,
    uneven_average,
    uneven_update,
    early_end,
    made_plain_again,
)


def compare(rank: int, size: int, programs: tuple[Any, ...]) -> dict[str, str]:
    """By program and way what differs from plain DDP, or between the ranks."""
    wrong = {}
    for program in programs:
        results = {}
        for wrap in (plain, given_the_model, given_both):
            torch.manual_seed(0)
            try:
                results[wrap.__name__] = found = program(wrap, rank)
            except Exception as error:  # noqa: BLE001 - on both ranks alike, or the next one hangs
                if lacking(traceback.format_exc()):
                    continue
                wrong[f"{program.__name__}, {wrap.__name__}"] = repr(error)
                traceback.print_exc()
                continue
            mine = {k: v for k, v in found.items() if k != "losses"}
            digest = hashlib.sha256(b"".join(models.raw(v) for v in mine.values())).hexdigest()
            digests = [""] * size
            dist.all_gather_object(digests, digest)
            if len(set(digests)) > 1:
                wrong[f"{program.__name__}, {wrap.__name__}"] = "ranks differ"
        want = results.pop("plain", {})
        for way, found in results.items():
            differ = [name for name in want if not torch.equal(want[name], found[name])]
            if differ:
                wrong[f"{program.__name__}, {way}"] = f"{len(differ)} of {len(want)}: {differ[0]}"
    return wrong


@pytest.mark.parametrize("part", range(2))
def test_the_same_bits_as_ddp(part: int) -> None:
    for wrong in worlds.run([1, 1], compare, PROGRAMS[part::2]):
        assert not wrong, wrong
