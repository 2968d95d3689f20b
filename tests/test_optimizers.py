"""Fused CPU optimizers through Python: against plain torch, bit for bit, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from evener.base import optimizers as _optimizers
from evener.base.optimizers import Run

SIZES = [0, 1, 15, 16, 17, 255, 257, 1000, 70001]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, one for every NaN."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


def plain_adamw(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int, scale: float
) -> None:
    """AdamW with lr 1e-2, decay 0.1, in torch operations that each round once."""
    b1, b2 = 1 - 0.9**step, 1 - 0.999**step
    g = g.float() * scale
    w.mul_(1 - 1e-2 * 0.1)
    m.mul_(0.9).add_(g * (1 - 0.9))
    v.mul_(0.999).add_((g * g) * (1 - 0.999))
    root = torch.tensor(1 / b2**0.5, dtype=torch.float64).float()
    # torch's float32 sqrt on the CPU is MKL's, which is one unit off for some values.
    w.sub_((m / (v.double().sqrt().float() * root + 1e-8)) * (1e-2 / b1))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", ["float32", "split"])
def test_adamw_equals_plain_torch_bit_for_bit(n: int, dtype: torch.dtype, master: str) -> None:
    generator = torch.Generator().manual_seed(n)
    want = torch.randn(n, generator=generator)
    got = want.clone()
    halves = _optimizers.split(got)
    output = torch.empty(n, dtype=torch.bfloat16) if master == "float32" else None
    states = [torch.zeros(n) for _ in range(4)]
    for step in range(1, 4):
        gradient = torch.randn(n, generator=generator).to(dtype)
        plain_adamw(want, gradient, states[0], states[1], step, 0.5)
        _optimizers.adam(
            got if master == "float32" else halves,
            gradient, states[2], states[3], output,
            step=step, lr=1e-2, weight_decay=0.1, scale=0.5,
        )  # fmt: skip
    if master == "split":
        got = _optimizers.join(*halves)
    else:
        assert output is not None and torch.equal(output, got.to(torch.bfloat16))
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(states[2]), bits(states[0]))
    assert torch.equal(bits(states[3]), bits(states[1]))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_to_rounding(decoupled: bool) -> None:
    """torch contracts some products and sums, so it is close and not equal."""
    weights = torch.randn(5000)
    parameter = torch.nn.Parameter(weights.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.1)
    first, second = torch.zeros(5000), torch.zeros(5000)
    for step in range(1, 20):
        gradient = torch.randn(5000)
        parameter.grad = gradient.clone()
        optimizer.step()
        _optimizers.adam(
            weights, gradient, first, second,
            step=step, lr=1e-2, weight_decay=0.1, decoupled=decoupled,
        )  # fmt: skip
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(nesterov: bool, momentum: float) -> None:
    if nesterov and not momentum:
        pytest.skip("torch allows Nesterov with momentum only")
    dampening = 0.0 if nesterov else 0.2
    weights = torch.randn(3001)
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=1e-2, weight_decay=0.1, momentum=momentum, nesterov=nesterov,
        dampening=dampening if momentum else 0.0,
    )  # fmt: skip
    buffer = torch.zeros(3001) if momentum else None
    for step in range(1, 6):
        gradient = torch.randn(3001)
        parameter.grad = gradient.clone()
        optimizer.step()
        _optimizers.sgd(
            weights, gradient, buffer, step=step, lr=1e-2, weight_decay=0.1,
            momentum=momentum, nesterov=nesterov, dampening=dampening,
        )  # fmt: skip
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_instructions_threads_and_parts_give_the_same_bits(n: int) -> None:
    weights, gradient = torch.randn(n), torch.randn(n).bfloat16()

    def run(parts: int, **how: object) -> list[torch.Tensor]:
        upper, lower = _optimizers.split(weights)
        first, second = torch.ones(n).bfloat16(), torch.ones(n).bfloat16()
        step = -(-n // parts) or 1
        for at in range(0, n, step):
            s = slice(at, at + step)
            _optimizers.adam(
                (upper[s], lower[s]), gradient[s], first[s], second[s],
                step=5, lr=1e-3, run=Run(seed=3, stream=1, offset=at, **how),  # type: ignore[arg-type]
            )  # fmt: skip
        return [upper, lower, first, second]

    want = run(1)
    for name in _optimizers.instruction_sets():
        for threads in (1, 3):
            got = run(2, instructions=name, threads=threads)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (name, threads)


def test_stochastic_moments_do_not_stand_still() -> None:
    """A second moment that decays by 0.1% a step never moves when bf16 is rounded to nearest."""
    n = 20000
    weights, zero = torch.zeros(n), torch.zeros(n)
    first, second = torch.zeros(n).bfloat16(), torch.ones(n).bfloat16()
    for step in range(1, 101):
        _optimizers.adam(weights, zero, first, second, step=step, lr=0.0, run=Run(seed=1))
    assert second.float().mean().item() == pytest.approx(0.999**100, rel=2e-3)
    assert (torch.ones(1).bfloat16() * 0.999).item() == 1.0


def test_what_is_not_finite_goes_through_as_in_torch() -> None:
    gradient = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0])
    want, got = torch.ones(5), torch.ones(5)
    states = [torch.zeros(5) for _ in range(4)]
    plain_adamw(want, gradient, states[0], states[1], 1, 1.0)
    _optimizers.adam(got, gradient, states[2], states[3], step=1, lr=1e-2, weight_decay=0.1)
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(states[3]), bits(states[1]))
    assert not torch.tensor(_optimizers.sum_of_squares(gradient)).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", SIZES)
def test_sum_of_squares(n: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(n).to(dtype)
    want = gradient.double().square().sum().item()
    assert _optimizers.sum_of_squares(gradient) == pytest.approx(want, rel=1e-12)
    one, three = (_optimizers.sum_of_squares(gradient, threads=t) for t in (1, 3))
    assert one == three


def test_split_and_join_are_inverse() -> None:
    patterns = torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4028235e38, 1e-45])
    weights = torch.cat([patterns.view(torch.float32), special])
    weights = weights[~weights.isnan()]
    upper, lower = _optimizers.split(weights)
    assert torch.equal(_optimizers.join(upper, lower).view(torch.int32), weights.view(torch.int32))
    halves = _optimizers.split(torch.full((3,), torch.nan))
    assert _optimizers.join(*halves).isnan().all() and halves[0].isnan().all()


def test_what_the_native_side_relies_on_is_checked() -> None:
    w, g, m, v = (torch.zeros(4) for _ in range(4))
    with pytest.raises(ValueError, match=r"gradient must be a contiguous torch\.float32 or"):
        _optimizers.adam(w, g.double(), m, v, step=1, lr=1.0)
    with pytest.raises(ValueError, match="second has 3 elements, expected 4"):
        _optimizers.adam(w, g, m, v[:3], step=1, lr=1.0)
    with pytest.raises(ValueError, match="contiguous=False"):
        _optimizers.adam(w, torch.zeros(8)[::2], m, v, step=1, lr=1.0)
    with pytest.raises(ValueError, match="share memory"):
        _optimizers.adam(w, g, m, m, step=1, lr=1.0)
    with pytest.raises(ValueError, match="step = 0 is not 1 or more"):
        _optimizers.adam(w, g, m, v, step=0, lr=1.0)
    with pytest.raises(ValueError, match="this machine has no mmx"):
        _optimizers.adam(w, g, m, v, step=1, lr=1.0, run=Run(instructions="mmx"))
    with pytest.raises(ValueError, match="the momentum buffer is missing"):
        _optimizers.sgd(w, g, step=1, lr=1.0, momentum=0.9)
