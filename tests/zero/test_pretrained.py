"""Models without memory, and weights from folders whose names differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from evener import zero
from evener.errors import UsageError

from .engines import configuration, weights
from .models import Model, batches, loss_of


class Tables(Model):
    """With a buffer that no file has, and one that a file may have."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("count", torch.zeros(3))


def test_parameters_are_empty_and_buffers_are_real() -> None:
    with zero.empty_weights():
        model = Tables()
        with zero.empty_weights():  # inside another one
            inner = nn.Linear(4, 4)
    assert all(p.is_meta for p in model.parameters()) and inner.weight.is_meta
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.table, torch.arange(8.0))
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("tied_name", ["embed.weight", "head.weight"])
def test_weights_come_from_shards_under_either_tied_name(tmp_path: Path, tied_name: str) -> None:
    torch.manual_seed(0)
    full = Tables()
    state = {name: p.detach().clone() for name, p in full.named_parameters()}
    state[tied_name] = state.pop("embed.weight")
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in shards.items():
        save_file({name: state[name] for name in mine}, tmp_path / file)
    where = {name: file for file, mine in shards.items() for name in mine}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    # Not in the index, so not of this model.
    save_file({names[0]: torch.zeros(1)}, tmp_path / "c.safetensors")
    with zero.empty_weights():
        model = Tables()
    engine, *_ = zero.initialize(
        model=model, config=configuration(), weights=tmp_path, resident=set()
    )
    got = weights(engine)
    for name, p in full.named_parameters():
        assert torch.equal(got[name], p), name
    tokens = batches(1)[0]
    assert loss_of(engine, tokens).item() == loss_of(full, tokens).item()
    engine.close()
    index.write_text("{")
    with zero.empty_weights():
        model = Tables()
    with pytest.raises(UsageError, match="no whole index"):
        zero.initialize(model=model, config=configuration(), weights=tmp_path, resident=set())


class Outer(nn.Module):
    """As transformers has it: a base model under a prefix."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens)


def test_a_base_models_file_lacks_its_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = Outer()
    save_file(dict(full.model.state_dict()), tmp_path / "model.safetensors")
    with zero.empty_weights():
        model = Outer()
    engine, *_ = zero.initialize(
        model=model, config=configuration(), weights=tmp_path, resident=set()
    )
    got = weights(engine)
    assert all(torch.equal(got[name], p) for name, p in full.named_parameters())
    engine.close()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        zero.from_pretrained(tmp_path)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with zero.empty_weights():
        model = Model()
    with pytest.raises(UsageError, match=r"has no embed\.weight"):
        zero.initialize(model=model, config=configuration(), weights=tmp_path, resident=set())
    with torch.device("meta"):
        lost = Tables()
    with pytest.raises(UsageError, match="buffer table") as refused:
        zero.initialize(
            model=lost,
            config=configuration(),
            weights=lambda _, p: torch.zeros(p.shape),
            resident=set(),
        )
    assert "empty_weights" in refused.value.fix


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_values_are_refused(dtype: torch.dtype) -> None:
    with zero.empty_weights():
        model = Model()

    def source(name: str, parameter: nn.Parameter) -> torch.Tensor:
        value = torch.zeros(parameter.shape)
        return value.to(dtype) if name == "layers.1.up.weight" else value

    with pytest.raises(UsageError, match=r"layers\.1\.up\.weight is torch\..*8.* is quantized"):
        zero.initialize(model=model, config=configuration(), weights=source, resident=set())


@pytest.mark.parametrize("way", ["bitsandbytes", "fp8"])
def test_a_folder_of_quantized_weights_is_refused(tmp_path: Path, way: str) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    quantized = {**config, "quantization_config": {"quant_method": way}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(UsageError, match=rf"holds quantized weights \({way}\)"):
        zero.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="holds no"):
        zero.from_pretrained(tmp_path)
