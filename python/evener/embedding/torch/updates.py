"""The store's optimizers in torch operations, for rows that live on a GPU for a while.

Each operation rounds once, in the order in which `crates/embedding/src/optimizer.rs` has them, and
none is a fused multiply-add; divisions are exact to the last bit, square roots are on NVIDIA's GPUs
(torch's on CPUs are not, see `_root`). So a row gets the same bits wherever its step is done, which
tests hold it to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.errors import UsageError


def _power(base: float, exponent: int) -> float:
    """By squaring, as the store does it: the same bits."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _powers(base: float, exponents: torch.Tensor) -> torch.Tensor:
    """float64: `_power` of each exponent (int64, at least 0, below 2^32)."""
    result = torch.ones_like(exponents, dtype=torch.float64)
    for bit in range(32):
        result = torch.where((exponents >> bit) & 1 == 1, result * base, result)
        base *= base
    return result


def _root(x: torch.Tensor) -> torch.Tensor:
    """The nearest float32 to the square root.

    On CPUs torch takes a vector library's, which is off by a bit for one number in 200.
    """
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()


@dataclass(frozen=True)
class Held:
    """Rows of tables of one kind: `weight` [m, dim], `slots` [m, ...], `version` and `frequency`
    (int64 [m]). `options`: of one of the tables."""

    options: dict[str, Any]
    weight: torch.Tensor
    slots: torch.Tensor
    version: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one step. `w`, `g`: [n, dim]; `slots`: [n, dim] each, or [n, 1] of one number for a
    row; `absent`: int64 [n], the steps since a row's last update that it was not in. `t`: which
    step, from 1."""

    w: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    g: torch.Tensor
    absent: torch.Tensor
    t: int
    lr: float


Update = Callable[[Batch], tuple[torch.Tensor, ...]]
_f = np.float32


def rounded(value: Any) -> float:
    """A number of the options as the store has it: rounded to float32."""
    return float(_f(value))


def _sgd(o: dict[str, Any]) -> Update:
    decay = rounded(o["weight_decay"])

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        return (b.w - (b.g + b.w * decay) * b.lr,)

    return update


def _joined(b: Batch, decay: float) -> torch.Tensor:
    """The gradient with its part of the decay; the same bits where there is none."""
    return b.g + b.w * decay if decay else b.g


def _adagrad(o: dict[str, Any]) -> Update:
    eps, decay = rounded(o["eps"]), rounded(o["weight_decay"])

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        g = _joined(b, decay)
        a = b.slots[0] + g * g
        return b.w - g * b.lr / (_root(a) + eps), a

    return update


def _total(x: torch.Tensor) -> torch.Tensor:
    """[n, 1]: sums over rows: every sixteenth term by itself, and then these sums by halves."""
    n, dim = x.shape
    lanes = torch.nn.functional.pad(x, (0, -dim % 16)).view(n, (dim + 15) // 16, 16)
    sums = torch.zeros(n, 16, device=x.device)
    for part in lanes.unbind(1):
        sums = sums + part
    while sums.shape[1] > 1:
        first, second = sums.chunk(2, 1)
        sums = first + second
    return sums


def _quotient(number: float, x: torch.Tensor) -> torch.Tensor:
    """`number / x`, rounded once: torch divides 1 by `x` first where the dividend is no tensor."""
    return torch.full_like(x, number) / x


def _row_wise_adagrad(o: dict[str, Any]) -> Update:
    eps, decay, decoupled = rounded(o["eps"]), rounded(o["weight_decay"]), bool(o["decoupled"])

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        n = _joined(b, 0.0 if decoupled else decay)
        s = b.slots[0] + _over(_total(n * n), b.w.shape[1])
        size = _quotient(b.lr, _root(s) + eps)
        keep = 1 - decay * (torch.full_like(size, b.lr) if decoupled else size)
        return b.w * keep - b.g * size, s

    return update


def corrections(o: dict[str, Any], t: int) -> tuple[float, float]:
    """What first and second moments are divided by in step `t`."""
    return tuple(rounded(1 - _power(rounded(o[name]), t)) for name in ("beta1", "beta2"))  # type: ignore[return-value]


def _partial_row_wise_adam(o: dict[str, Any]) -> Update:
    beta1, beta2, eps = (rounded(o[name]) for name in ("beta1", "beta2", "eps"))
    rest1, rest2 = float(_f(1) - _f(beta1)), float(_f(1) - _f(beta2))
    decay = rounded(o["weight_decay"])

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        first, second = corrections(o, b.t)
        m, v = b.slots
        v = v * beta2 + _over(_total(b.g * b.g), b.w.shape[1]) * rest2
        m = m * beta1 + b.g * rest1
        root = _root(_over(v, second)) + eps
        return b.w - (_over(m, first) / root + b.w * decay) * b.lr, m, v

    return update


def _over(x: torch.Tensor, number: float) -> torch.Tensor:
    """`x / number`, rounded once: on a GPU torch multiplies by the inverse of a plain number."""
    return x / torch.full_like(x[:1, :1], number)


def _lamb(o: dict[str, Any]) -> Update:
    beta1, beta2, eps = (rounded(o[name]) for name in ("beta1", "beta2", "eps"))
    rest1, rest2 = float(_f(1) - _f(beta1)), float(_f(1) - _f(beta2))
    decay = rounded(o["weight_decay"])

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        first, second = corrections(o, b.t)
        m, v = b.slots
        m = m * beta1 + b.g * rest1
        v = v * beta2 + (b.g * b.g) * rest2
        change = _over(m, first) / (_root(_over(v, second)) + eps) + b.w * decay
        length, way = _root(_total(b.w * b.w)), _root(_total(change * change))
        trust = torch.where((length > 0) & (way > 0), length / way, torch.ones_like(way))
        return b.w - change * (trust * b.lr), m, v

    return update


def sizes(o: dict[str, Any], t: int, lr: float) -> tuple[float, float, float]:
    """Of Adam's step `t`: its size, what roots are multiplied with, and what is added to them."""
    beta1, beta2, eps = (rounded(o[name]) for name in ("beta1", "beta2", "eps"))
    first, second = 1 - _power(beta1, t), 1 - _power(beta2, t)
    root = float(np.sqrt(second))
    hat = o["kind"] == "lazy_adam" or bool(o["eps_hat"])
    return float(_f(lr / first)), float(_f(1 / root)), float(_f(eps / root)) if hat else eps


