"""The model that a configuration means: transformers' own class where transformers is installed,
else the shapes of a Llama for the architectures that have them. Others are refused by their
`model_type`: a plan of other shapes would be wrong and look right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from evener.errors import UsageError
from evener.zero.pretrained import empty_weights

_LLAMA2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
NAMES: dict[str, dict[str, Any]] = {
    # Llama 2 (arXiv 2307.09288), and Llama 3 (arXiv 2407.21783, table 3).
    "7b": {**_LLAMA2, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {**_LLAMA2, "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 40, "num_attention_heads": 40},
    "70b": {**_LLAMA2, "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "8b": {**_LLAMA2, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
LLAMAS = {"llama", "mistral", "qwen2", "qwen3", "gemma"}
"""Architectures whose matrices are a Llama's."""
_FALLBACK = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification")


def configuration(given: str) -> dict[str, Any]:
    """Of a name (7b, 8b, 13b, 70b), a config.json, or a folder with one."""
    if given.lower() in NAMES and not Path(given).exists():
        return NAMES[given.lower()]
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: {error}", f"give a config.json, its directory, or one of {', '.join(NAMES)}"
        ) from None
    if not isinstance(read, dict):
        raise UsageError(f"{path} is not a model's configuration", "give a config.json")
    return read


def model_of(config: Mapping[str, Any]) -> nn.Module | Mapping[str, Any]:
    """The model without memory; the configuration itself where it is a Llama's and transformers is
    missing. Raises UsageError, which names the `model_type`."""
    kind = config.get("model_type")
    if kind is None:
        return config  # as ever: the keys of a Llama, or they are missed by name
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        if kind in LLAMAS:
            return config
        raise UsageError(
            f"model_type {kind!r} needs transformers, which is not installed",
            f"pip install transformers; without it: {', '.join(sorted(LLAMAS))}",
        ) from None
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        raise UsageError(
            f"model_type {kind!r} is not known to transformers {transformers.__version__}",
            "give a configuration that it knows, or plan the model itself: evener.zero.plan",
        )
    made = known[kind].from_dict(dict(config))
    name = type(made).__name__.removesuffix("Config")
    tried = [*(config.get("architectures") or []), *(name + end for end in _FALLBACK)]
    for each in tried:
        if (cls := getattr(transformers, each, None)) is not None:
            with empty_weights():
                model: nn.Module = cls(made)
            return model.train()
    raise UsageError(
        f"model_type {kind!r} has no model to train among {', '.join(tried)}",
        "name it in `architectures`",
    )
