"""Sequences split over ranks (`evener.sequence`) against plain torch with the whole sequence, over
Gloo: tiny models of transformers, which this twin needs.

A group of ranks shares each batch; other groups have batches of their own. The plain model, on
every rank, trains on all of them. Losses, the norm of the gradients and weights agree to the
rounding of sums. With bfloat16, losses agree to `HALF`, and all weights together are off by a tenth
of the way that they have gone at most.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero import ulysses
from evener.zero.ulysses import Split
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin

WORDS, WIDTH = 40, 8
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True}
HALF: dict[str, Any] = {"rtol": 3e-2, "atol": 3e-3, "equal_nan": True}
WAY = 0.1
MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
WINDOW = 3


def _model(program: Program) -> Any:
    import transformers

    heads, layers = program["heads"], program["layers"]
    if program["kind"] == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=heads * WIDTH, n_layer=layers, n_head=heads, n_positions=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    given: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": heads * WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // program["share"],
        "head_dim": WIDTH,
        "attn_implementation": "sdpa",
    }
    if program["kind"] == "Mistral":
        given["sliding_window"] = WINDOW
    if program["kind"] == "Gemma3":
        given |= {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]
                  * layers, "num_hidden_layers": 2 * layers}  # fmt: skip
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**given))
    kind = program["kind"]
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**given)
    )


def _batch(program: Program, seed: int, group: int, micro: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1000 * seed + 10 * micro + group)
    rows, length = program["rows"], program["length"]
    tokens = torch.randint(0, WORDS, (rows, length), generator=made)
    labels = tokens.clone()
    labels[torch.rand(rows, length, generator=made) < program["ignored"]] = -100
    labels[0, 1 + micro] = 3  # a label at least
    found: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if program["form"] == "padded":
        here = torch.ones(rows, length, dtype=torch.int64)
        here[0, -length // 3 :] = 0
        found |= {"attention_mask": here, "labels": labels.masked_fill(here == 0, -100)}
        found["labels"][0, 1] = 3
    if program["form"] == "packed":
        cut = int(torch.randint(1, length, (1,), generator=made))
        found["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(
            rows, -1
        )
    if program["items"]:
        found["num_items_in_batch"] = torch.tensor(7)
    return found


class Pair:
    """One rank's engine, and the plain model with float32 masters."""

    def __init__(self, program: Program, rank: int, size: int) -> None:
        self.program, self.group = program, rank // program["sequence"]
        self.groups, self.rank = size // program["sequence"], rank
        self.dtype = torch.bfloat16 if program["half"] else torch.float32
        torch.manual_seed(program["seed"])
        self.plain = _model(program).to(self.dtype).train()
        # With a cache, as the engine has none in training, transformers looks for no documents.
        self.plain.config.use_cache = False
        self.close = HALF if program["half"] else CLOSE
        model = copy.deepcopy(self.plain)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.plain.parameters()]
        self.begun = [p.detach().clone() for p in self.masters]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.3, momentum=0.5)
        self.engine, *_ = zero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
            config={
                "gradient_accumulation_steps": program["accumulate"],
                "gradient_clipping": program["clip"],
                "bf16": {"enabled": program["half"]},
                "zero_optimization": {
                    "stage": program["stage"],
                    "stage3_param_persistence_threshold": 0,
                },
                "evener": {
                    "device": "cpu",
                    "sequence": program["sequence"],
                    "loss": program["loss"],
                    "checkpointing": program["recompute"],
                },
            },
            machine=MACHINE,
            **(
                {"resident": set()}
                if not program["planned"]
                else {"example": _batch(program, 0, 0, 0)}
            ),
        )
        self.engine.threads = 1

    def end(self) -> None:
        self.engine.close()
        for group in (self.engine.ranks.weights, self.engine.ranks.gradients):
            dist.destroy_process_group(group)

    def train(self, seed: int) -> None:
        program = self.program
        for micro in range(program["accumulate"]):
            losses = []
            for group in range(self.groups):
                losses.append(self.plain(**_batch(program, seed, group, micro)).loss)
            mine = self.engine(**_batch(program, seed, self.group, micro)).loss
            torch.testing.assert_close(mine.detach(), losses[self.group].detach(), **self.close)
            self.engine.backward(mine)
            self.engine.step()
            (torch.stack(losses).mean() / program["accumulate"]).backward()
            for master, p in zip(self.masters, self.plain.parameters(), strict=True):
                assert p.grad is not None
                wide = p.grad.float()
                master.grad = wide if master.grad is None else master.grad + wide
                p.grad = None
        if program["clip"]:
            norm = float(nn.utils.clip_grad_norm_(self.masters, program["clip"]))
            assert abs(self.engine.get_global_grad_norm() - norm) <= 10 * self.close["rtol"] * norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, p in zip(self.masters, self.plain.parameters(), strict=True):
            p.data.copy_(master.data)

    def do_train(self, seed: int) -> None:
        self.train(seed)

    def do_evaluate(self, seed: int) -> None:
        """With labels the sequence is split; without, each rank has all of it."""
        given = _batch(self.program, seed, self.group, 0)
        with torch.no_grad():
            wanted = self.plain(**given)
            found = self.engine(**given).loss
            torch.testing.assert_close(found, wanted.loss, **self.close)
            given = {n: x for n, x in given.items() if n not in ("labels", "num_items_in_batch")}
            torch.testing.assert_close(self.engine(**given).logits, wanted.logits, **self.close)

    def do_differ(self, seed: int) -> None:
        """The ranks of a group get different batches: all are told."""
        given = _batch(self.program, seed, self.group, 0)
        if self.rank % self.program["sequence"]:
            given["input_ids"] = given["input_ids"].roll(1, 1)
            given["input_ids"][0, 0] = (given["input_ids"][0, 0] + 1) % WORDS
        try:
            self.engine(**given)
        except UsageError as error:
            assert "different batches" in str(error)
        else:
            raise AssertionError("different batches, and nothing was said")

    def compare(self) -> None:
        self.engine.drain()
        names = [name for name, _ in self.plain.named_parameters()]
        wanted = dict(zip(names, self.masters, strict=True))
        begun = dict(zip(names, self.begun, strict=True))
        off, way = torch.zeros(2)
        for chunk in self.engine.chunks():
            mine = chunk.states.full()
            whole = torch.empty(mine.numel() * self.engine.world)
            dist.all_gather_into_tensor(whole, mine.float())
            for piece in chunk.group.pieces:
                found = whole[piece.offset : piece.offset + piece.numel].view(piece.shape)
                right = wanted[piece.name].detach()
                off += (found - right).square().sum()
                way += (right - begun[piece.name]).square().sum()
                if not self.program["half"]:
                    torch.testing.assert_close(found, right, **self.close)
        assert off.sqrt() <= WAY * way.sqrt(), (
            f"weights are {(off / way).sqrt():.2f} of the way off"
        )


