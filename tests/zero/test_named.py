"""Configurations that are planned: what cannot be is refused by name, what differs is said."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from torch import nn

from evener.errors import UsageError
from evener.zero import named


class OwnConfig:
    def __init__(self, heads: int) -> None:
        self.heads = heads

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> OwnConfig:
        if given["heads"] == 7:
            raise ValueError("validator failed:\n    64 is not a multiple of 7")
        return cls(given["heads"])


def _made(config: Any) -> nn.Module:
    if config.heads == 3:
        raise ZeroDivisionError
    return nn.Linear(4, config.heads)


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For transformers: one architecture, which refuses 7 heads and divides by what 3 leave."""
    own = types.SimpleNamespace(
        __version__="0", CONFIG_MAPPING={"own": OwnConfig}, OwnModel=_made, Linear=_made
    )
    monkeypatch.setitem(sys.modules, "transformers", own)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "adapter of peft (LORA)"),
        ({"model_type": "own", "heads": 4, "num_hidden_layers": -3}, "num_hidden_layers = -3"),
        ({"model_type": "own", "heads": 7}, "64 is not a multiple of 7"),
        ({"model_type": "own", "heads": 3}, "OwnModel cannot be made"),
        ({"model_type": "other", "heads": 4}, "'other' is not known"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(
    config: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(monkeypatch)
    with pytest.raises(UsageError) as refused:
        named.model_of(config)
    assert problem in refused.value.problem and refused.value.fix


def test_what_is_planned_otherwise_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    config = {"model_type": "own", "heads": 4, "architectures": ["OwnForFoo"],
              "quantization_config": {"quant_method": "gptq"}}  # fmt: skip
    said = named.remarks(config, named.model_of(config))
    assert [words.split(" ")[0] for words in said] == ["OwnForFoo", "the"]
    assert "planned as Linear" in said[0] and "quantized (gptq)" in said[1]
    plain = {"model_type": "own", "heads": 4, "architectures": ["Linear"]}
    assert named.remarks(plain, named.model_of(plain)) == []
