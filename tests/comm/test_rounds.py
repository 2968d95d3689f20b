"""Local steps: what programs do with them, and what is refused. The algorithm's twin is
`tests/twins/local.py`."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from evener.comm import forms, pace, rounds
from evener.ddp import LocalDataParallel, accelerate, restore
from evener.ddp.integrations import keep
from evener.errors import EvenerError
from tests import worlds

WHOLE = {"LIGHT_TOPK_THRESHOLD": "0"}


class Net(nn.Module):
    """A norm, tied weights, and a part that can be frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.tied = nn.Linear(24, 24, bias=False)
        self.last = nn.Linear(24, 24)
        self.last.weight = self.tied.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.tied(self.norm(self.first(x)))))


def local(net: nn.Module, optimizer: Any, every: int = 4, **how: Any) -> Any:
    return accelerate(DistributedDataParallel(net), optimizer, every=every, **how)


def train(model: Any, optimizer: Any, rank: int, first: int, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(6, 16, generator=generator).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> torch.Tensor:
    tensors = [*net.parameters(), *net.buffers()]
    return torch.cat([t.detach().double().flatten() for t in tensors])


def equal(tensor: torch.Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return all(torch.equal(every[0], other) for other in every)


# --- every form, several nodes, buffers, 16-bit weights ---


def _equal_after(rank: int, _: int, mode: str, dtype: torch.dtype = torch.float32) -> list[bool]:
    net = Net(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every=3, mode=mode)
    found = []
    for step in range(7):
        train(model, optimizer, rank, step, 1)
        found.append(equal(weights(net)))
    model.evener.close()
    return found


def test_ranks_are_equal_after_each_exchange_and_only_then() -> None:
    cases = {form: (_equal_after, form) for form in forms.names()}
    cases["bf16 weights"] = (_equal_after, "exact", torch.bfloat16)
    found = worlds.several([1, 1], cases, env=WHOLE)
    for name in cases:
        for rank in found[name]:
            assert rank == [False, False, True, False, False, True, False], name


def test_two_levels_and_three_nodes() -> None:
    for shape in ([2, 2], [1, 1, 1]):
        cases = {form: (_equal_after, form) for form in ("exact", "int4", "topk-chunk")}
        found = worlds.several(shape, cases, env=WHOLE)
        for name in cases:
            assert all(rank[2] and rank[5] and not rank[4] for rank in found[name]), (shape, name)


def _auto(rank: int, _: int) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every="auto")
    began = model.evener.every
    train(model, optimizer, rank, 0, 3 * began)
    chosen = model.evener.every, model.evener.overlap
    state = model.evener.state_dict()
    train(model, optimizer, rank, 0, 2 * chosen[0])
    together = equal(torch.tensor([model.evener._digest()]))
    model.evener.close()
    other = Net()
    resumed = local(other, torch.optim.AdamW(other.parameters(), lr=1e-2), every="auto")
    resumed.evener.load_state_dict(state)
    again = resumed.evener.every, resumed.evener.overlap
    return {"chosen": chosen, "again": again, "together": together}


def test_auto_chooses_the_same_on_all_ranks() -> None:
    first, second = worlds.run([1, 1], _auto_slow)
    said, none = first.pop("said"), second.pop("said")
    assert first == second and first["together"]
    assert first["again"] == first["chosen"] == (52, 13)  # of a step of 20 ms, 200 ms
    assert len(said) == 1 and not none
    assert "average every 52 steps, behind the next 13, " in said[0]


def _auto_slow(rank: int, size: int) -> dict[str, Any]:
    """As if rank 1 had slow steps and rank 0 slow exchanges."""
    choose = rounds.Rounds._choose

    def slowly(self: Any) -> None:
        self._stepping = 0.010 * (1 + rank) * self._timed * self.every
        self._crossing = 0.100 * (2 - rank) * self._timed
        choose(self)

    said: list[str] = []
    heard = mock.patch.object(rounds.logger, "info", lambda text, *of: said.append(text % of))
    with mock.patch.object(rounds.Rounds, "_choose", slowly), heard:
        found = _auto(rank, size)
    return {**found, "said": [line for line in said if line.startswith("every=auto")]}


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e6))
def test_a_pace_is_no_longer_than_it_must_be(step: float, exchange: float) -> None:
    found = pace.choose(step, exchange)
    assert pace.LEAST <= found.every <= pace.MOST and 0 <= found.overlap <= found.every // 4
    share = found.share(step, exchange)
    assert share <= pace.SHARE or found.every == pace.MOST
    if found.overlap:  # a round of the least steps would stand still
        assert exchange / (exchange + pace.LEAST * step) > pace.SHARE
    if found.every > pace.LEAST and found.every < pace.MOST:
        assert 4 * (1.25 * exchange / step + 1) >= found.every


