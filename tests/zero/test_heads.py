"""Recomputed blocks in parts: what they take at the whole length, that heads have the bits of the
whole, and which blocks stay whole. That results are the same: tests/twins/zero_heads.py."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evener import zero
from evener.zero import activations, apart, heads, rehearsal, sequence
from evener.zero.activations import Offload
from evener.zero.device import SimulatedDevice
from evener.zero.host import HostMemory
from evener.zero.meter import Ledger, Meter
from evener.zero.planner import HELD
from evener.zero.profile import Moment, Profile, peaks
from evener.zero.spans import Spans

WIDTH, HEADS, PAIRS = 64, 8, 2
ROWS = 128


class Block(nn.Module):
    def __init__(self, pairs: int = PAIRS) -> None:
        super().__init__()
        self.pairs = pairs
        each = WIDTH // HEADS
        self.norm, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * pairs) * each, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self.dropout = 0.0

    def forward(self, x: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
        y = self.qkv(self.norm(x)).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = y.split([HEADS, self.pairs, self.pairs], 1)
        if turns is not None:
            q, k = q * turns[:, None], k * turns[:, None]
        a = functional.scaled_dot_product_attention(
            q, k, v, None, self.dropout, is_causal=True, enable_gqa=self.pairs != HEADS
        )
        x = x + self.change(self.out(a.transpose(1, 2).reshape(x.shape)))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return out


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sequence, "ROWS", ROWS)
    yield


def _step(block: nn.Module, x: torch.Tensor, gradient: torch.Tensor, *more: Any) -> list[Any]:
    """The result and all gradients of a block that is recomputed."""
    given = x.clone().requires_grad_()
    out = checkpoint(heads.recomputed(block), given, *more, use_reentrant=False)
    out.backward(gradient)
    found = [out.detach(), given.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found


def _both(block: Block, length: int = 3 * ROWS + 5, batch: int = 2) -> tuple[list[Any], list[Any]]:
    at = block.out.weight
    x, gradient = (torch.randn(batch, length, WIDTH).to(at) for _ in range(2))
    turns = (torch.rand(1, length, WIDTH // HEADS) + 0.5).to(at)
    plain = copy.deepcopy(block)
    tiles = sequence.Tiles([block])
    mine = _step(block, x, gradient, turns)
    assert heads.in_parts(block)
    tiles.close()
    assert "forward" not in vars(block)
    return mine, _step(plain, x, gradient, turns)


ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("pairs", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("long", [False, True])
def test_a_block_in_parts_is_the_whole_one(
    device: str, pairs: int, dtype: torch.dtype, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and the input's gradient are of the same kernels, of fewer rows. A weight's gradient
    is a sum over tokens, in another order."""
    monkeypatch.setattr(heads, "LONG", 1 if long else heads.LONG)
    torch.manual_seed(pairs)
    mine, plain = _both(Block(pairs).to(device, dtype))
    close = 1e-6 if dtype == torch.float32 else 2**-8
    for number, (a, b) in enumerate(zip(mine, plain, strict=True)):
        far = float((a - b).abs().max() / b.abs().max())
        assert far <= (close if number < 2 else 4 * close), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_by_groups_have_the_bits_of_all_at_once(dtype: torch.dtype, causal: bool) -> None:
    """Forward and backward. Why parts of heads need no bound of their own."""
    torch.manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, n, 300, 16, dtype=dtype) for n in (HEADS, PAIRS, PAIRS, HEADS)
    )

    def run(mine: slice, pairs: slice) -> list[torch.Tensor]:
        given = [q[:, mine].clone(), k[:, pairs].clone(), v[:, pairs].clone()]
        given = [x.requires_grad_() for x in given]
        out = functional.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)  # type: ignore[misc]
        return [out.detach(), *torch.autograd.grad(out, given, gradient[:, mine])]

    every = run(slice(0, HEADS), slice(0, PAIRS))
    times = HEADS // PAIRS
    groups = [run(slice(n * times, (n + 1) * times), slice(n, n + 1)) for n in range(PAIRS)]
    for number, whole in enumerate(every):
        assert torch.equal(torch.cat([group[number] for group in groups], 1), whole)


def _peaks(length: int, attention: bool) -> tuple[int, int, int]:
    """Bytes that one more step of a block takes at most, forward and backward, and its FLOP."""
    ledger = Ledger()
    meter = Meter(ledger, count_work=True)
    block = Block()
    sequence.Tiles([block], attention=attention)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, sequence.counted(meter.repeated), meter:
        x = torch.empty(1, length, WIDTH, requires_grad=True)
        ledger.mark()
        before = ledger.now
        out = checkpoint(heads.recomputed(block), x, use_reentrant=False, preserve_rng_state=False)
        forward = ledger.mark() - before
        gradient = torch.empty_like(out)
        before = ledger.now
        out.backward(gradient)
        backward = ledger.mark() - before
    assert meter.work is not None
    return forward, backward, sum(flops * count for (flops, _), count in meter.work.items())


def test_the_peak_has_each_tensor_of_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per token, in widths: queries (1), keys and values (1/4 each), attention's result, its
    gradient and the input's (1 each), and what half of the heads takes at a time. Of long
    sequences the input's is not there then."""
    lengths = 16 * ROWS, 64 * ROWS
    tokens = lengths[1] - lengths[0]
    grown = {}
    for attention in (True, False):
        few, many = (_peaks(length, attention) for length in lengths)
        grown[attention] = [
            (b - a) / tokens / WIDTH / 4 for a, b in zip(few[:2], many[:2], strict=True)
        ]
    assert grown[True][0] < 3.6  # result, attention's result, queries, keys, values
    assert 4.5 < grown[True][1] < 4.5 + 4 * 0.5
    assert grown[False][1] > 1.5 * grown[True][1]
    monkeypatch.setattr(heads, "LONG", 1)
    few, many = (_peaks(length, True)[1] for length in lengths)
    assert grown[True][1] - (many - few) / tokens / WIDTH / 4 > 0.9


