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
_FALLBACK = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification",
             "Model")  # fmt: skip


def configuration(given: str) -> dict[str, Any]:
    """The configuration of a name (7b, 8b, 13b, 70b), a config.json, or a folder with one."""
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
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        raise UsageError(
            f"this is an adapter of peft ({config['peft_type']}), not a model",
            f"give the config.json of its base model{f', {base}' if base else ''}",
        )
    for key, value in config.items():
        if isinstance(value, int) and value < 0 and key.startswith(("num_", "n_", "hidden_size")):
            raise UsageError(f"the model's configuration has {key} = {value}", "give one above 0")
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
    try:
        made = known[kind].from_dict(dict(config))
    except Exception as error:  # whatever transformers raises for what it does not take
        raise UsageError(
            f"transformers {transformers.__version__} refuses this {kind} configuration: "
            f"{_last_line(error)}",
            "correct it in config.json",
        ) from error
    if getattr(made, "is_encoder_decoder", False):
        # To shift labels; a file may lack them, as generation has its own.
        for key in ("pad_token_id", "decoder_start_token_id"):
            if getattr(made, key, None) is None:
                setattr(made, key, 0)
    name = type(made).__name__.removesuffix("Config")
    tried = [*(config.get("architectures") or []), *(name + end for end in _FALLBACK)]
    for each in tried:
        if (cls := getattr(transformers, each, None)) is not None:
            try:
                with empty_weights():
                    model: nn.Module = cls(made)
            except Exception as error:  # its sizes do not go together
                raise UsageError(
                    f"{each} cannot be made with this configuration: {_last_line(error)}",
                    "correct it in config.json",
                ) from error
            return model.train()
    raise UsageError(
        f"model_type {kind!r} has no model to train among {', '.join(tried)}",
        "name it in `architectures`",
    )


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


def remarks(config: Mapping[str, Any], model: Any) -> list[str]:
    """What a plan of this configuration does not take from it as it is, in words."""
    found = []
    names = config.get("architectures") or []
    if names and isinstance(model, nn.Module) and type(model).__name__ not in names:
        found.append(
            f"{', '.join(map(str, names))} is not in transformers: planned as "
            f"{type(model).__name__}"
        )
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        way = quantized.get("quant_method", "a way without a name")
        found.append(
            f"the weights are quantized ({way}): planned as if they were not, as training needs"
        )
    return found
