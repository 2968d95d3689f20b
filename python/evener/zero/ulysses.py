"""A sequence over several ranks: each has S/P of its tokens, and attention swaps tokens for heads
(Ulysses, arXiv 2309.14509). For causal language models of transformers, through its registries of
attention functions and masks.

All ranks of a group are called with the same batch, and each takes its part of it here. Embedding,
MLPs, norms, logits and loss are then of its part alone. Before attention an all-to-all brings all
tokens of H/P heads to each rank, and one after it brings the heads back. Where heads of keys and
values are fewer than ranks, each goes to several. An all-to-all's gradient is the same one back.

# What makes it right
Labels are shifted before they are cut, so that the last token of a part predicts the first of the
next. A rank's loss is the sum over its labels, divided by 1/P of the labels of the whole: the
engine's mean over ranks is then the mean over all labels, wherever the ignored ones are. Masks are
made for the whole sequence: from its padding, its packed documents, and a layer's window.

What mixes tokens in other ways would be wrong and look right. So each layer must call attention
once, and a model whose layers have a state, or whose positions depend on the length, is refused.

While a step is traced, the tensors are fake and nothing is sent: memory is that of a rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from evener.errors import UsageError
from evener.zero.ranks import group_of, layout, taken, world_size

NAME = "evener_sequence"
"""Our name in transformers' registries of attention functions and masks."""

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids", "num_items_in_batch")
"""What a call may hold beside flags."""

_IGNORED = -100
_LAYERS = {"full_attention", "sliding_attention"}
_BY_LENGTH = {"dynamic", "longrope"}
_FIX = "train it without evener.sequence"

_splits: dict[int, Split] = {}
"""By the `id` of each config of the split models."""


def refuse_ranks(size: int, world: int = 0) -> None:
    """Raise UsageError where `world` ranks are not groups of `size`. Without `world`: where those
    of the default process group are not, each on one node; collective."""
    here, world = not world, world or world_size()
    if world % size:
        raise UsageError(
            f"evener.sequence = {size}: groups of {size} cannot be made of {world} ranks",
            f"start a multiple of {size}, or give another evener.sequence",
        )
    if not here or size == 1:
        return
    home = {rank: place for place, ranks in enumerate(layout().nodes) for rank in ranks}
    for first in range(0, world_size(), size):
        if len({home[rank] for rank in range(first, first + size)}) > 1:
            raise UsageError(
                f"evener.sequence = {size}: ranks {first} to {first + size - 1} are on several "
                "nodes, and each layer swaps activations between them",
                "give a number that divides the ranks of each node",
            )