def _adam(o: dict[str, Any]) -> Update:
    beta1, beta2, kind = rounded(o["beta1"]), rounded(o["beta2"]), o["kind"]
    rest1, rest2 = float(_f(1) - _f(beta1)), float(_f(1) - _f(beta2))
    joins = rounded(o["weight_decay"]) if kind == "adam" else 0.0

    def update(b: Batch) -> tuple[torch.Tensor, ...]:
        w, (m, v) = b.w, b.slots
        size, root, added = sizes(o, b.t, b.lr)
        if kind == "adam":
            m = m * _powers(beta1, b.absent).float().unsqueeze(1)
            v = v * _powers(beta2, b.absent).float().unsqueeze(1)
        if kind == "adam_w":
            w = w * float(_f(1) - _f(b.lr) * _f(o["weight_decay"]))
        g = _joined(b, joins)
        m = m * beta1 + g * rest1
        v = v * beta2 + (g * g) * rest2
        return w - m * size / (_root(v) * root + added), m, v

    return update


_ROW_WISE = {
    "row_wise_adagrad": _row_wise_adagrad,
    "partial_row_wise_adam": _partial_row_wise_adam,
    "lamb": _lamb,
}


def of(options: dict[str, Any]) -> Update:
    """The step of these options' optimizer; values of 16 bits are rounded after it.

    Raises UsageError for an optimizer that only the store has.
    """
    optimizer = dict(options["optimizer"])
    kind = str(optimizer["kind"])
    if kind == "sgd":
        plain = _sgd(optimizer)
    elif kind == "adagrad":
        plain = _adagrad(optimizer)
    elif kind in _ROW_WISE:
        plain = _ROW_WISE[kind](optimizer)
    elif kind in ("adam", "adam_w", "lazy_adam"):
        plain = _adam(optimizer)
    else:
        raise UsageError(
            f"rows on a device cannot be stepped by {kind}",
            f"take sgd, adagrad, adam, adam_w, lazy_adam, {', '.join(_ROW_WISE)}, or leave "
            "cache_rows and resident=True out",
        )
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options["dtype"]]
    if dtype == torch.float32:
        return plain

    def narrow(batch: Batch) -> tuple[torch.Tensor, ...]:
        w, *slots = plain(batch)
        return (w.to(dtype).float(), *slots)

    return narrow