def test_a_trace_counts_the_work_of_all_tiles() -> None:
    """The layers up to attention run three times more, attention as often as before, and the last
    one, whose result nobody has saved, once more."""
    length = 32 * ROWS
    before = 2 * length * WIDTH * (WIDTH + 2 * PAIRS * WIDTH // HEADS)
    last = 2 * length * 4 * WIDTH * WIDTH
    mine, plain = (_peaks(length, attention)[2] for attention in (True, False))
    assert mine - plain == 3 * before + last


def _looked(block: Block, length: int = 4 * ROWS, **more: Any) -> bool:
    call = apart.Call.of((torch.randn(1, length, WIDTH),), more)
    return call is not None and apart.how_of(block, block.forward, call, [length, ROWS]) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + x.roll(1, 1),
        lambda x: x.cumsum(1),
        lambda x: x * (1.0 / x.shape[1]),
        lambda x: x + torch.arange(x.shape[1])[:, None],
        lambda x: x + x[:, :1],
        lambda x: torch.cat([2 * x[:, :40], x[:, 40:]], 1),
        lambda x: x.transpose(1, 2).reshape(x.shape),
        lambda x: x.softmax(1),
        functional.dropout,
        lambda x: x * float(x.sum() > 0),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
    ],
)
def test_what_mixes_tokens_stays_whole(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block = Block()
    assert _looked(block)
    block.change = change
    assert not _looked(block)


def test_what_is_not_known_to_be_cut_stays_whole() -> None:
    block = Block()
    assert apart.Call.of((torch.randn(1, 300, WIDTH),), {"cache": object()}) is None
    assert apart.Call.of((torch.randn(300, WIDTH),), {}) is None
    needs = torch.randn(1, 300, 8, requires_grad=True)
    assert apart.Call.of((torch.randn(1, 300, WIDTH), needs), {}) is None
    block.dropout = 0.1
    assert not _looked(block)


def test_a_block_that_is_not_recomputed_runs_as_before() -> None:
    block = Block()
    x = torch.randn(1, 4 * ROWS, WIDTH)
    plain = block(x)
    tiles = sequence.Tiles([block])
    assert torch.equal(block(x), plain) and not heads.in_parts(block)
    (mine,) = tiles.blocks
    assert mine.known == {}
    tiles.close()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[1].also = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = x
        return out


@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_the_engine_trains_the_same(checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a block with a weight that it does not use."""
    monkeypatch.setattr(activations, "SMALL", 1)
    tokens = torch.randint(0, 50, (2, 3 * ROWS + 5))
    found: list[list[float]] = []
    for tiled in (False, True):
        torch.manual_seed(0)
        engine, *_ = zero.initialize(
            model=Model(),
            config={
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage3_param_persistence_threshold": 0},
                "evener": {"device": "cpu", "tiles": tiled, "checkpointing": checkpointing},
            },
            machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
            batch=(2, 3 * ROWS + 5),
        )
        losses = []
        for _ in range(4):
            loss = engine(tokens).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0]


def test_the_next_input_comes_when_a_block_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL", 1)
    device = SimulatedDevice()
    offload = Offload(device, Spans(device), HostMemory(16 << 20))
    given = [torch.randn(4, 4) for _ in range(3)]
    saved: Any = [offload._pack(x) for x in given]
    with activations.later() as ready:
        assert torch.equal(offload._unpack(saved[2]), given[2])
        assert saved[1].back is None
        ready()
        assert torch.equal(saved[1].back, given[1])
    assert torch.equal(offload._unpack(saved[1]), given[1])
    assert torch.equal(saved[0].back, given[0])


def test_a_copy_that_is_rehearsed_runs_in_parts_too() -> None:
    block = Block()
    tiles = sequence.Tiles([block])
    made = rehearsal._copied(block, torch.device("cpu"), torch.float32)
    x = torch.randn(1, 4 * ROWS, WIDTH)
    _step(made, x, torch.ones_like(x))
    assert heads.in_parts(made) and not heads.in_parts(block)
    assert all(p.grad is None for p in block.parameters())
    tiles.close()


def test_a_plan_counts_no_input_ahead_of_blocks_in_parts() -> None:
    """It comes when attention's memory is free."""
    blocks, length = 6, 16 * ROWS
    whole = (Moment("enter", 0, 0, 0),)
    size = length * WIDTH * 4
    forward = [
        moment
        for n in range(blocks)
        for moment in (
            Moment("enter", n, n * size, n * size),
            Moment("leave", n, (n + 1) * size, 0),
        )
    ]
    backward = [
        moment
        for n in reversed(range(blocks))
        for moment in (
            Moment("enter", n, (n + 1) * size, (n + 1) * size + 5 * size),
            Moment("leave", n, n * size, n * size),
        )
    ]
    profile = Profile(
        plain=whole,
        recomputed=(*forward, *backward),
        repeated=frozenset(range(blocks)),
        inputs=dict.fromkeys(range(blocks), size),
    )
    every = profile.repeated
    ahead = peaks(profile, [], recompute=every, depth=1, offload=HELD)[1]
    late = dataclasses.replace(profile, late=every)
    none = peaks(late, [], recompute=every, depth=1, offload=HELD)[1]
    assert (ahead, none) == (7 * size, 6 * size)  # its own, five inside, and the one ahead