def _overlapped(rank: int, _: int, mode: str) -> list[bool]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every=3, overlap=2, mode=mode)
    found = []
    for step in range(10):
        train(model, optimizer, rank, step, 1)
        found.append(equal(torch.tensor([model.evener._digest()])))
        found.append(not equal(weights(net)))
    model.evener.end_round()
    return [*found, equal(weights(net)), model.evener.rounds == 4]


def test_with_overlap_ranks_share_the_same_weights_and_end_equal() -> None:
    for shape in ([1, 1], [2, 2]):
        cases = {form: (_overlapped, form) for form in ("exact", "int4")}
        found = worlds.several(shape, cases, env=WHOLE)
        for name in cases:
            assert all(map(all, found[name])), (shape, name)


def _ends_in_flight(rank: int, _: int) -> str:
    """The program ends, and destroys its groups, with an exchange on its way."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every=3, overlap=2)
    train(model, optimizer, rank, 0, 3)
    state = model.evener.state_dict()["flight"]["mean"]
    train(model, optimizer, rank, 3, 3)
    dist.destroy_process_group()
    return " ".join(sorted(state))


def test_a_program_may_end_with_an_exchange_on_its_way() -> None:
    found = worlds.run([1, 1], _ends_in_flight)
    assert found[0] == found[1] == " ".join(sorted(n for n, _ in Net().named_parameters()))


def _dies(rank: int, _: int) -> str:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every=3, overlap=2)
    train(model, optimizer, rank, 0, 5)
    if rank:
        os._exit(0)
    try:
        train(model, optimizer, rank, 5, 6)
    except EvenerError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_while_an_exchange_is_on_its_way_is_an_error() -> None:
    survivor, _ = worlds.outcomes([1, 1], _dies)
    assert survivor.value.startswith("rank 0 came to exchange 2 after 6 steps"), survivor


# --- what programs do ---


def _resume(rank: int, _: int, mode: str) -> bool:
    """Save on every rank in the middle of a round; two programs go on, one by the checkpoint."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, mode=mode)
    train(model, optimizer, rank, 0, 6)
    saved = pickle.loads(
        pickle.dumps(
            {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "evener": model.evener.state_dict(),
            }
        )
    )
    train(model, optimizer, rank, 6, 7)
    went_on = weights(net)
    model.evener.close()
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed = local(other, fresh, mode=mode)
    resumed.evener.load_state_dict(saved["evener"])
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, rank, 6, 7)
    resumed.evener.close()
    return torch.equal(went_on, weights(other))


def test_a_resume_is_exact_where_each_rank_saves() -> None:
    cases = {form: (_resume, form) for form in ("exact", "bf16", "int8", "int4", "topk-chunk")}
    found = worlds.several([1, 1], cases, env=WHOLE)
    for name in cases:
        assert all(found[name]), name


def _loads(rank: int, _: int) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = local(net, optimizer)
    train(model, optimizer, rank, 0, 2)
    # All load what rank 0 has: on rank 0 nothing changes.
    box: list[Any] = [net.state_dict()]
    dist.broadcast_object_list(box, src=0)
    net.load_state_dict(box[0])
    train(model, optimizer, rank, 2, 2)
    found: dict[str, Any] = {"together": model.evener.rounds == 1 and equal(weights(net))}
    copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    found["copies"] = all(type(one) is Net for one in copies)
    found["a copy is plain"] = type(copy.deepcopy(model)) is DistributedDataParallel
    if rank:
        net.first.load_state_dict({n: v + 1 for n, v in net.first.state_dict().items()})
    try:
        train(model, optimizer, rank, 4, 4)
    except EvenerError as error:
        found["error"] = error.problem
    return found


def test_weights_that_are_loaded_are_no_step() -> None:
    for found in worlds.run([1, 1], _loads):
        assert found["together"] and found["copies"] and found["a copy is plain"]
        assert found["error"] == "exchange 2: rank 1 has loaded other weights than rank 0"


def _frozen(rank: int, _: int) -> list[bool]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer, every=2)
    train(model, optimizer, rank, 0, 4)
    net.first.requires_grad_(False)
    stands = net.first.weight.clone()
    found = []
    for step in range(4, 8):
        train(model, optimizer, rank, step, 1)
        found.append(torch.equal(stands, net.first.weight))
    net.first.requires_grad_(True)
    train(model, optimizer, rank, 8, 2)
    found.append(not torch.equal(stands, net.first.weight) and equal(weights(net)))
    return found


