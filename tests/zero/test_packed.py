"""Frozen weights in 4 bits (bitsandbytes) under evener.zero: held and brought in 4 bits, the losses
and the bytes of plain training, and refused where they would be read wrongly.

bitsandbytes is in the environment that `make wild` makes; elsewhere these tests are skipped.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import zero
from evener.errors import EvenerError, UsageError
from evener.zero import packed
from tests import worlds

bitsandbytes = pytest.importorskip("bitsandbytes")

MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
WIDTH, STEPS = 64, 4
RATE = 0.125
"""A power of two: a step is rounded once, with and without a fused multiplication."""


class Block(nn.Module):
    """A frozen layer in 4 bits with an adapter beside it."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.base = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, **how)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def made(seed: int = 0, **how: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(**{"quant_type": "nf4", **how}) for _ in range(4)))
    for block in model:
        for parameter in block.base.parameters():
            parameter.requires_grad_(False)
    return model.to("cpu").train()


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


def plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for x in batches():
        loss = functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_of(model: nn.Module, way: Any = False, bf16: bool = False) -> zero.Engine:
    """All blocks on the host."""
    return zero.initialize(
        model=model,
        config={
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "bf16": {"enabled": bf16},
            "evener": {"device": "cpu", "checkpointing": way},
        },
        resident=set(),
    )[0]