class _Swap(torch.autograd.Function):
    """`x` [P, ...]: row n goes to rank n of the group, and its row comes into the place of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        if not isinstance(x, FakeTensor):
            dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _swap(gradient.contiguous(), ctx.group), None


def _swap(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    out: torch.Tensor = _Swap.apply(x, group)
    return out


@dataclass
class _Call:
    """A forward pass of the part. items: by what the sum of its losses is divided."""

    labels: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    items: torch.Tensor | float
    tokens: int
    losses: int = 0
    masks: int = 0
    layers: int = 0


class Split:
    """Splits what `model` is called with over `size` ranks until `close`. Raises UsageError for a
    model that cannot be split."""

    def __init__(self, model: nn.Module, size: int) -> None:
        inner: Any = getattr(model, "get_base_model", None)  # of a model of peft
        base: Any = inner() if callable(inner) else model
        self.size, self.place = size, 0
        self.whole = False
        """Whether each rank runs the whole sequence now."""
        self._group: dist.ProcessGroup | None = None
        self._device: torch.device | None = None
        self._model, self._base = model, base
        self._layers = _able(base, size)
        self._call: _Call | None = None
        self._inner = model.forward
        self._names = list(inspect.signature(self._inner).parameters)
        self._loss_of = base.loss_function
        self._set = "_loss_function" in vars(base)
        self._configs = {id(m.config) for m in base.modules() if hasattr(m, "config")}
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)
        _splits.update(dict.fromkeys(self._configs, self))
        base.set_attn_implementation(NAME)
        base.loss_function = self._loss

        @functools.wraps(self._inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward({**dict(zip(self._names, args, strict=False)), **kwargs})

        model.forward = forward

    def close(self) -> None:
        """The model as it was."""
        self._model.forward = self._inner
        self._base.set_attn_implementation("sdpa")
        self._base.loss_function = self._loss_of
        if not self._set:
            del self._base._loss_function
        for each in self._configs:
            _splits.pop(each, None)

    def join(self, device: torch.device) -> int:
        """Connect with the other ranks of the group; bytes that this takes of the GPU. Collective:
        after `refuse_ranks`."""
        before, rank, self._device = taken(device), dist.get_rank(), device
        for first in range(0, world_size(), self.size):
            members = list(range(first, first + self.size))
            group = group_of(device, "sequence", members)
            if rank in members:
                self._group, self.place = group, rank - first
        if device.type != "cuda":
            return 0
        x = torch.zeros(self.size, 1 << 20, device=device)
        _swap(x, self._group)
        self._gathered(x[0, :1])
        torch.cuda.synchronize(device)
        del x
        return max(0, taken(device) - before)

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """[P, n] of every rank's `mine` [n]."""
        every = mine.new_empty(self.size, mine.numel())
        dist.all_gather_into_tensor(every.view(-1), mine, group=self._group)
        return every

    # --- A call -----------------------------------------------------------------------------------

    def _forward(self, given: dict[str, Any]) -> Any:
        if given.get("labels") is None and not torch.is_grad_enabled():
            self.whole = True
            try:
                return self._inner(**given)
            finally:
                self.whole = False
        why = self._refused(given)
        tokens = given.get("input_ids")
        if not isinstance(tokens, FakeTensor):
            self._agree(given, why)
        if why:
            raise UsageError(*why)
        assert isinstance(tokens, torch.Tensor)
        part, call = self._cut(given, tokens)
        self._call = call
        try:
            out = self._inner(**part)
        finally:
            self._call = None
        if (call.losses, call.layers) != (1, self._layers) or not call.masks:
            raise UsageError(
                f"evener.sequence = {self.size}: {type(self._base).__name__} called attention "
                f"{call.layers} times in {self._layers} layers, made {call.masks} masks and "
                f"{call.losses} losses: it does not go through transformers' interfaces",
                _FIX,
            )
        return out

    def _refused(self, given: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why a call cannot be split, and what to do."""
        here = f"evener.sequence = {self.size}: "
        tokens, labels = given.get("input_ids"), given.get("labels")
        for name, value in given.items():
            if name not in INPUTS and not isinstance(value, bool | str | None):
                return f"{here}{name} is not known to be split", f"give {', '.join(INPUTS)} alone"
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            return f"{here}the model was called without input_ids [rows, tokens]", "give them"
        if labels is None:
            return f"{here}the model was called without labels", (
                "give labels: a loss that is computed outside of the model would have the part of "
                "one rank"
            )
        if tokens.shape[1] % self.size:
            return f"{here}{tokens.shape[1]} tokens are not {self.size} equal parts", (
                f"pad sequences to a multiple of {self.size} (labels -100)"
            )
        for name in ("labels", "attention_mask", "position_ids"):
            value = given.get(name)
            shapes = [tuple(tokens.shape), (1, tokens.shape[1])][: 2 if "ids" in name else 1]
            if value is not None and tuple(value.shape) not in shapes:
                return f"{here}{name} {list(value.shape)} are not those of the tokens", (
                    f"give {list(tokens.shape)}"
                )
        return None

    def _agree(self, given: Mapping[str, Any], why: Any) -> None:
        """Raise where the ranks of the group got different batches."""
        device = self._device
        sums = [] if why else [_sum(given.get(name), device) for name in INPUTS]
        mine = torch.stack(sums) if sums else torch.full((len(INPUTS),), -1, device=device)
        if not bool((self._gathered(mine) == mine).all()) and not why:
            first = dist.get_rank() - self.place
            raise UsageError(
                f"evener.sequence = {self.size}: ranks {first} to {first + self.size - 1} share a "
                "sequence, and got different batches",
                "give them the same: DistributedSampler(data, num_replicas=world // "
                f"{self.size}, rank=rank // {self.size})",
            )

    def _cut(self, given: dict[str, Any], tokens: torch.Tensor) -> tuple[dict[str, Any], _Call]:
        rows, length = tokens.shape
        each = length // self.size
        at = slice(self.place * each, (self.place + 1) * each)
        labels = functional.pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]
        items = given.get("num_items_in_batch")
        items = (labels != _IGNORED).sum() if items is None else items
        positions = given.get("position_ids")
        if positions is None:
            where = torch.arange(length, device=tokens.device)[None].expand(rows, -1)
        else:
            where = positions = positions.expand(rows, -1)
        part = {name: value for name, value in given.items() if name not in INPUTS}
        part |= {
            "input_ids": tokens[:, at].contiguous(),
            "labels": labels[:, at].contiguous(),
            "position_ids": where[:, at].contiguous(),
            # With a mask, the part's positions are not looked at for packed documents.
            "attention_mask": torch.ones_like(tokens[:, at]),
        }
        mask = given.get("attention_mask")
        return part, _Call(
            part["labels"],
            None if mask is None else mask.bool(),
            positions,
            items / self.size,
            each,
        )

    # --- What the model calls ---------------------------------------------------------------------

    def _loss(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        call = self._call
        if call is None:
            out: torch.Tensor = self._loss_of(logits, labels, vocab_size, **kwargs)
            return out
        call.losses += 1
        mine: torch.Tensor = self._loss_of(
            logits,
            labels,
            vocab_size,
            **{**kwargs, "shift_labels": call.labels, "num_items_in_batch": call.items},
        )
        if isinstance(mine, FakeTensor):
            return mine
        whole = self._gathered(mine.detach().reshape(1)).mean()
        return mine + (whole - mine.detach())

    def mask(self, given: dict[str, Any]) -> torch.Tensor | None:
        """The whole sequence's mask, from what transformers asks for the part's."""
        from transformers import masking_utils as masks

        if self.whole:
            found: torch.Tensor | None = masks.sdpa_mask(**given)
            return found
        if (call := self._call) is None:
            raise UsageError(
                f"evener.sequence = {self.size}: a part of the model was called by itself",
                "call the engine, which knows the sequence",
            )
        call.masks += 1
        if given.get("use_vmap") or not given["q_length"] == given["kv_length"] == call.tokens:
            raise UsageError(
                f"evener.sequence = {self.size}: {type(self._base).__name__} has a mask of its own "
                f"({given['q_length']} x {given['kv_length']} for {call.tokens} tokens)",
                _FIX,
            )
        given["q_length"] = given["kv_length"] = call.tokens * self.size
        if call.mask is None and call.positions is not None:
            documents = masks.find_packed_sequence_indices(call.positions)
            if documents is not None:
                own = masks.remap_positions_for_packed_sequence(
                    given["mask_function"], call.positions
                )
                given["mask_function"] = masks.and_masks(
                    own, masks.packed_sequence_mask_function(documents)
                )
                given["allow_is_causal_skip"] = False
        whole: torch.Tensor | None = masks.sdpa_mask(**{**given, "attention_mask": call.mask})
        return whole

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """query [rows, heads, tokens, width] of the part; the result has tokens before heads."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if kwargs.get("position_bias") is not None:
            raise UsageError(
                f"evener.sequence = {self.size}: a bias by position is not split", _FIX
            )
        if self._call is not None:
            self._call.layers += 1
        size, heads, pairs = self.size, query.shape[1], key.shape[1]
        if pairs % size:
            times = size // pairs if size % pairs == 0 else heads // pairs
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        query, key, value = (self._heads(x) for x in (query, key, value))
        like = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1],
            is_causal=getattr(module, "is_causal", True),
        )
        out, _ = sdpa_attention_forward(like, query, key, value, mask, **kwargs)
        return self._tokens(out), None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of some heads, from [rows, heads, tokens, width]."""
        parts = x.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        return _swap(parts, self._group).movedim(0, 2).flatten(2, 3)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All heads of some tokens, from [rows, tokens, heads, width]."""
        parts = x.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        return _swap(parts, self._group).movedim(0, 2).flatten(2, 3)


