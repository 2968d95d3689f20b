"""The digest of code: it changes with what a call would run, and with nothing else."""

from __future__ import annotations

from typing import Any

from torch import nn

from evener.compile.code import digest

FACTOR = 2


def helper(x: Any) -> Any:
    return x + FACTOR


def caller(x: Any) -> Any:
    return [helper(each) for each in x]


def of(function: Any, module: Any = None) -> str:
    return digest(function, module, "torch 1")


def test_globals_and_helpers_count(monkeypatch: Any) -> None:
    first = of(caller)
    assert of(caller) == first
    monkeypatch.setitem(globals(), "FACTOR", 3)
    second = of(caller)
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    third = of(caller)
    assert len({first, second, third}) == 3
    assert digest(caller, None, "torch 2") != third


def test_closures_and_defaults_count() -> None:
    def made(k: Any, default: int = 0) -> Any:
        def inner(x: Any, d: int = default) -> Any:
            return x * k + d

        return inner

    digests = {of(made(1)), of(made(2)), of(made(1, default=5)), of(made(abs)), of(made(1.0))}
    assert len(digests) == 5
    assert of(made(1)) == of(made(1))


def test_a_module_is_its_tree() -> None:
    class Net(nn.Module):
        def __init__(self, width: int, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, width), scale

        def forward(self, x: Any) -> Any:
            return self.layer(x) * self.scale

    def one(*arguments: Any) -> str:
        net = Net(*arguments)
        return of(net.forward, net)

    assert one(3, 1.0) == one(3, 1.0)
    assert len({one(3, 1.0), one(4, 1.0), one(3, 2.0)}) == 3
    net = Net(3, 1.0)
    before = of(net.forward, net)
    net.layer = nn.Sequential(nn.Linear(4, 3), nn.ReLU())  # type: ignore[assignment]
    assert of(net.forward, net) != before


def test_recursion_ends() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    knot: list[Any] = [even]
    knot.append(knot)
    assert of(even) != of(odd)
    assert of(lambda: knot)
