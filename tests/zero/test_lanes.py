"""Two lanes, one queue: whoever updates a slice, the bits are those of a plain loop."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from evener import zero
from evener.base import optimizers as _optimizers
from evener.zero import lanes, states, units
from evener.zero.rules import RULES, AdamW, Rule
from evener.zero.states import Noise, States
from tests.zero.engines import assert_same, configuration, weights
from tests.zero.models import Model, Plain, batches, loss_of


def begin(model: torch.nn.Module, streaming: bool, **changes: Any) -> zero.Engine:
    engine, *_ = zero.initialize(
        model=model, config=configuration(**changes), resident=set(), streaming=streaming
    )
    engine.threads = 1
    return engine


def states_of(n: int, master: str, moments: torch.dtype) -> States:
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(n, generator=generator)
    first, second = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    scales: list[torch.Tensor] = []
    if moments == torch.int8:
        (first, one), (second, two) = (
            states.encode("first", first),
            states.encode("second", second),
        )
        scales = [one, two]
    kept = first.to(moments), second.to(moments), *scales
    if master == "split":
        upper, lower = _optimizers.split(w)
        return States(upper, lower, None, *kept)
    if master == "float16":
        return States(w.half(), None, w, *kept)
    if master == "bfloat16":
        return States(w.bfloat16(), None, None, *kept)
    return States(w, None, None, *kept)


def begin_rule(
    kind: type[Rule], n: int, master: str, moments: torch.dtype
) -> tuple[Rule, tuple[States, States]]:
    """A rule with decay and momentum, and two equal states that have the moments it needs."""
    rule = kind(weight_decay=0.1, **({"momentum": 0.9} if "momentum" in kind.defaults else {}))
    pair = states_of(n, master, moments), states_of(n, master, moments)
    for one in pair:
        if "second" not in rule.moments.values():
            one.second = one.second_scale = None
    return rule, pair


@pytest.mark.parametrize("master", ["split", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", RULES)
def test_host_and_device_round_alike(
    master: str, moments: torch.dtype, kind: type[Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 5120 if moments == torch.int8 else 5000
    monkeypatch.setattr(states, "SLICE", 1536)
    rule, (here, there) = begin_rule(kind, n, master, moments)
    # Numbers of all sizes, also those that a block's largest leaves no room for.
    generator = torch.Generator().manual_seed(6)
    gradient = (10 ** torch.randn(n, generator=generator) - 0.5).bfloat16()
    gradient[:300] *= 1e-20
    for step in (1, 2, 3):
        rule.on_host(
            here,
            gradient,
            rule.values,
            step,
            0.3,
            _optimizers.Run(threads=1, seed=11, stream=7, offset=40),
        )
        rule.on_device(there, gradient, rule.values, step, 0.3, Noise(11, 7, 40))
    for name, tensor in here.tensors().items():
        assert torch.equal(tensor, there.tensors()[name]), name


@pytest.mark.parametrize(
    ("moments", "master"),
    [("fp32", True), ("bf16", True), ("int8", True), ("fp32", False), ("int8", False)],
)
def test_bits_do_not_depend_on_the_lane(
    moments: str, master: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random delays in both lanes, slices smaller than a chunk, poisoned slots."""
    generator = random.Random(1)

    def slow(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(generator.choice([0, 0.0005, 0.002]))
            return function(*arguments, **keywords)

        return call

    def poisoned(_slot: Any, _name: str, like: torch.Tensor, numel: int, *_: Any) -> torch.Tensor:
        room = torch.empty(numel, dtype=like.dtype)
        return room.view(torch.uint8).fill_(0xFF).view(like.dtype)

    monkeypatch.setattr(lanes, "SLICE", 1024)
    monkeypatch.setattr(AdamW, "on_host", slow(AdamW.on_host))
    monkeypatch.setattr(AdamW, "on_device", slow(AdamW.on_device))
    monkeypatch.setattr(lanes._Slot, "room", poisoned)
    defaults = {**lanes.Lanes.__init__.__kwdefaults__, "slice_numel": 1024}
    monkeypatch.setattr(lanes.Lanes.__init__, "__kwdefaults__", defaults)
    changes: dict[str, Any] = {"bf16": {"enabled": True}, "evener": {"moments": moments}}
    changes["evener"]["master"] = master
    monkeypatch.setattr(units, "LEAST", 64)
    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.bfloat16)
    alone = begin(copy.deepcopy(model), False, **changes)
    both = begin(model, True, **changes)
    for tokens in batches(6):
        for engine in (alone, both):
            engine.backward(loss_of(engine, tokens))
            engine.step()
        loss_of(plain.model, tokens).backward()
        plain.step()
    a, b = weights(alone), weights(both)
    assert all(torch.equal(a[name], b[name]) for name in a)
    if moments == "fp32" and master:
        assert_same(both, plain)
    assert alone.updated["stream"] == 0
    assert both.updated["stream"] > 0 and both.updated["host"] > 0
    assert sum(both.updated.values()) == sum(alone.updated.values())
    alone.close()
    both.close()


