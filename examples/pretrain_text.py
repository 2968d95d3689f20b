"""Pre-train a small BERT (masked words) or T5 (span corruption) on text that is on this machine.

    python examples/pretrain_text.py --objective masked           a minute on a CPU
    python examples/pretrain_text.py --objective spans
    python examples/pretrain_text.py --objective spans --size 3b --gpu 24GB --host 110GB
    python examples/pretrain_text.py --objective masked --folder run1   run it again to resume
    python examples/pretrain_text.py --objective masked --plain   the same in a plain torch loop

Bytes are the tokens, so nothing is downloaded. `pretrain_gpt.py` is the same for a GPT. Masked: 15%
of the bytes are hidden and guessed (BERT, arXiv 1810.04805). Spans: runs of 3 bytes are cut out of
the encoder's text, a sentinel in the place of each, and the decoder writes sentinels and runs (T5,
arXiv 1910.10683). A batch depends on its step alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evener import zero

SIZES = {"tiny": (3, 128, 4), "1b": (22, 2048, 16), "3b": (28, 3072, 24)}
LENGTH = {"tiny": 96, "1b": 512, "3b": 512}
MASK, FIRST_SENTINEL, SENTINELS = 256, 257, 64
WORDS = 384
"""Bytes, the mask, sentinels, and a few that are never used: a multiple of 128."""
SHARE, SPAN, IGNORED = 0.15, 3, -100


class Block(nn.Module):
    """A pre-norm transformer block; a decoder's looks at the encoder's output too."""

    def __init__(self, width: int, heads: int, decoder: bool = False) -> None:
        super().__init__()
        self.heads, self.decoder = heads, decoder
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if decoder:
            self.norm3 = nn.LayerNorm(width)
            self.query, self.cross = nn.Linear(width, width), nn.Linear(width, width)
            self.key_value = nn.Linear(width, 2 * width)

    def _attend(self, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return a.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(self._attend(q, k, v, self.decoder))
        if memory is not None:
            k, v = self.key_value(memory).chunk(2, dim=-1)
            x = x + self.cross(self._attend(self.query(self.norm3(x)), k, v, False))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Bert(nn.Module):
    """Tokens in, logits of the bytes that are there."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class T5(nn.Module):
    """An encoder's tokens and a decoder's in, logits of the decoder's next token out."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, heads, decoder=True) for _ in range(layers))
        self.norm, self.end = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        places = torch.arange(max(tokens.shape[1], before.shape[1]), device=tokens.device)
        x = self.embed(tokens) + self.place(places[: tokens.shape[1]])
        for layer in self.encoder:
            x = layer(x)
        memory = self.norm(x)
        y = self.embed(before) + self.place(places[: before.shape[1]])
        for layer in self.decoder:
            y = layer(y, memory)
        out: torch.Tensor = self.head(self.end(y))
        return out


MODELS = {"masked": Bert, "spans": T5}


def text() -> torch.Tensor:
    """The documentation of Python's topics: about a million bytes."""
    from pydoc_data import topics

    return torch.frombuffer(
        bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8
    )


def masked(rows: torch.Tensor, generator: torch.Generator) -> tuple[list[torch.Tensor], Any]:
    """BERT's inputs and labels: of the bytes that are guessed 8 in 10 are hidden, 1 in 10 is
    another byte, 1 in 10 stays."""
    chance = torch.rand(rows.shape, generator=generator)
    kind = torch.rand(rows.shape, generator=generator)
    labels = torch.where(chance < SHARE, rows, IGNORED)
    given = torch.where((chance < SHARE) & (kind < 0.8), MASK, rows)
    other = torch.randint(0, 256, rows.shape, generator=generator)
    return [torch.where((chance < SHARE) & (kind >= 0.9), other, given)], labels


