"""What a model is told while its step runs on fake tensors: values, where it asks for them.

A fake tensor has a shape and no values. Some models ask for values all the same: sizes of images
that come as a tensor, the tokens that a mask selects, how many tokens an expert got. So a tensor
may have a *shadow*: a real one on the CPU, beside it. Integers, truth values and small
floating-point tensors of the example batch have one, and what is computed from shadows alone has
one again. These are exact: the step is that of the example.

What depends on activations has no exact values: they would cost the step itself. A model that
cannot go on without them is traced a second time, with *drawn* ones: floating-point tensors that
are compared, sorted or looked into get small noise, the same in each pass, and what follows from it
is computed. So experts get about equal shares of the tokens, and boxes are about where their
anchors are, as in a model whose training begins.

Without a shadow the answer is 0 (no layer is dropped). What a mask without a shadow selects is all.
Whether something holds everywhere is answered yes, unless there is a mask (no sequences are
packed); where values are drawn it is yes, so that a model's checks of its own boxes hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from evener.zero.meter import tensors

WHOLE, WIDE = 1 << 22, 1 << 16
"""Elements of the largest shadow: of integers and truth values, of floating-point numbers."""
DRAWN = 1 << 20
"""The same of drawn floating-point numbers."""
NOISE = 0.02


class Shadow:
    """Values of a fake tensor. `exact`: they follow from the example batch alone."""

    __slots__ = ("exact", "value")

    def __init__(self, value: torch.Tensor, exact: bool) -> None:
        self.value = value
        self.exact = exact


class Answers(TorchDispatchMode):
    """See the head of this file. `every`: the answer to `all()`. `draw`: values that depend on
    activations are drawn where they are asked for; False: they raise what torch raises."""

    def __init__(self, every: bool, draw: bool = False) -> None:
        super().__init__()
        self._every = every or draw
        self._draw = draw
        self._spoilt: dict[int, torch.Tensor] = {}
        """Storages that an operation without shadows wrote to."""
        self.given: Counter[str] = Counter()
        """Exact answers, by what asked."""
        self.drawn: Counter[str] = Counter()
        """Drawn ones."""
        self.kernels: Counter[str] = Counter()
        """Kernels of Triton that were passed over: their time is not known."""

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Values of an input, where it is small enough and has any; else it has none."""
        fake._evener_shadow = None  # type: ignore[attr-defined]  # it was made empty
        small = real.numel() <= (WIDE if real.is_floating_point() else WHOLE)
        if small and not real.is_meta and not isinstance(real, FakeTensor):
            with _disable_current_modes(), torch.no_grad():
                value = real.detach().to("cpu", fake.dtype, copy=True).contiguous()
            _attach(fake, Shadow(value, exact=True))

    def said(self) -> str:
        """In words, what was answered."""

        def named(found: Counter[str]) -> str:
            return ", ".join(f"{count} x {name}" for name, count in found.most_common(4))

        words = []
        if self.given:
            words.append(f"values of the example were asked for ({named(self.given)})")
        if self.drawn:
            words.append(f"values of activations were drawn ({named(self.drawn)})")
        if self.kernels:
            words.append(f"kernels of Triton count no time ({named(self.kernels)})")
        return "; ".join(words)

    def values(self, tensor: torch.Tensor, who: str) -> torch.Tensor | None:
        """Those that the program reads itself."""
        found = self._shadow(tensor)
        if found is None and self._draw:
            found = self._noise(tensor, 0)
        if found is not None:
            self._count(found.exact, who)
        return None if found is None else found.value

    def launched(self, kernel: str, given: list[torch.Tensor]) -> None:
        """A kernel that was passed over may have written to any of these."""
        self.kernels[kernel] += 1
        for tensor in given:
            self._no_longer(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked for by every operation: half of all that is seen
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.scalar(args[0])
        if func is torch.ops.aten.equal.default:
            left, right = self._shadow(args[0]), self._shadow(args[1])
            with _disable_current_modes():
                return bool(left and right and torch.equal(left.value, right.value))
        if func is torch.ops.aten.masked_select.default:
            return self._selected(*args)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(*args[:3])
        if func in _WIDER:
            product = _WIDER[func](*args[1:4])
            return kwargs.get("out", product)
        if func in _CTC:
            return _ctc(*args)
        if func in _CTC_BACKWARD:
            return torch.empty_like(args[1])
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        given = list(tensors((args, *kwargs.values())))
        try:
            out = func(*args, **kwargs)
        except Exception:
            real = self._run(func, args, kwargs, given, forced=True)
            if real is None:
                raise
            return self._faked(func, real[0], given)
        outs = list(tensors(out))
        real = None
        if self._worth(func, given, outs):
            real = self._run(func, args, kwargs, given)
        if real is not None:
            for fake, value in zip(outs, tensors(real[0]), strict=True):
                if fake.shape == value.shape and isinstance(fake, FakeTensor):
                    _attach(fake, Shadow(value, real[1]))
        elif func._schema.is_mutable:
            self._spoil(func, args, kwargs)
        if func is torch.ops.aten.all.default:
            out._evener_all = True
        return out

    def _shadow(self, tensor: torch.Tensor) -> Shadow | None:
        if not isinstance(tensor, FakeTensor):
            if tensor.device.type != "cpu" or tensor.numel() > WIDE:
                return None
            with _disable_current_modes():
                return Shadow(tensor.detach().clone(), exact=True)
        found: Shadow | None = getattr(tensor, "_evener_shadow", None)
        if found is not None and found.value.untyped_storage()._cdata in self._spoilt:
            return None
        return found

    def scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """What a tensor of one element says."""
        found = self._shadow(tensor)
        dtype = tensor.dtype
        if dtype == torch.bool:
            # A batch without padding must not hide what the mask of another one takes.
            everywhere = getattr(tensor, "_evener_all", False)
            if found is not None and found.exact and not (everywhere and not self._every):
                return bool(self._told(found, "item"))
            return self._every if everywhere else False
        if found is not None:
            return self._told(found, "item")
        return 0.0 if dtype.is_floating_point else 0

    def _told(self, found: Shadow, who: str) -> bool | int | float:
        self._count(found.exact, who)
        with _disable_current_modes():
            return found.value.item()

    def _count(self, exact: bool, who: str) -> None:
        (self.given if exact else self.drawn)[who] += 1

    def _selected(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        flat = torch.broadcast_tensors(values, mask)[0].reshape(-1)
        found = self._shadow(mask)
        if found is None or not values.numel():
            return torch.clone(flat)
        self._count(found.exact, "masked_select")
        with _disable_current_modes():
            count = int(found.value.sum()) * (flat.numel() // mask.numel())
        return torch.clone(flat[:count])

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The places that a mask as an index chooses, as a real operation makes them."""
        if index is None or index.dtype != torch.bool:
            return [index]
        found = self._shadow(index)
        if found is None and self._draw and index.numel() <= WHOLE:
            found = self._noise(index, 0)
        if found is None:
            return [index]
        with _disable_current_modes():
            places = found.value.nonzero(as_tuple=True)
        self._count(found.exact, "masks")
        return [self._made(each, found.exact, index.device) for each in places]

    def _worth(self, func: Any, given: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
        """Whether an operation's result is to have a shadow."""
        if not outs or (torch.Tag.nondeterministic_seeded in func.tags and not self._draw):
            return False
        for out in outs:
            wide = out.is_floating_point()
            if out.numel() > ((DRAWN if self._draw else WIDE) if wide else WHOLE):
                return False
        shadows = [self._shadow(x) is not None for x in given]
        if all(shadows):
            return True
        if not self._draw or sum(x.numel() for x in given) > WHOLE:
            return False
        return any(shadows) or any(not out.is_floating_point() for out in outs)

    def _run(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], forced: bool = False
    ) -> tuple[Any, bool] | None:
        """What the operation gives of shadows, and whether that is exact; None where it cannot be
        said. `forced`: it has no fake form, and what asked is counted."""
        shadows: dict[int, Shadow] = {}
        for number, tensor in enumerate(given):
            found = self._shadow(tensor)
            if found is None and self._draw and sum(x.numel() for x in given) <= WHOLE:
                found = self._noise(tensor, number)
            if found is None:
                return None
            shadows[id(tensor)] = found
        exact = all(each.exact for each in shadows.values())

        def swapped(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return shadows[id(value)].value
            if isinstance(value, list | tuple):
                return [swapped(each) for each in value]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        named = {name: swapped(value) for name, value in kwargs.items() if name != "pin_memory"}
        chance = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.default_generator.get_state() if chance else None
        try:
            with _disable_current_modes():
                if chance:
                    torch.default_generator.manual_seed(0)
                made = func(*swapped(args), **named)
                if func in _EMPTY:
                    made.zero_()
        except Exception:  # noqa: BLE001  # noise need not be what the operation takes
            return None
        finally:
            if state is not None:
                torch.default_generator.set_state(state)
        exact = exact and not chance
        if forced:
            self._count(exact, func._schema.name.rpartition("::")[2])
        return made, exact

    def _noise(self, tensor: torch.Tensor, number: int) -> Shadow:
        """Drawn values, the same for a shape and a place among the arguments: a block that is
        recomputed must see what it saw."""
        generator = torch.Generator().manual_seed(math.prod(n + 1 for n in tensor.shape) + number)
        with _disable_current_modes():
            shape = tuple(tensor.shape)
            if tensor.is_floating_point():
                value = torch.randn(shape, generator=generator).mul_(NOISE).to(tensor.dtype)
            elif tensor.dtype == torch.bool:
                value = torch.rand(shape, generator=generator) < 0.5
            else:
                value = torch.zeros(shape, dtype=tensor.dtype)
        found = Shadow(value, exact=False)
        if isinstance(tensor, FakeTensor):
            _attach(tensor, found)
        return found

    def _made(self, value: torch.Tensor, exact: bool, device: torch.device) -> torch.Tensor:
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
        _attach(fake, Shadow(value, exact))
        return fake

    def _faked(self, func: Any, real: Any, given: list[torch.Tensor]) -> Any:
        """Fake tensors for what an operation gave that has no fake form."""
        device = given[0].device if given else torch.device("cpu")
        exact = not self._draw or all(
            found is not None and found.exact for found in map(self._shadow, given)
        )

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._made(value, exact, device)
            if isinstance(value, list | tuple):
                return type(value)(fake(each) for each in value)
            return value

        return fake(real)

    def _spoil(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Shadows of what an operation wrote to are no longer true, nor are those of its views."""
        written = func._schema.arguments
        for place, argument in enumerate(written):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tensors(value):
                self._no_longer(tensor)

    def _no_longer(self, tensor: torch.Tensor) -> None:
        found = getattr(tensor, "_evener_shadow", None)
        if found is not None:
            self._spoilt[found.value.untyped_storage()._cdata] = found.value


class Readers(TorchFunctionMode):
    """Where values are read past the dispatcher they are those of `answers`: by numpy (scipy's
    matching of boxes does that), and by `torch.tensor` of a list of scalars."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ and isinstance(args[0], FakeTensor):
            values = self._answers.values(args[0], "numpy")
            if values is not None:
                with _disable_current_modes():
                    return func(values.clone(), *args[1:], **kwargs)
        if func in _COPY and args and isinstance(args[0], list | tuple):
            args = (self._plain(args[0]), *args[1:])
        return func(*args, **kwargs)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.numel() == 1:
            return self._answers.scalar(value)
        if isinstance(value, list | tuple):
            return [self._plain(each) for each in value]
        return value


def _attach(fake: torch.Tensor, shadow: Shadow) -> None:
    fake._evener_shadow = shadow  # type: ignore[attr-defined]


_COPY = (torch.tensor, torch.as_tensor)
_READ = (torch.Tensor.numpy, torch.Tensor.__array__)
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_ATEN = torch.ops.aten
# torch 2.11 knows no shapes of sums with a product in a wider dtype; of the product it does.
_WIDER = {
    _ATEN.addmm.dtype: _ATEN.mm.dtype,
    _ATEN.addmm.dtype_out: _ATEN.mm.dtype,
    _ATEN.baddbmm.dtype: _ATEN.bmm.dtype,
    _ATEN.baddbmm.dtype_out: _ATEN.bmm.dtype,
}
_CTC = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)
_CTC_BACKWARD = (
    torch.ops.aten._ctc_loss_backward.default,
    torch.ops.aten._ctc_loss_backward.Tensor,
)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Answers for grouped products: torch 2.11 knows their shapes for bfloat16 alone."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim() == 3:
        shape.insert(0, a.shape[0])
    elif a.dim() == b.dim() == 2:
        assert ends is not None
        shape.insert(0, ends.shape[0])
    return a.new_empty(shape)


def _ctc(scores: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers for CTC, which looks at lengths: as if every target had the full length."""
    times, rows = scores.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // rows)
    return scores.new_empty(rows), scores.new_empty(rows, times, 2 * longest + 1)