def run(rank: int, size: int, program: Program, fault: str) -> None:
    """One rank; raises where something differs."""
    logging.getLogger("evener").setLevel(logging.ERROR)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        pair = Pair(program, rank, size)
        try:
            for kind, seed in program["steps"]:
                getattr(pair, f"do_{kind}")(seed)
            pair.train(1)
            pair.compare()
        finally:
            pair.end()


# --- Faults ---------------------------------------------------------------------------------------


def _put(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


_cut, _tokens, _mask = Split._cut, Split._tokens, Split.mask


def _shifted_alone(self: Split, given: Any, tokens: torch.Tensor) -> Any:
    part, call = _cut(self, given, tokens)
    call.labels[:, -1] = -100
    return part, call


def _means(self: Split, given: Any, tokens: torch.Tensor) -> Any:
    part, call = _cut(self, given, tokens)
    call.items = (call.labels != -100).sum()
    return part, call


def _restart(self: Split, given: Any, tokens: torch.Tensor) -> Any:
    part, call = _cut(self, given, tokens)
    part["position_ids"] = part["position_ids"] - part["position_ids"][:, :1]
    return part, call


def _without_mask(self: Split, given: dict[str, Any]) -> Any:
    _mask(self, dict(given))


FAULTS: dict[str, Callable[[], Any]] = {
    "labels are shifted inside of a part": _put(Split, "_cut", _shifted_alone),
    "a mean of means": _put(Split, "_cut", _means),
    "positions begin anew": _put(Split, "_cut", _restart),
    "heads come back in another order": _put(
        Split, "_tokens", lambda self, x: _tokens(self, x.flip(2))
    ),
    "windows, padding and documents are not looked at": _put(Split, "mask", _without_mask),
    "gradients stay where they are": _put(
        ulysses._Swap, "backward", staticmethod(lambda _, gradient: (gradient, None))
    ),
    "batches are not compared": _put(Split, "_agree", lambda *_: None),
}
_switch = Switch()
_world = functools.cache(lambda size: Ranks(size, timeout=120))


def check(program: Program) -> None:
    """Run it on all ranks."""
    _world(program["ranks"]).run("tests.twins.zero_sequence:run", program, _switch.fault)


def _whole(program: Program) -> Program:
    """With heads and tokens that the ranks of a group share evenly."""
    size = min(program["sequence"], program["ranks"])
    heads = max(size, program["heads"])
    length = -(-program["length"] // size) * size
    share = program["share"] if heads % program["share"] == 0 else 1
    return {**program, "sequence": size, "heads": heads, "length": length, "share": share}


PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 100),
        "kind": st.sampled_from(["Llama", "Qwen3", "GPT2", "Mistral", "Gemma3"]),
        "ranks": st.sampled_from([2, 2, 2, 4]),
        "sequence": st.sampled_from([2, 2, 4]),
        "heads": st.sampled_from([2, 4, 8]),
        "share": st.sampled_from([1, 2, 4, 8]),
        "layers": st.integers(1, 2),
        "rows": st.integers(1, 3),
        "length": st.integers(6, 20),
        "ignored": st.sampled_from([0.0, 0.5, 0.9]),
        "form": st.sampled_from(["plain", "plain", "padded", "packed"]),
        "items": st.booleans(),
        "half": st.sampled_from([False, False, True]),
        "stage": st.integers(1, 3),
        "loss": st.sampled_from(["auto", "plain"]),
        "accumulate": st.integers(1, 2),
        "clip": st.sampled_from([0.0, 0.5]),
        "recompute": st.booleans(),
        "planned": st.sampled_from([False, False, True]),
        "steps": st.lists(
            st.tuples(st.sampled_from(["train", "train", "evaluate", "differ"]), st.integers(0, 100)
                      ).map(list),
            max_size=2,
        ),
    }
).map(_whole)  # fmt: skip
TWIN = Twin(
    name="zero_sequence",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=10,
    needs=("transformers",),
)