def test_what_is_frozen_stands_still() -> None:
    assert all(map(all, worlds.run([1, 1], _frozen)))


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that is enabled without a GPU."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0)


def _skips(rank: int, _: int) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, scaler = local(net, optimizer, every=2), _Scaler()
    equals = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 16)).square().mean()
        if rank and step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        equals.append(equal(weights(net)))
    steps = optimizer.state[net.first.weight]["step"].item()
    found = {"equals": equals, "adam": steps, "counted": model.evener.steps}
    model.evener_steps.close()
    found["torch's own"] = torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"
    return found


def test_a_step_that_a_scaler_leaves_out_counts() -> None:
    for rank, found in enumerate(worlds.run([1, 1], _skips)):
        assert found["equals"] == [False, True, False, True]
        assert found["counted"] == 4 and found["adam"] == 4 - rank
        assert found["torch's own"]


def _two_optimizers(rank: int, _: int) -> dict[str, Any]:
    net = Net()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() < 2]
    both = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    model = local(net, both, every=2)
    equals = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(6, 16)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        equals.append(equal(weights(net)))
    both[0].step()
    try:
        both[0].step()
        error = ""
    except EvenerError as found:
        error = found.problem
    return {"equals": equals, "error": error}


def test_several_optimizers_are_one_step() -> None:
    for found in worlds.run([1, 1], _two_optimizers):
        assert found["equals"] == [False, True, False, True]
        assert found["error"].startswith("Muon took a second step before AdamW took its own")


def _sparse(rank: int, _: int) -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True, mode="sum"))
    optimizer = torch.optim.SparseAdam(list(net.parameters()), lr=0.1)
    model = local(net, optimizer, every=2)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randint(50, (4, 3))).square().mean().backward()
        optimizer.step()
    return equal(net[0].weight.detach()) and bool(net[0].weight.grad.is_sparse)


def _plain_again(rank: int, _: int) -> bool:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer)
    train(model, optimizer, rank, 0, 3)
    apart = not equal(weights(net))
    plain = restore(model)
    together = type(plain) is DistributedDataParallel and equal(weights(net))
    train(plain, optimizer, rank, 3, 1)
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    return apart and together and equal(grads)


