"""A plan's input from a model (best on the meta device) or from a configuration of a
Llama-shaped model, and an estimate of its activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero.host import pages
from evener.zero.loss import SLAB
from evener.zero.planner import HELD, Part
from evener.zero.rules import Rule
from evener.zero.units import Unit


def parts_of(
    units: list[Unit],
    scratch: Callable[[Rule], int] = lambda _: 0,
    halves: Callable[[Rule], tuple[int, int]] = lambda _: (0, 0),
) -> list[Part]:
    """One part a chunk. `scratch`, `halves`: bytes of a rule's update per element, see `Part`."""
    return [
        Part(
            group.name,
            group.numel,
            group.trainable,
            stays=unit.module is None and not group.kept,
            kept=group.kept,
            unit=number,
            align=group.align,
            vectors=sum(p.numel for p in group.pieces if len(p.shape) <= 1),
            moments=len(group.rule.moments),
            scratch=scratch(group.rule) if group.trainable else 0,
            matrices=group.matrices,
            halves=halves(group.rule) if group.matrices else (0, 0),
        )
        for number, unit in enumerate(units)
        for group in unit.groups
    ]


def widths(units: list[Unit]) -> tuple[int, int, int]:
    """(hidden width, widest output of a repeated unit's layers summed, vocabulary) from shapes."""
    inner = [p.shape for u in units if u.repeated for g in u.groups for p in g.pieces]
    outer = [p.shape for u in units if not u.repeated for g in u.groups for p in g.pieces]
    matrices = [shape for shape in inner or outer if len(shape) == 2]
    if not matrices:
        return 0, 0, 0
    hidden = Counter(min(shape) for shape in matrices).most_common(1)[0][0]
    blocks = max(1, sum(u.repeated for u in units))
    spread = sum(shape[0] for shape in matrices) // blocks
    vocabulary = max((shape[0] for shape in outer if len(shape) == 2), default=0)
    return hidden, spread, vocabulary


def activations(
    units: list[Unit], tokens: int, dtype: torch.dtype, checkpointing: str, chunked: bool = False
) -> tuple[int, int]:
    """Bytes of activations at their peak (on the accelerator, on the host), an estimate: each
    layer's outputs twice (once more for what pointwise operations save), and the logits with their
    float32 copies and gradients for the loss, or with `loss.cross_entropy` (`chunked`) their
    gradient and one slab. checkpointing: "none"; "recompute": of a block its input, and one block's
    in full with the temporaries of its backward pass; "offload": inputs wait on the host."""
    hidden, spread, vocabulary = widths(units)
    blocks = sum(u.repeated for u in units)
    one = tokens * (2 * spread + 4 * hidden) * dtype.itemsize
    inputs = tokens * hidden * dtype.itemsize
    if chunked:
        logits = 2 * tokens * vocabulary * dtype.itemsize + 3 * min(tokens, SLAB) * vocabulary * 4
    else:
        logits = tokens * vocabulary * (2 * dtype.itemsize + 12)
    if checkpointing == "none":
        return blocks * one + logits, 0
    once = max(14 * one // 10, logits)
    if checkpointing == "offload":
        return min(blocks, HELD) * inputs + once, blocks * pages(inputs, 1)
    return blocks * inputs + once, 0


class Llama(nn.Module):
    """The shapes of a Llama (no forward pass): what a plan needs of a configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` with the keys of Hugging Face's config.json."""
        super().__init__()
        try:
            width = int(config["hidden_size"])
            layers = int(config["num_hidden_layers"])
            vocabulary = int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the model's configuration lacks {error}",
                "give hidden_size, num_hidden_layers and vocab_size, as Hugging Face's config.json",
            ) from None
        inner = int(config.get("intermediate_size") or 4 * width)
        heads = int(config.get("num_attention_heads") or max(1, width // 128))
        each = int(config.get("head_dim") or width // heads)
        keys = int(config.get("num_key_value_heads") or heads) * each
        queries = heads * each

        def holder(*shapes: tuple[int, ...]) -> nn.Module:
            # Not nn.Linear: initialising even on the meta device takes seconds.
            module = nn.Module()
            for number, shape in enumerate(shapes):
                value = torch.empty(shape, device="meta")
                module.register_parameter(f"weight{number}", nn.Parameter(value))
            return module

        attention = [(queries, width), (keys, width), (keys, width), (width, queries)]
        mlp = [(inner, width), (inner, width), (width, inner)]
        self.embed = holder((vocabulary, width))
        self.layers = nn.ModuleList(
            holder(*attention, *mlp, (width,), (width,)) for _ in range(layers)
        )
        self.norm = holder((width,))
        self.head = holder((vocabulary, width))
        if config.get("tie_word_embeddings"):
            self.head.weight0 = self.embed.weight0


def llama(config: Mapping[str, Any]) -> nn.Module:
    """The shapes on the meta device: no memory."""
    return Llama(config)