def test_what_fails_in_the_streaming_lane_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(AdamW, "on_device", broken)
    monkeypatch.setattr(AdamW, "on_host", broken)
    torch.manual_seed(0)
    engine = begin(Model(), True)
    engine.backward(loss_of(engine, batches(1)[0]))
    engine.step()
    with pytest.raises(zero.engine.EvenerError, match="no kernel"):
        engine.drain()
    engine.close()


def test_stale_updates_only_by_name_and_they_train() -> None:
    torch.manual_seed(0)
    model = Model()
    engine = begin(model, False, evener={"stale_updates": True})
    assert engine.stale_updates and not begin(Model(), False).stale_updates
    losses = []
    for tokens in batches(30):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    engine.close()


INTERPRETED = """
import torch
from evener.base import optimizers as _optimizers
from evener.zero.rules import named, triton_adam
from evener.zero.states import States, random_key
from tests import interpreted
from tests.zero.test_lanes import states_of

interpreted.stay()

for kind in ("adamw", "adam"):
    for master in ("split", "float16", "bfloat16", "float32"):
        for moments in (torch.float32, torch.bfloat16, torch.int8):
            n = 2560 if moments == torch.int8 else 2500
            want, have = states_of(n, master, moments), states_of(n, master, moments)
            rule = named(kind, weight_decay=0.1)
            gradient = (10 ** torch.randn(n) - 0.5).bfloat16()
            gradient[:300] *= 1e-20
            gradient[1030] = float("inf")  # a block that is NaN
            run = _optimizers.Run(threads=1, seed=3, stream=9, offset=256)
            rule.on_host(want, gradient, rule.values, 4, 0.5, run)
            other = {"split": have.lower, "float16": have.master}.get(master)
            triton_adam.adam(
                master, have.weights, other, gradient, have.moment("first"), have.moment("second"),
                rule.scalars(rule.values, 4, 0.5), coupled=kind == "adam",
                key=random_key(3, 4, 9), offset=256,
            )
            for name, tensor in want.tensors().items():
                got = have.tensors()[name]
                if tensor.is_floating_point():
                    tensor, got = tensor.float().nan_to_num(7.0), got.float().nan_to_num(7.0)
                assert torch.equal(tensor, got), (kind, master, moments, name)
"""


def test_the_triton_kernel_in_the_interpreter() -> None:
    """The kernel without a GPU: the interpreter is chosen when triton is imported. It is the
    integer arithmetic and the order of operations that are held here; contraction is below."""
    subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=150,
    )


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.zero.rules import triton_adam as kernels

types = {"weights": "*i16", "other": "*i16", "gradient": "*bf16", "first": "*i16", "second": "*i16"}
types |= {"n": "i32", "key": "i32", "offset": "i32"}
scalars = "scale coupled shrink beta1 rest1 beta2 rest2 root epsilon rate".split()
types |= {name: "fp32" for name in scalars}
types |= {"first_scale": "*u8", "second_scale": "*u8"}
constants = {"MASTER": "split", "COUPLED": True, "BLOCK": kernels.BLOCK}
for moments, fused in (("bfloat16", False), ("bfloat16", True), ("int8", False), ("int8", True)):
    constants["MOMENTS"] = moments
    if moments == "int8":
        types |= {"first": "*u8", "second": "*u8"}
    source = ASTSource(kernels._adam, {**types, **{k: "constexpr" for k in constants}}, constants)
    options = {"enable_fp_fusion": fused}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = made.asm["ptx"]
    text = text.replace(".ftz", "")  # Triton 3.5 flushes denormal numbers: docs/reference/limits.md
    assert "div.rn.f32" in text and "sqrt.rn.f32" in text
    print(f"{moments}-{fused}", text.count("fma.rn.f32"))
"""


def test_the_compiled_kernel_contracts_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMPILED], check=True, timeout=150, stdout=subprocess.PIPE, text=True
    )
    counts = dict(line.split() for line in run.stdout.splitlines())
    # As a check of the check: the same kernel with contraction allowed has some.
    for moments in ("bfloat16", "int8"):
        assert int(counts[f"{moments}-False"]) == 0 < int(counts[f"{moments}-True"])