def trained(engine: zero.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in data:
        loss = functional.mse_loss(engine(x).float(), x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bytes are compared: as floats they may be NaN."""
    return a.keys() == b.keys() and all(
        torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


@pytest.mark.parametrize("way", [False, True, "offload"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"quant_type": "fp4", "compress_statistics": False},
        {"quant_storage": torch.bfloat16},
        {"quant_storage": torch.float32, "bias": False},
    ],
    ids=["nf4", "fp4, plain scales", "bytes as bf16", "bytes as float32"],
)
def test_losses_and_bytes_are_those_of_plain_training(how: dict[str, Any], way: Any) -> None:
    reference, model = made(**how), made(**how)
    want = plain(reference)
    engine = engine_of(model, way)
    assert trained(engine, batches()) == want
    assert same(model.state_dict(), reference.state_dict())
    model = zero.give_back(engine)
    assert type(model[0].base) is bitsandbytes.nn.Linear4bit
    assert same(model.state_dict(), reference.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batches()[0]), reference(batches()[0]))


def test_they_are_held_in_4_bits() -> None:
    engine = engine_of(made(), bf16=True)
    try:
        frozen = [c for c in engine.chunks() if not c.group.trainable]
        held = sum(c.states.weights.nbytes for c in frozen)
        bias = WIDTH * 2
        assert held == 4 * (WIDTH * WIDTH // 2 + bias)
        losses = trained(engine, batches())
    finally:
        engine.close()
    assert losses == pytest.approx(plain(made()), rel=1e-2)


def test_a_plan_leaves_the_model_as_it_was_and_counts_4_bits() -> None:
    model, dense = made(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    before = copy.deepcopy(model.state_dict())
    config = {"evener": {"device": "cpu"}}
    found = zero.plan(model, config=config, example=batches()[0], machine=MACHINE)
    assert found.fits and found.traced
    assert type(model[0].base) is bitsandbytes.nn.Linear4bit
    assert same(model.state_dict(), before)
    dense.requires_grad_(False)
    moved = sum(p.nbytes for p in dense.parameters())
    assert sum(p.nbytes for p in model.parameters() if not p.requires_grad) < moved / 4


def test_what_does_not_fit_leaves_the_model_as_it_was() -> None:
    model = made()
    before = copy.deepcopy(model.state_dict())
    config = {"evener": {"device": "simulated", "budget": {"gpu": "1KB", "host": "1GB"}}}
    with pytest.raises(zero.NoFitError):
        zero.initialize(model=model, config=config, example=batches()[0], machine=MACHINE)
    assert type(model[0].base) is bitsandbytes.nn.Linear4bit
    assert same(model.state_dict(), before)
    assert plain(model) == plain(made())


def test_a_checkpoint_resumes_and_one_of_other_scales_is_refused(tmp_path: Path) -> None:
    want = plain(made())
    engine = engine_of(made())
    begun = trained(engine, batches()[:2])
    zero.save_checkpoint(engine, tmp_path)
    with pytest.raises(UsageError, match="weights in 4 bits"):
        zero.export(engine, tmp_path / "model")
    engine.close()
    engine = engine_of(made())
    zero.load_checkpoint(engine, tmp_path)
    assert begun + trained(engine, batches()[2:]) == want
    engine.close()
    for other in (made(seed=1), made(quant_type="fp4"), made(compress_statistics=False)):
        engine = engine_of(other)
        with pytest.raises(EvenerError, match=r"0\.base\.weight was quantized to 4 bits otherwise"):
            zero.load_checkpoint(engine, tmp_path)
        engine.close()


def test_bytes_of_other_scales_are_not_loaded() -> None:
    engine = engine_of(model := made())
    try:
        weights = {name: p for name, p in model.state_dict().items() if "weight." not in name}
        model.load_state_dict(weights)
        other = {n: p for n, p in made(seed=1).state_dict().items() if n == "1.base.weight"}
        with pytest.raises(UsageError, match=r"1\.base\.weight is in 4 bits, and of other scales"):
            model.load_state_dict(other, strict=False)
    finally:
        engine.close()


def test_weights_that_would_be_read_wrongly_are_refused() -> None:
    class Own(torch.nn.Parameter):
        """As Int8Params of bitsandbytes."""

    def refused(model: nn.Module, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            engine_of(model)

    loose = nn.Sequential(nn.Linear(4, 4), bitsandbytes.nn.Linear4bit(WIDTH, WIDTH))
    refused(loose, r"1\.weight is of a Linear4bit that is not quantized yet")
    inside = nn.Sequential(nn.Linear(4, 4), bitsandbytes.nn.Embedding4bit(WIDTH, WIDTH)).to("cpu")
    refused(inside, r"1\.weight is in 4 bits in a Embedding4bit")
    learned = made(quant_storage=torch.float32)
    learned[0].base.weight.requires_grad_()
    refused(learned, r"0\.base\.weight is in 4 bits and trained")
    eight = nn.Sequential(nn.Linear(4, 4))
    eight[0].weight = Own(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    refused(eight, r"0\.weight is a Own: of quantized weights")


def test_quantized_weights_of_torchao_are_refused() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    torchao.quantize_(model[0], torchao.Int8WeightOnlyConfig())
    with pytest.raises(UsageError, match=r"0\.weight is a .*: of quantized weights"):
        engine_of(model)


def test_a_fault_in_a_byte_changes_the_loss() -> None:
    """The comparison above sees one weight that is read wrongly."""
    model, want = made(), plain(made())
    engine = engine_of(model)
    chunk = next(c for c in engine.chunks() if not c.group.trainable)
    chunk.states.weights.view(torch.uint8)[0] ^= 0xFF
    assert trained(engine, batches()) != want
    engine.close()


def test_nothing_is_done_to_a_model_without_such_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = type(model[0])
    assert packed.able(model) == set()
    packed.take(model, torch.bfloat16)()
    assert type(model[0]) is before


def worker(rank: int, _size: int, folder: str) -> None:
    torch.set_num_threads(1)
    with pytest.raises(UsageError, match="ranks have quantized other weights"):
        engine_of(made(seed=rank))
    engine = engine_of(made())
    torch.save(trained(engine, batches()), Path(folder) / f"{rank}.pt")
    engine.close()


def test_two_ranks_share_the_bytes(tmp_path: Path) -> None:
    worlds.run([2], worker, str(tmp_path))
    for rank in (0, 1):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(plain(made()), rel=1e-6)


@pytest.mark.parametrize("way", [False, True])
def test_dora_reads_weights_in_4_bits_and_modules_to_save_are_saved(way: bool) -> None:
    """DoRA takes the norm of a whole weight in each pass, and sets on a CPU what it has read."""
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["base"], use_dora=True, modules_to_save=["3.down"]
        )
        base = made(bias=False)
        vars(base)["is_loaded_in_4bit"] = True  # as transformers says it to peft
        found: nn.Module = peft.get_peft_model(base, config)
        return found

    reference, model = adapted(), adapted()
    config = {"evener": {"device": "cpu"}}
    assert zero.plan(model, config=config, example=batches()[0], machine=MACHINE).traced
    want = plain(reference)
    engine = engine_of(model, way)
    assert trained(engine, batches()) == want
    found, wanted = (peft.get_peft_model_state_dict(each) for each in (model, reference))
    assert same(found, wanted)
    assert any("3.down" in name for name in found), "a part that is saved whole"
    layer = model.get_base_model()[0].base.base_layer
    with pytest.raises(UsageError, match="4 bits of a Linear4bit cannot be set"):
        layer.weight = bitsandbytes.nn.Params4bit(torch.zeros(8, 1, dtype=torch.uint8))
    assert same(zero.give_back(engine).state_dict(), reference.state_dict())
