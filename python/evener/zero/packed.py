"""Frozen weights in 4 bits, as bitsandbytes' `Linear4bit` has them (QLoRA, arXiv 2305.14314).

Chunks have one floating-point dtype. So a weight's bytes become a frozen parameter of that dtype,
bit for bit, and are held and brought as any other: in 4 bits. The layer sees bytes in them where it
runs. Its scales are buffers and stay on the accelerator: half a bit for each weight, or an eighth
of one where they are quantized too. Nothing of bitsandbytes is imported where a program has not.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry, register_flop_formula

from evener.errors import UsageError
from evener.zero.ranks import world_size
from evener.zero.weight import Away

_SCALES = {"absmax": "absmax", "code": "code", "offset": "offset",
           "nested_absmax": "state2.absmax", "nested_code": "state2.code"}  # fmt: skip
"""A buffer's name, after `packed_`, and where its tensor is in bitsandbytes' `QuantState`."""


@dataclass(frozen=True)
class Packed:
    """What a stand-in parameter stands for. `shape` and `dtype`: of the bytes as bitsandbytes has
    them; `numbers`: what else `QuantState` has, and the same of its `state2`; `mark`: a hash of the
    scales and the numbers. Bytes mean something with scales of the same mark alone."""

    original: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    numbers: dict[str, Any]
    nested: dict[str, Any] | None
    mark: str

    def bytes_of(self, value: torch.Tensor) -> torch.Tensor:
        """The bytes in a stand-in's value, in the shape that bitsandbytes gives them: a view."""
        size = self.shape.numel() * self.dtype.itemsize
        return value.reshape(-1).view(torch.uint8)[:size].view(self.dtype).view(self.shape)

    def stand_in_of(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The inverse: elements of `dtype`, flat, with zero bytes behind."""
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return functional.pad(flat, (0, -flat.numel() % dtype.itemsize)).view(dtype)


class _Layer(nn.Module):
    """A Linear4bit whose weight is a stand-in."""

    packed: Packed
    compute_type_is_set: bool
    compute_dtype: torch.dtype | None
    set_compute_type: Callable[[torch.Tensor], None]

    @property
    def weight(self) -> Any:
        """As bitsandbytes has it, for what reads it where the layer runs (peft's DoRA its norm); in
        a trace, of which no tensor can be a Params4bit, what it stands for."""
        value: Any = self._parameters["weight"]
        if isinstance(value, Away):
            return value
        held = self.packed.bytes_of(value.detach())
        if isinstance(held, FakeTensor):
            import bitsandbytes  # type: ignore[import-not-found,unused-ignore]

            return bitsandbytes.functional.dequantize_4bit(held, self.state())
        kind: Any = type(self.packed.original)
        return kind(held, quant_state=self.state(), bnb_quantized=True, quant_storage=held.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """What was read may be set again, as peft does on a CPU."""
        if name != "weight":
            super().__setattr__(name, value)
        elif value.data_ptr() != self._parameters["weight"].data_ptr():  # type: ignore[union-attr]
            raise UsageError(
                f"a weight in 4 bits of a {type(self).__mro__[2].__name__} cannot be set: the "
                "engine holds it",
                "take the model back first: zero.give_back(engine)",
            )

    def state(self) -> Any:
        """bitsandbytes' QuantState, of the scales as they are now: a trace has others."""
        from bitsandbytes.functional import QuantState  # type: ignore[import-not-found,unused-ignore]

        at = {name: self._buffers.get(f"packed_{name}") for name in _SCALES}
        inner = None
        if self.packed.nested is not None:
            inner = QuantState(
                absmax=at["nested_absmax"], code=at["nested_code"], **self.packed.nested
            )
        return QuantState(
            absmax=at["absmax"], code=at["code"], offset=at["offset"], state2=inner,
            **self.packed.numbers,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Linear4bit's; its form of weights for one kernel of CPUs is left out."""
        import bitsandbytes  # type: ignore[import-not-found,unused-ignore]

        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        kind = self.compute_dtype or x.dtype
        weight: Any = self._parameters["weight"]
        bias: Any = self.bias
        column = self.packed.bytes_of(weight).view(-1, 1)
        found: torch.Tensor = bitsandbytes.matmul_4bit(
            x.to(kind),
            column.t(),
            bias=None if bias is None else bias.to(kind),
            quant_state=self.state(),
        )
        return found.to(x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """With the scales under bitsandbytes' names; `values` puts the bytes there."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, value in self.state().as_dict(packed=True).items():
            destination[f"{prefix}weight.{name}"] = value


@functools.cache
def _kind(base: Any) -> Any:
    return type(f"Packed{base.__name__}", (_Layer, base), {})


def of(parameter: nn.Parameter) -> Packed | None:
    """What a parameter stands for, where it does."""
    found: Packed | None = vars(parameter).get("packed")
    return found


def able(model: nn.Module) -> set[int]:
    """The ids of the parameters that `take` replaces. Raises UsageError for one that a library has
    quantized and that cannot be held so: in another form, in another layer than Linear4bit,
    trained, or still to be quantized."""
    library: Any = sys.modules.get("bitsandbytes.nn")
    found: set[int] = set()
    for name, module in model.named_modules():
        for each, parameter in module.named_parameters(recurse=False):
            named = f"parameter {name}.{each}" if name else f"parameter {each}"
            if library is not None and isinstance(parameter, library.Params4bit):
                linear = isinstance(module, library.Linear4bit) and each == "weight"
                _refuse(named, type(module).__name__, parameter, linear)
                found.add(id(parameter))
            elif _quantized(parameter):
                raise UsageError(
                    f"{named} is a {type(parameter).__name__}: of quantized weights, evener.zero "
                    "holds those of bitsandbytes' Linear4bit",
                    "load the model with load_in_4bit=True (bitsandbytes), or not quantized",
                )
    return found


def _quantized(parameter: Any) -> bool:
    """Whether a library keeps it in a form of its own: torchao's tensors, which say that they are
    bfloat16, and bitsandbytes' Int8Params."""
    own = type(parameter) is not nn.Parameter and not parameter.dtype.is_floating_point
    return own or is_traceable_wrapper_subclass(parameter)


def _refuse(named: str, layer: str, parameter: nn.Parameter, linear: bool) -> None:
    if not linear:
        raise UsageError(
            f"{named} is in 4 bits in a {layer}, and evener.zero holds those of Linear4bit",
            "leave this module out of the quantization (llm_int8_skip_modules)",
        )
    if parameter.requires_grad:
        raise UsageError(
            f"{named} is in 4 bits and trained", "freeze it, and train an adapter (peft)"
        )
    if getattr(parameter, "quant_state", None) is None or parameter.is_meta:
        raise UsageError(
            f"{named} is of a Linear4bit that is not quantized yet",
            'load the model with a quantization_config, or call model.to("cpu") first',
        )


def take(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Put stand-ins of `dtype` in the place of 4-bit weights; returns what puts them back, for as
    long as no engine has taken the stand-ins' values. Raises UsageError as `able`."""
    wanted = able(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameter = module._parameters.get("weight")
        if parameter is not None and id(parameter) in wanted:
            _replace(module, parameter, dtype, made)
    try:
        _check_ranks(model)
    except UsageError:
        give_back(model)
        raise
    return lambda: give_back(model)


def _replace(
    module: Any, parameter: Any, dtype: torch.dtype, made: dict[int, nn.Parameter]
) -> None:
    state = parameter.quant_state if parameter.quant_state is not None else module.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        module.state_dict()  # bitsandbytes brings it back into the form that it saves
        state = parameter.quant_state
    found = {
        name: functools.reduce(lambda at, key: getattr(at, key, None), path.split("."), state)
        for name, path in _SCALES.items()
    }
    scales = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if id(parameter) not in made:
        data = parameter.detach().as_subclass(torch.Tensor)
        names = "shape", "dtype", "blocksize", "quant_type"
        numbers = {name: getattr(state, name) for name in names}
        nested = {name: getattr(state.state2, name) for name in names} if state.nested else None
        mark = _mark(scales, numbers, nested)
        packed = Packed(parameter, data.shape, data.dtype, numbers, nested, mark)
        stand_in = nn.Parameter(packed.stand_in_of(data, dtype), requires_grad=False)
        vars(stand_in)["packed"] = packed
        parameter.data = torch.empty(0, dtype=data.dtype, device=data.device)
        made[id(parameter)] = stand_in
    module._parameters["weight"] = made[id(parameter)]
    vars(module)["packed"] = of(made[id(parameter)])
    for name, value in scales.items():
        module.register_buffer(f"packed_{name}", value, persistent=False)
    module.quant_state = None
    base: Any = type(module)
    module.__class__ = _kind(base)
    _count()


def give_back(model: nn.Module) -> None:
    """The layers as they were, with what the stand-ins hold now; scales on their device."""
    for module in model.modules():
        if not isinstance(module, _Layer):
            continue
        stand_in: Any = module._parameters["weight"]
        packed, layer, device = module.packed, module, stand_in.device
        original: Any = packed.original
        state = layer.state()
        state.to(device)
        value = stand_in.detach()
        original.data = value if value.dtype == packed.dtype else packed.bytes_of(value)
        original.quant_state = state
        for name in _SCALES:
            module._buffers.pop(f"packed_{name}", None)
            module._non_persistent_buffers_set.discard(f"packed_{name}")
        vars(module).pop("packed")
        module._parameters["weight"] = original
        module.__class__ = type(module).__mro__[2]
        module.quant_state = state


def _count() -> None:
    """The arithmetic of bitsandbytes' product is counted where a step is traced."""
    operation = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)
    if operation is None or operation in flop_registry:
        return

    @register_flop_formula(operation)
    def formula(rows: Any, _bytes: Any, shape: Any, *_: Any, **__: Any) -> int:
        count: int = torch.Size(rows).numel()
        return 2 * count * int(shape[0])


def _mark(scales: dict[str, torch.Tensor], *numbers: Any) -> str:
    made = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    for name, value in sorted(scales.items()):
        flat = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        made.update(name.encode() + flat.numpy().tobytes())
    return made.hexdigest()


def marks(model: nn.Module) -> dict[str, str]:
    """The mark of every weight in 4 bits, by its name."""
    named = [(name, vars(p).get("packed")) for name, p in model.named_parameters()]
    return {name: packed.mark for name, packed in named if packed is not None}


def _check_ranks(model: nn.Module) -> None:
    """Rank 0's bytes are taken by all, and scales are each rank's own. Collective."""
    if world_size() == 1:
        return
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, marks(model))
    if any(each != every[0] for each in every):
        raise UsageError(
            "ranks have quantized other weights: their 4-bit scales are not the same",
            "load the same weights on every rank",
        )