def _of(config: Any) -> Split:
    if id(config) not in _splits:
        raise UsageError(
            "this model's sequence was split, and it is a copy of one",
            'model.set_attn_implementation("sdpa")',
        )
    return _splits[id(config)]


@_disable_dynamo
def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    split = _of(module.config)
    if split.whole:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return split.attention(module, query, key, value, attention_mask, kwargs)


def _mask(**given: Any) -> torch.Tensor | None:
    return _of(given["config"]).mask(given)


def _sum(value: Any, device: torch.device | None) -> torch.Tensor:
    """A checksum, int64, that depends on the order and on the shape."""
    if value is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    flat = torch.as_tensor(value, device=device).to(torch.int64)
    sizes = sum(31**place * size for place, size in enumerate(flat.shape, 1))
    at = torch.arange(1, flat.numel() + 1, device=device) * 0x9E3779B97F4A7C1
    found: torch.Tensor = ((flat.reshape(-1) + 7) * at).sum() + sizes
    return found


def _nested(config: Any, name: str) -> Iterator[Any]:
    """Every value under this name, at any depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == name:
                yield value
            yield from _nested(value, name)


def _able(base: Any, size: int) -> int:
    """The layers of a model that can be split. Raises UsageError for others."""

    def refuse(why: str, fix: str = _FIX) -> None:
        raise UsageError(f"evener.sequence = {size}: {type(base).__name__} {why}", fix)

    settable: Callable[[], bool] | None = getattr(base, "_can_set_attn_implementation", None)
    if settable is None or not settable():
        refuse("is no model of transformers whose attention can be chosen")
    from transformers import __version__, masking_utils

    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        refuse(f"is of transformers {__version__}: masks are known of 5.24", "upgrade transformers")
    config = base.config.get_text_config()
    kind = base.config._attn_implementation
    if kind != "sdpa":
        refuse(f"has attention {kind!r}", 'load it with attn_implementation="sdpa"')
    if "shift_labels" not in inspect.signature(base.loss_function).parameters:
        refuse("has another loss than that of the next token")
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        refuse("takes no position_ids")
    if any("position" in n and getattr(m, "padding_idx", None) is not None
           for n, m in base.named_modules()):  # fmt: skip
        refuse("has positions that depend on the padding")
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        refuse("is not causal")
    types = {*(getattr(config, "layer_types", None) or ())} - _LAYERS
    if types or getattr(base, "_is_stateful", False):
        refuse(f"has layers that are no attention ({', '.join(sorted(types)) or 'a state'})")
    if getattr(config, "output_router_logits", False):
        refuse("has a loss of its router, no mean over tokens", "set output_router_logits=False")
    if ropes := _BY_LENGTH & {*_nested(config.to_dict(), "rope_type")}:
        refuse(f"has positions that depend on the length (rope_type {', '.join(ropes)})")
    heads = config.num_attention_heads
    if heads % size:
        refuse(f"has {heads} heads, not {size} equal parts", "give a divisor of the heads")
    layers: int = config.num_hidden_layers
    return layers