def spans(rows: torch.Tensor, generator: torch.Generator) -> tuple[list[torch.Tensor], Any]:
    """T5's inputs (encoder, decoder) and labels. Every row has the same number of runs, so that
    rows have one length."""
    length = rows.shape[1]
    count = max(1, min(SENTINELS, int(length * SHARE / SPAN)))
    gap = length // count
    inputs, targets = [], []
    for row in rows:
        shifts = torch.randint(0, gap - SPAN, (count,), generator=generator).tolist()
        left, out, end = [], [], 0
        for number, shift in enumerate(shifts):
            begin, sentinel = number * gap + shift, torch.tensor([FIRST_SENTINEL + number])
            left += [row[end:begin], sentinel]
            end = begin + SPAN
            out += [sentinel, row[begin:end]]
        inputs.append(torch.cat([*left, row[end:]]))
        targets.append(torch.cat(out))
    labels = torch.stack(targets)
    before = functional.pad(labels[:, :-1], (1, 0), value=MASK)  # the mask begins the decoder
    return [torch.stack(inputs), before], labels


OBJECTIVES = {"masked": masked, "spans": spans}


def batch(
    data: torch.Tensor, objective: str, step: int, rows: int, length: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The batch of a step: the same in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - length, (rows,), generator=generator)
    read = torch.stack([data[s : s + length] for s in starts.tolist()]).long()
    return OBJECTIVES[objective](read, generator)


def initial(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's first value, the same in every run."""
    if name.endswith("bias"):
        return torch.zeros(parameter.shape)
    if "norm" in name or name.startswith("end"):
        return torch.ones(parameter.shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(sum(name.encode()))
    return torch.randn(parameter.shape, device=device, generator=generator).mul_(0.02)


class Plain:
    """The same three calls in a plain torch loop, to compare with."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model = model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(initial(name, parameter))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(*inputs)
        return out

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--objective", choices=sorted(OBJECTIVES), required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--gpu", default="auto", help="GPU budget, as 24GB")
    parser.add_argument("--host", default="auto", help="host budget, as 110GB")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="checkpoints are written and looked for there")
    parser.add_argument("--plain", action="store_true", help="a plain torch loop, on the CPU")
    arguments = parser.parse_args()
    objective, length = arguments.objective, LENGTH[arguments.size]
    large = arguments.size != "tiny"
    rate = 3e-4 if large else 1e-3
    with torch.device("meta"):
        model = MODELS[objective](*SIZES[arguments.size], length)
    data, first = text(), 0
    engine: Any
    if arguments.plain:
        engine = Plain(model, rate)
    else:
        limits = {k: v for k in ("gpu", "host") if (v := getattr(arguments, k)) != "auto"}
        inputs, _ = batch(data, objective, 0, arguments.rows, length)
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": torch.cuda.is_available()},
            "evener": {"budget": limits or "auto", "checkpointing": "auto" if large else False},
        }  # fmt: skip
        engine, *_ = zero.initialize(model=model, config=config, example=inputs, weights=initial)
        if arguments.folder and zero.checkpoint.find(arguments.folder):
            first = zero.load_checkpoint(engine, arguments.folder)["step"]
            print(f"resumed at step {first}")
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, {objective}")
    tokens, start = 0, time.perf_counter()
    for step in range(first, arguments.steps):
        inputs, labels = batch(data, objective, step, arguments.rows, length)
        logits = engine(*inputs)
        wanted = labels.flatten().to(logits.device)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted, ignore_index=IGNORED)
        engine.backward(loss)
        engine.step()
        tokens += sum(x.numel() for x in inputs)
        last = step + 1 == arguments.steps
        if (step + 1) % 10 == 0 or last:
            speed = tokens / (time.perf_counter() - start)
            print(
                f"step {step + 1:5}/{arguments.steps}  loss {loss.item():.4f}  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )
        if arguments.folder and not arguments.plain and ((step + 1) % arguments.every == 0 or last):
            zero.begin_checkpoint(engine, arguments.folder, extra={"step": step + 1})
    if arguments.plain:
        return
    if arguments.folder and isinstance(engine.saving, zero.Save):
        print(f"checkpoint {engine.saving.result()}")
    engine.close()


if __name__ == "__main__":
    main()
