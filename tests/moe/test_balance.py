"""Loads become even: of experts by the bias, of ranks by moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from evener import moe
from evener.errors import UsageError
from evener.moe.balance import placement
from tests import worlds


@given(some.lists(some.integers(0, 50), min_size=8, max_size=8), some.permutations(range(8)))
def test_placement_keeps_all_experts_and_who_stays_keeps_its_place(
    load: list[int], held: list[int]
) -> None:
    new = placement([float(x) for x in load], held, 4)
    assert sorted(new) == list(range(8))
    for at, expert in enumerate(held):
        if new.index(expert) // 2 == at // 2:
            assert new.index(expert) == at


def test_placement_is_even_where_it_can_be() -> None:
    assert placement([9, 9, 1, 1], [0, 1, 2, 3], 2) in ([0, 2, 3, 1], [0, 3, 2, 1], [3, 1, 2, 0])


def test_the_bias_evens_the_load() -> None:
    torch.manual_seed(0)
    layer = moe.MoE(16, 8, 8, 2, score="sigmoid")
    with torch.no_grad():
        layer.gate.weight[0] += 0.5
    x = torch.randn(256, 16) + 0.4

    def worst() -> float:
        before = layer.experts.load.clone()
        layer(x)
        load = layer.experts.load - before
        return float(load.max() / load.mean())

    first = worst()
    for _ in range(120):
        moe.balance(layer, rate=0.01)
        last = worst()
    assert first > 2 and last < 1.3, (first, last)
    with pytest.raises(UsageError):
        moe.balance(moe.MoE(8, 8, 4, 2))


def moves(rank: int, size: int) -> tuple[int, float, float]:
    torch.manual_seed(1)
    layer = moe.MoE(16, 24, 8, 2).double()
    with torch.no_grad():
        layer.gate.weight[:2] += 0.5  # both on rank 0
    moe.spread(layer, size)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    x = torch.randn(64, 16, dtype=torch.float64) + 0.5
    layer(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, wanted = layer.state_dict(), layer(x)
    states = moe.optimizer_state(layer, optimizer)
    moved = moe.rebalance(layer, optimizer)
    torch.testing.assert_close(layer(x), wanted)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    again = moe.optimizer_state(layer, optimizer)["states"]
    for name, state in states["states"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(again[name][key]), torch.as_tensor(value))
    # Even now: nothing to gain.
    layer(x)
    return moved, moe.rebalance(layer, optimizer), float(wanted.sum())


def test_experts_move_with_their_states_and_outputs_stay() -> None:
    for moved, again, _ in worlds.run([2], moves):
        assert moved >= 2 and again == 0


def refuses(rank: int, size: int) -> list[str]:
    torch.manual_seed(1)
    layer = moe.MoE(16, 24, 8, 2)
    with torch.no_grad():
        layer.gate.weight[:2] += 0.5
    moe.spread(layer, size)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    x = torch.randn(64, 16) + 0.5

    def said() -> str:
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        with pytest.raises(UsageError) as error:
            moe.rebalance(layer, optimizer)
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        return error.value.problem

    layer(x).square().mean().backward()
    if rank == 0:  # one rank's gradient is enough
        layer.zero_grad()
    found = [said()]
    optimizer.step()
    optimizer.zero_grad()
    found.append(said())
    layer(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.state[layer.experts.gate_up_proj]
    state["codes"] = torch.zeros(77)
    found.append(said())
    # A factored state has a row for each expert, and moves.
    del state["codes"]
    parallel = layer.experts.parallel
    assert parallel is not None
    held = parallel.held.tolist()
    each = len(held) // size
    state["row"] = torch.tensor([[[float(e)]] for e in held[rank * each :][:each]])
    assert moe.rebalance(layer, optimizer)
    held = parallel.held.tolist()
    assert state["row"].flatten().tolist() == [float(e) for e in held[rank * each :][:each]]
    return found


def test_what_would_stay_behind_is_refused_on_all_ranks() -> None:
    for gradient, states, shape in worlds.run([2], refuses):
        assert "on rank 1" in gradient and "has a gradient" in gradient
        assert "rank 1 has other optimizer states than rank 0" in states
        assert "on rank 0 AdamW's codes" in shape and "[77]" in shape
