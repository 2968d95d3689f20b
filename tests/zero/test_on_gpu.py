"""What only a GPU shows: streams, the allocator's limit, the kernel's bits."""

from __future__ import annotations

import copy
import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import zero
from evener.base import optimizers as _optimizers
from evener.zero import split
from evener.zero.chunk import Chunk
from evener.zero.lanes import Lanes
from evener.zero.rules import RULES, Rule
from evener.zero.states import SLICE, Noise, States
from tests.zero.engines import configuration, weights
from tests.zero.models import Model, batches, loss_of
from tests.zero.test_lanes import begin_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def train(
    steps: int = 8, streaming: bool = False, resident: set[str] | None = None, **changes: Any
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    torch.manual_seed(0)
    own = {"device": "cuda", **changes.pop("evener", {})}
    engine, *_ = zero.initialize(
        model=Model(width=256),
        config=configuration(bf16={"enabled": True}, evener=own, **changes),
        resident=resident or set(),
        streaming=streaming,
    )
    for tokens in batches(steps):
        engine.backward(loss_of(engine, tokens.cuda()))
        engine.step()
    found = {name: value.cpu() for name, value in weights(engine).items()}
    shares = engine.updated
    engine.close()
    return found, shares


@pytest.mark.parametrize("master", ["split", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", RULES)
def test_the_kernels_of_gpu_and_host_round_alike(
    master: str, moments: torch.dtype, kind: type[Rule]
) -> None:
    n = 100_096 if moments == torch.int8 else 100_003
    rule, (here, _) = begin_rule(kind, n, master, moments)
    moved = {name: tensor.cuda() for name, tensor in here.tensors().items()}
    there = States(
        moved["weights"],
        moved.get("lower"),
        moved.get("master"),
        moved["first"],
        moved.get("second"),
        moved.get("first_scale"),
        moved.get("second_scale"),
    )
    gradient = torch.randn(n).bfloat16()
    for step in (1, 2, 1000):
        run = _optimizers.Run(seed=11, stream=7, offset=1 << 20)
        rule.on_host(here, gradient, rule.values, step, 0.3, run)
        noise = Noise(11, 7, 1 << 20)
        rule.on_device(there, gradient.cuda(), rule.values, step, 0.3, noise)
    for name, tensor in here.tensors().items():
        assert torch.equal(tensor, there.tensors()[name].cpu()), name


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_bits_do_not_depend_on_lane_or_place(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with random delays on host and streams, and poisoned buffers."""
    own = {"evener": {"moments": moments}}
    want, _ = train(**own)
    some, _ = train(resident={"layers.1/0", "head/0"}, **own)
    generator = random.Random(2)
    inner = Chunk.allocate

    def poisoned(chunk: Chunk) -> None:
        time.sleep(generator.choice([0, 0, 0.002]))
        inner(chunk)
        torch.cuda._sleep(generator.choice([0, 200_000, 2_000_000]))  # on the stream that copies
        chunk.flat.fill_(torch.nan)

    monkeypatch.setattr(Chunk, "allocate", poisoned)
    both, shares = train(streaming=True, **own)
    assert shares["stream"] > 0
    for other in (some, both):
        assert all(torch.equal(want[name], other[name]) for name in want)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_an_update_in_the_backward_pass_changes_no_bit(
    moments: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where copies to the host are late: a gradient's buffer is another's soon."""
    want, _ = train(gradient_clipping=0.0, evener={"moments": moments})
    generator = random.Random(3)
    inner = Chunk.allocate

    def late(chunk: Chunk) -> None:
        time.sleep(generator.choice([0, 0, 0.002]))
        inner(chunk)
        torch.cuda._sleep(generator.choice([0, 200_000, 2_000_000]))
        chunk.flat.fill_(torch.nan)

    monkeypatch.setattr(Chunk, "allocate", late)
    own = {"moments": moments, "optimizer_in_backward": True}
    found, _ = train(gradient_clipping=0.0, streaming=streaming, evener=own)
    assert all(torch.equal(want[name], found[name]) for name in want)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_slots_take_no_memory_that_is_still_computed_with(
    moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training loop runs ahead of the GPU: what it has freed when the first slice streams is
    written to later."""
    own = {"evener": {"moments": moments}}
    want, _ = train(**own)
    inner = Lanes.put

    def ahead(lanes: Lanes, jobs: Any) -> None:
        freed = [torch.empty(SLICE, dtype=t, device="cuda") for t in (torch.float32, torch.bfloat16)
                 for _ in range(9)]  # fmt: skip
        torch.cuda._sleep(200_000_000)
        for each in freed:
            each.fill_(torch.nan)
        freed.clear()
        inner(lanes, jobs)

    monkeypatch.setattr(Lanes, "put", ahead)
    found, shares = train(streaming=True, **own)
    assert shares["stream"] > 0
    assert all(torch.equal(want[name], found[name]) for name in want)


def test_activations_on_the_host_change_no_bit() -> None:
    class Wide(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens.repeat(1, 64))

    ends = []
    for checkpointing in (True, "offload"):
        torch.manual_seed(0)
        engine, *_ = zero.initialize(
            model=Wide(width=512, blocks=6),
            config=configuration(
                bf16={"enabled": True},
                evener={"device": "cuda", "checkpointing": checkpointing, "balance": False,
                        "budget": {"gpu": "4GB", "host": "24GB"}},
            ),
            batch=(4, 16),  # as `batches` has it: the model makes 64 of each
        )  # fmt: skip
        for tokens in batches(4):
            out = engine(tokens.cuda()).float()
            engine.backward(torch.nn.functional.cross_entropy(
                out.flatten(0, 1), tokens.cuda().repeat(1, 64).flatten()))  # fmt: skip
            engine.step()
        if engine._passes.offload is not None:
            assert engine._passes.offload.pool.usage()[1] > 0
        ends.append({name: value.cpu() for name, value in weights(engine).items()})
        engine.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_allocator_never_takes_more_than_the_budget() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = 3 << 30
    engine, *_ = zero.initialize(
        model=Model(width=1024, blocks=12),
        config=configuration(
            bf16={"enabled": True}, evener={"device": "cuda", "budget": {"gpu": budget}}
        ),
        batch=(4, 16),
    )
    assert engine.plan is not None
    for tokens in batches(3):
        engine.backward(loss_of(engine, tokens.cuda()))
        engine.step()
    engine.drain()
    # The probe came before the limit: it has to stay below it by itself.
    assert torch.cuda.max_memory_reserved() <= budget - engine.plan.gpu_reserve
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(budget, dtype=torch.uint8, device="cuda")
    engine.close()
    assert torch.empty(budget, dtype=torch.uint8, device="cuda").numel() == budget
    torch.cuda.empty_cache()


def test_an_engine_that_was_closed_and_what_others_hold_leave_the_budget_whole() -> None:
    """A closed engine is a cycle, which Python collects whenever it likes."""
    others = torch.ones(300 << 20, dtype=torch.uint8, device="cuda")
    gc.disable()
    try:
        for _ in range(2):
            torch.manual_seed(0)
            engine, *_ = zero.initialize(
                model=Model(width=1024),
                config=configuration(evener={"device": "cuda", "budget": {"gpu": "2GB"}}),
                batch=(4, 16),
            )
            for tokens in batches(3):
                engine.backward(loss_of(engine, tokens.cuda()))
                engine.step()
            assert engine.plan is not None
            assert others.nbytes <= engine.plan.gpu_held < others.nbytes + (32 << 20)
            assert engine.memory()["gpu peak"] <= 2_000_000_000
            engine.close()
            del engine
    finally:
        gc.enable()


def muon(resident: set[str], streaming: bool, budget: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(width=512)
    begun = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model).cuda()
    both = []
    for net in (model, plain):
        chosen = split.hidden(net)
        rest = [p for p in net.parameters() if p not in chosen]
        both.append([torch.optim.Muon(list(chosen), 0.02), torch.optim.AdamW(rest, 1e-3, eps=1e-3)])
    engine, *_ = zero.initialize(
        model=model, optimizer=both[0], resident=resident, streaming=streaming,
        config={
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "evener": {"device": "cuda", "budget": {"ssd": budget} if budget else "auto"},
        },
        away={"layers.0/0", "layers.3/0"} if budget else None,
    )  # fmt: skip
    for tokens in batches(5):
        for net, given in ((engine, both[0]), (plain, both[1])):
            loss_of(net, tokens.cuda()).backward()
            for one in given:
                one.step()
            for one in given:
                one.zero_grad()
    found = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    for name, parameter in plain.named_parameters():
        # Newton-Schulz makes differences of rounding large where a matrix has nearly no gradient.
        want = parameter.detach().cpu()
        assert (found[name] - want).norm() <= 0.05 * (want - begun[name]).norm(), name
    assert engine.updated["stream"] > 0
    engine.close()
    return found


def test_whole_matrices_are_the_same_wherever_they_live(tmp_path: Path) -> None:
    """Products are the accelerator's in each place, so bits are too."""
    host = muon(set(), False)
    others = [
        muon({"layers.1/0", "layers.2/0"}, False),
        muon(set(), True),
        muon(set(), False, f"{tmp_path}:1GB"),
    ]
    for other in others:
        assert all(torch.equal(host[name], other[name]) for name in host)


def test_updates_of_whole_matrices_stay_in_the_budget() -> None:
    """Slots, and what the products take."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = 3 << 30
    model = Model(width=2048, blocks=8)
    chosen = split.hidden(model)
    rest = [p for p in model.parameters() if p not in chosen]
    given = [torch.optim.Muon(list(chosen), 0.02), torch.optim.AdamW(rest, 1e-3)]
    engine, *_ = zero.initialize(
        model=model,
        optimizer=given,
        config={"bf16": {"enabled": True}, "evener": {"device": "cuda", "budget": {"gpu": budget}}},
        batch=(4, 16),
    )
    assert engine.plan is not None
    assert {p.where for p in engine.plan.places} == {"gpu", "host"}
    for tokens in batches(5):
        loss_of(engine, tokens.cuda()).backward()
        for one in given:
            one.step()
    engine.drain()
    peak = torch.cuda.max_memory_reserved()
    assert peak <= budget - engine.plan.gpu_reserve
    assert engine.memory()["passes run again"] == 0
    engine.close()
