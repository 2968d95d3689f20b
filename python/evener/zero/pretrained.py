"""Models without memory: `empty_weights`, and `from_pretrained` for a folder of transformers.

Parameters are made on the meta device, buffers are real (tables that a constructor computes are no
weights, and no file has them). Values come later, chunk by chunk, when `initialize` fills the
chunks: `from_pretrained` leaves on the model where they are. Names in files and in the model may
differ: tied weights are in a file under one of their names, a base model's lack its prefix, and
transformers says for an architecture which names and tensors it joins (experts).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from evener.base.given import given
from evener.errors import UsageError
from evener.zero.store import Source
from evener.zero.tensors import opened

logger = logging.getLogger("evener.zero")

ATTRIBUTE = "_evener_weights"


@given
@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Modules that are made inside have parameters without memory, and real buffers."""

    def hook(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@given
def from_pretrained(folder: str | Path, **changes: Any) -> nn.Module:
    """The model that a folder of transformers holds (config.json and *.safetensors), for
    `initialize`: weights are read there, chunk by chunk. `changes`: keys of its configuration.

    Raises UsageError where the folder is no such model or a quantized one, or transformers is
    missing.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json", "give a model's folder on this machine")
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            "from_pretrained needs transformers, which is not installed",
            "install it, or make the model in `with zero.empty_weights()` and give `weights=`",
        ) from None
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        ask = quantized.get if isinstance(quantized, Mapping) else vars(quantized).get
        raise UsageError(
            f"{folder} holds quantized weights ({ask('quant_method')}), whose scales are not read",
            "give the folder of the model that is not quantized; or load this one with "
            'transformers (load_in_4bit=True, device_map={"": "cpu"}), and give it with an adapter',
        )
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise UsageError(
            f"{folder}/config.json names no architecture of transformers: {names}",
            "make the model yourself in `with zero.empty_weights()` and give `weights=`",
        )
    with empty_weights():
        model: nn.Module = kind(config)
    found = source_for(folder, model)
    setattr(model, ATTRIBUTE, found)
    return model.train()


def given_with(model: nn.Module) -> Source | None:
    """Where `from_pretrained` found a model's weights."""
    found: Source | None = getattr(model, ATTRIBUTE, None)
    return found


class ModelSource:
    """Values by a model's names, from files that may have others."""

    def __init__(self, folder: Path, files: dict[str, Any], model: nn.Module) -> None:
        self._folder = folder
        self._files = files
        self._model = model
        self._aliases: dict[str, list[str]] = {}
        same: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            same.setdefault(id(parameter), []).append(name)
        for names in same.values():
            for name in names:
                self._aliases[name] = names
        self._known = [*self._aliases, *(name for name, _ in model.named_buffers())]
        self._joined = self._joins()

    def __call__(self, name: str, _parameter: nn.Parameter) -> torch.Tensor:
        for each in self._aliases.get(name, [name]):
            value = self._find(each)
            if value is not None:
                return value
        raise UsageError(f"{self._folder} has no {name}", "give the weights of this model")

    def buffer(self, name: str) -> torch.Tensor | None:
        """A buffer's value, where a file has one."""
        return self._find(name)

    def _find(self, name: str) -> torch.Tensor | None:
        prefix = getattr(self._model, "base_model_prefix", "")
        names = [name]
        if prefix:
            names.append(f"{prefix}.{name}")
            if name.startswith(f"{prefix}."):
                names.append(name[len(prefix) + 1 :])
        for each in names:
            if each in self._files:
                value: torch.Tensor = self._files[each].get_tensor(each)
                return value
        make = self._joined.get(name)
        return None if make is None else make()

    def _joins(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Tensors that transformers makes of others, or finds under another name."""
        if not hasattr(self._model, "base_model_prefix"):
            return {}
        try:
            from transformers.conversion_mapping import (  # type: ignore[import-not-found,unused-ignore]
                get_model_conversion_mapping,
            )
            from transformers.core_model_loading import (  # type: ignore[import-not-found,unused-ignore]
                WeightConverter,
                WeightRenaming,
                dot_natural_key,
                rename_source_key,
            )
        except ImportError:  # an older transformers: its files have the model's names
            return {}
        mapping = get_model_conversion_mapping(self._model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {p: each for each in converters for p in each.source_patterns}
        known = dict.fromkeys(self._known, True)
        parts: dict[str, list[tuple[str, str | None]]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(
                key, renamings, converters, self._model.base_model_prefix, known
            )
            parts.setdefault(target, []).append((key, pattern))

        def maker(target: str, keys: list[tuple[str, str | None]]) -> Callable[[], torch.Tensor]:
            def make() -> Any:
                first, pattern = keys[0]
                if pattern is None:
                    return self._files[first].get_tensor(first)
                converter = copy.deepcopy(by_pattern[pattern])
                for key, each in keys:
                    tensor = self._files[key].get_tensor(key)
                    converter.add_tensor(target, key, each, lambda tensor=tensor: tensor)
                found = converter.convert(target, model=self._model, config=self._model.config)
                joined: Any = found[target]
                return joined[0] if isinstance(joined, list) else joined

            return make

        return {target: maker(target, keys) for target, keys in parts.items()}


def source_for(folder: str | Path, model: nn.Module) -> ModelSource:
    """Initial values of `model` from the *.safetensors of a folder, or from one file. Buffers take
    theirs now, where a file has them."""
    found = ModelSource(Path(folder), opened(folder), model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            value = found.buffer(name)
            if value is None:
                continue
            if value.shape != buffer.shape:
                raise UsageError(
                    f"buffer {name} has shape {tuple(value.shape)} in {folder}, "
                    f"{tuple(buffer.shape)} in the model",
                    "give the weights of this model",
                )
            buffer.copy_(value)
    return found


def leave_meta(model: nn.Module) -> None:
    """Parameters on the meta device become views of one NaN: no memory, until they are filled."""
    nothing = torch.full((1,), torch.nan)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and old.is_meta:
                if old not in made:
                    made[old] = nn.Parameter(nothing.expand(old.shape), old.requires_grad)
                module._parameters[name] = made[old]