def _kept(rank: int, _: int) -> bool:
    """A framework's checkpoint: rank 0's, loaded before the model is accelerated."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = local(net, optimizer)
    train(model, optimizer, rank, 0, 6)
    box: list[Any] = [keep.collect(net), net.state_dict()]
    dist.broadcast_object_list(box, src=0)
    model.evener.close()
    del model
    other = Net()
    other.load_state_dict(box[1])
    keep.install(other, box[0])
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed = local(other, fresh)
    went_on = resumed.evener.steps == 6 and resumed.evener.since == 2
    train(resumed, fresh, rank, 6, 3)
    apart = not equal(weights(other))
    keep.remember(other)  # the training ends, and with it the round
    return went_on and apart and resumed.evener.rounds == 3 and equal(weights(other))


def test_other_things_that_programs_do() -> None:
    cases: dict[str, Any] = {"sparse": (_sparse,), "plain again": (_plain_again,), "kept": (_kept,)}
    found = worlds.several([1, 1], cases)
    for name in cases:
        assert all(found[name]), name


# --- what is refused ---


def _refused(rank: int, _: int, what: str) -> str:
    net = Net()
    params = list(net.parameters())
    optimizer: Any = torch.optim.SGD(params, lr=0.1)
    how: dict[str, Any] = {"every": 4}
    if what == "every":
        how["every"] = 4 + rank
    elif what == "outer":
        how["outer_lr"] = 0.5 + 0.1 * rank
    elif what == "form":
        how["mode"] = ("int8", "int4")[rank]
    elif what == "lbfgs":
        optimizer = torch.optim.LBFGS(params)
    elif what == "zero":
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    elif what == "some":
        optimizer = torch.optim.SGD(params[2:], lr=0.1)
    elif what == "none":
        optimizer = None
    elif what == "momentum":
        how["momentum"] = 0.9
    elif what == "overlap":
        how["overlap"] = 4
    elif what == "nan behind steps":
        how["overlap"] = 2
    elif what == "overlap by hand":
        how = {"every": "auto", "overlap": 4}
    elif what == "auto on one":
        how = {"every": "auto" if rank else 16}
    elif what == "parts":
        how["partition_bytes"] = 1 << 20
    elif what == "overlap alone":
        how = {"overlap": 4}
    elif what == "rate":
        how["outer_lr"] = 0.0
    elif what == "alone":
        how = {"outer_lr": 0.5}
    elif what == "two":
        how, optimizer = {}, [optimizer, optimizer]
    elif what == "negative":
        how["every"] = -1
    elif what == "off on one":
        how = {"every": 4 * rank}
    try:
        model = accelerate(DistributedDataParallel(net), optimizer, **how)
        if what == "join":
            with model.join():
                model(torch.randn(6, 16))
        if what.startswith("nan"):
            with torch.no_grad():
                params[0][0, 0] += float("nan") if rank else 0.0
            train(model, optimizer, rank, 0, 8)
    except EvenerError as error:
        return error.problem
    return ""


REFUSED = {
    "every": "the ranks do not agree: rank 0 has option every = 4, rank 1 has",
    "outer": "the ranks do not agree: rank 0 has option outer_lr = 0.5, rank 1",
    "form": "the ranks do not agree: rank 0 has option wire = int8, rank 1 has",
    "off on one": "the ranks do not agree: rank 0 has option every = 0, rank 1 has",
    "lbfgs": "every=4: LBFGS keeps weights",
    "zero": "every=4: ZeroRedundancyOptimizer updates a part",
    "some": "every=4: first.weight and 1 more are trained, and SGD does not step them",
    "none": "every=4: no optimizer was given",
    "momentum": "momentum=, warmup_steps= and partition_bytes= are of gradients",
    "parts": "momentum=, warmup_steps= and partition_bytes= are of gradients",
    "rate": "outer_lr=0.0 cannot be",
    "overlap": "overlap=4 cannot be",
    "overlap by hand": "overlap=4: every='auto' chooses it",
    "auto on one": "the ranks do not agree: rank 0 has option auto = False, rank 1",
    "overlap alone": "overlap=4 is of local steps",
    "alone": "outer_lr=0.5 is of local steps",
    "two": "accelerate() was given 2 optimizers",
    "negative": "every=-1",
    "join": "join() and every= do not go together",
    "nan": "exchange 1: rank 1 has weights that are not finite",
    "nan behind steps": "exchange 1: rank 1 has weights that are not finite",
}


def test_what_cannot_be_is_refused_on_all_ranks() -> None:
    found = worlds.several([1, 1], {what: (_refused, what) for what in REFUSED})
    for what, begins in REFUSED.items():
        for said in found[what]:
            assert said.startswith(begins), (what, said)


def _uneven(rank: int, _: int) -> str:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = local(net, optimizer)
    try:
        train(model, optimizer, rank, 0, 8 - rank)
    except EvenerError as error:
        return str(error)
    return ""


def test_a_rank_that_ends_early_is_no_hang() -> None:
    longer, shorter = worlds.run([1, 1], _uneven)
    assert not shorter
    assert longer.startswith("rank 0 came to exchange 2 after 8 steps")
    assert "give every rank as many steps" in longer


def _by_variable(rank: int, _: int) -> tuple[bool, int]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = accelerate(DistributedDataParallel(net), optimizer, every=7)
    return isinstance(model, LocalDataParallel), model.evener.every


def test_the_variable_wins() -> None:
    assert worlds.run([1], _by_variable, env={"EVENER_EVERY": "5"}) == [(True, 5)]


@pytest.mark.parametrize("steps", [5])
def test_one_rank_is_a_lookahead(steps: int) -> None:
    assert worlds.run([1], _one_rank, steps) == [True]


def _one_rank(rank: int, _: int, steps: int) -> bool:
    net, plain = Net(), Net()
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    model = local(net, mine, every=5, outer_lr=1.0, outer_momentum=0.0)
    train(model, mine, rank, 0, steps)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, theirs, rank, 0, steps)
    return torch.allclose(weights(net), weights(plain), rtol=0, atol=1e-6)


def outer_step(rank: int, size: int) -> list[tuple[float, float]]:
    """Learning rate and momentum of an average's step, by optimizer and form."""
    found = []
    for name, how in (("SGD", {}), ("Muon", {}), ("Muon", {"outer_lr": 0.5}), ("Muon", WHOLE)):
        net = nn.Linear(8, 8, bias=False)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
        given: dict[str, Any] = {"mode": "topk"} if how is WHOLE else how
        model = local(net, [optimizer], **given)
        found.append((model.evener.options.outer_lr, model.evener.options.outer_momentum))
        model.evener.close()
    return found


def test_the_step_of_an_average_suits_the_optimizer_and_the_form() -> None:
    with mock.patch.dict(os.environ, WHOLE):
        (found, _) = worlds.run((1, 1), outer_step)
    assert found == [(0.7, 0.9), (0.9, 0.6), (0.5, 0.6), (1.0, 0.0)]
