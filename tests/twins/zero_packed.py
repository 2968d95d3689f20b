"""The memory engine with frozen weights in 4 bits (QLoRA) against plain peft and bitsandbytes: on
one rank, or with "stage" in a program on two, which share the bytes.

What the last block gives is compared bit for bit in every pass, and bytes and scales after every
save, load and move: a weight that is read wrongly shows. Losses and gradients agree to the rounding
of sums. From the engine's gradients the plain optimizer makes the same weights (`SAME`); then the
plain model takes the engine's, so that the next pass can be compared bit for bit too.

`pip install bitsandbytes peft`: without them the twin is skipped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from evener import zero
from evener.errors import EvenerError
from evener.zero import packed
from evener.zero.loading import Loading
from tests.twins import zero as one
from tests.twins import zero_half as half
from tests.twins import zero_ranks as several
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin, often

torch.set_num_threads(1)  # small products; threads would wait for each other
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""Losses and gradients in float32: sums are made in another order."""
SAME: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
PREFIX = "base_model.model."
LINEAR = ("up", "down", "side")
KINDS = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _recorded(kind: type[one.Net]) -> type[one.Net]:
    """A net that keeps what its last block gave, of each pass since it was last asked."""

    class Recorded(kind):  # type: ignore[misc,valid-type]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.seen: list[torch.Tensor] = []

        def body(self, *given: Any) -> torch.Tensor:
            out: torch.Tensor = super().body(*given)
            self.seen.append(out.detach().clone())
            return out

    return Recorded


def _four_bits(linear: nn.Linear, how: dict[str, Any], bias: bool) -> nn.Module:
    """`linear` as bitsandbytes quantizes it. Its kernel for evaluation on some CPUs computes in
    bfloat16, and is left out. It makes a bias in place one of the dtype that it computes in: each
    has a number that all dtypes have. (DoRA takes a bias off again, in the bias's own dtype: there
    is none with it.)"""
    from bitsandbytes.nn import Linear4bit, Params4bit

    kept = {
        "quant_type": how["type"],
        "compress_statistics": how["double"],
        "quant_storage": getattr(torch, how["storage"]),
    }
    made = Linear4bit(
        linear.in_features, linear.out_features, compute_dtype=KINDS[how["compute"]], **kept
    )
    made.weight = Params4bit(linear.weight.data, blocksize=how["block"], module=made, **kept)
    made.bias = nn.Parameter((linear.bias.detach() * 64).round() / 64) if bias else None
    made.support_avx512bf16_for_cpu = False
    return made


def _net(program: Program, kind: type[one.Net], seed: int = 0) -> Any:
    """A model with adapters. The seed of the program makes what is frozen; `seed` what is not."""
    import peft

    torch.manual_seed(program["seed"])
    given = program["blocks"], program["norm"], program["tied"], program["width"]
    model = _recorded(kind)(*given)
    for number, layer in enumerate(model.layers):
        how = program["kinds"][number % len(program["kinds"])]
        for name in set(LINEAR) - {*program["whole"]}:
            four_bits = _four_bits(getattr(layer, name), how, not program["dora"])
            setattr(layer, name, four_bits)
    config = peft.LoraConfig(
        r=program["rank"],
        lora_alpha=4,
        target_modules=program["targets"],
        modules_to_save=["head"] if program["head"] else None,
        use_rslora=program["seed"] % 2 == 0,
        use_dora=program["dora"],
    )
    vars(model)["is_loaded_in_4bit"] = True  # as transformers says it to peft
    made = peft.get_peft_model(model.to("cpu"), config)
    torch.manual_seed(1000 + seed)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    _base(made).scale.requires_grad_(True)  # some gradient comes whatever is left out
    return made


def _base(model: Any) -> Any:
    return model.get_base_model()


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)


def _frozen(model: Any) -> dict[str, torch.Tensor]:
    """All that is not trained, with the bytes and scales of what is in 4 bits."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad or "lora_" in name}
    return {name: value for name, value in model.state_dict().items() if name not in trained}


def _compare_frozen(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit for bit; see `_four_bits` for biases."""
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    for name, value in theirs.items():
        found = mine[name]
        if name.endswith(".bias"):
            found = found.to(value.dtype)
        if value.dtype != torch.int64:
            assert found.dtype == value.dtype, f"{name} is {found.dtype}, and not {value.dtype}"
        assert torch.equal(_bytes(found), _bytes(value)), f"{name} has other bits"


def _compare_seen(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(mine) == len(theirs)
    for found, wanted in zip(mine, theirs, strict=True):
        assert torch.equal(found, wanted), f"blocks give another {float((found - wanted).norm())}"


class Pair(half.Pair):
    """Evener's model and plain peft's. `exact`: what is trained, in float32."""

    prefix = PREFIX

    def __init__(self, program: Program, folder: str) -> None:
        short = any(str(kind["compute"]).endswith("16") for kind in program["kinds"])
        self.near = half.NEAR if program["bf16"] or short else NEAR
        super().__init__({**program, "moments": "fp32", "master": True}, folder)

    def _net(self, seed: int = 0) -> Any:
        return _net(self.program, one.Net, seed)

    def _copy(self, model: Any) -> None:
        one.Pair._copy(self, model)
        trained = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        self.exact = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
        if self.program["bf16"]:
            for parameter in self.plain.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.bfloat16()
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        for name, value in self.exact.items():
            shown = self.plain.get_parameter(name)
            shown.copy_(half._moments.half(value) if self.program["bf16"] else value)

    def _config(self) -> dict[str, Any]:
        found = super()._config()
        found["bf16"]["enabled"] = self.program["bf16"]
        found["evener"]["depth"] = self.program["depth"]
        return found

    def _freeze(self, net: Any) -> None:
        for number, layer in enumerate(_base(net).layers):
            for name, parameter in layer.named_parameters():
                if "lora_" in name:
                    parameter.requires_grad_(number not in self.frozen)

    def train(self, call: Callable[[Any, one.Net], torch.Tensor]) -> None:
        super().train(call)
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        """The plain model goes on from the engine's weights, which have to be its own."""
        found = self.model.state_dict()
        for name, value in self.exact.items():
            torch.testing.assert_close(found[name].float(), value.detach(), **SAME)
            value.copy_(found[name])
        self._show()

    def run(self, step: list[Any]) -> None:
        super().run(step)
        self._compare_seen()

    def _start(self, model: Any) -> None:
        if "model" in vars(self):  # it goes, with what it has seen
            self._compare_seen()
        super()._start(model)

    def _compare_seen(self) -> None:
        mine, theirs = _base(self.model).seen, _base(self.plain).seen
        _compare_seen(mine, theirs)
        mine.clear()
        theirs.clear()

    def compare(self) -> None:
        _compare_frozen(_frozen(self.model), _frozen(self.plain))
        self._take()

    def do_adapter(self, *_: Any) -> None:
        """What peft would save."""
        import peft

        mine, theirs = (peft.get_peft_model_state_dict(m) for m in (self.model, self.plain))
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name].float(), value.float(), **self.near)

    def do_without(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """The base model's answer, as a reference (DPO) or before training."""
        with torch.no_grad(), self.model.disable_adapter(), self.plain.disable_adapter():
            self.both(lambda net, _: one._ce(net(x), y))
        for net in (self.model, self.plain):
            self._freeze(net)

    def do_stranger(self, *_: Any) -> None:
        """A checkpoint of other 4-bit weights is refused."""
        if self.saved is None:
            return
        kept = dict(vars(self))
        self.program = {**self.program, "seed": self.program["seed"] + 1}
        self._start(self._net())
        try:
            zero.load_checkpoint(self.engine, self.folder)
        except EvenerError:
            pass
        else:
            raise AssertionError("a checkpoint of other 4-bit weights was loaded")
        finally:
            self.engine.close()
            vars(self).update(kept)

    def do_back(self, x: torch.Tensor, *_: Any) -> None:
        """The weights back in a plain model, and under an engine again: moments go on from none."""
        zero.give_back(self.engine)
        if not self.program["bf16"]:
            _compare_frozen(_frozen(self.model), _frozen(self.plain))
            with torch.no_grad():
                self.model(x)
                self.plain(x)
        self._plain_optimizer()
        self.saved = None
        self.frozen.clear()
        for net in (self.model, self.plain):
            self._freeze(net)
        self._start(self.model)

    def _kept(self) -> Any:
        buffers = {name: value.clone() for name, value in self.plain.named_buffers()}
        optimizer, scheduler = self.plain_optimizer, self.plain_scheduler
        exact = {name: value.detach().clone() for name, value in self.exact.items()}
        return buffers, optimizer.state_dict(), scheduler and scheduler.state_dict(), exact

    def _back(self, saved: Any) -> None:
        buffers, optimizer, scheduler, exact = saved
        for name, value in self.plain.named_buffers():
            value.copy_(buffers[name])
        self.plain_optimizer.load_state_dict(optimizer)
        if self.plain_scheduler is not None:
            self.plain_scheduler.load_state_dict(scheduler)
        with torch.no_grad():
            for name, value in exact.items():
                self.exact[name].copy_(value)
        self._show()


class Ranked(several.Pair):
    """One rank's engine, and the plain model of both."""

    prefix = PREFIX

    def _net(self) -> Any:
        return _net(self.program, several.Net)

    def train(self, seed: int, *given: Any, **how: Any) -> None:
        super().train(seed, *given, **how)
        mine, theirs = _base(self.engine.module).seen, _base(self.plain).seen
        if not how.get("backs"):
            _compare_seen(mine[-len(theirs[self.rank :: several.RANKS]) :], theirs[self.rank :: 2])
        mine.clear()
        theirs.clear()
        self.compare()

    def do_evaluate(self, seed: int) -> None:
        super().do_evaluate(seed)
        mine, theirs = _base(self.engine.module).seen, _base(self.plain).seen
        _compare_seen(mine[-1:], theirs[-1:])
        mine.clear()
        theirs.clear()

    def do_forget(self, seed: int) -> None:
        super().do_forget(seed)
        _base(self.engine.module).seen.clear()

    def do_bad(self, seed: int) -> None:
        super().do_bad(seed)
        _base(self.engine.module).seen.clear()

    @torch.no_grad()
    def compare(self) -> None:
        """Bytes bit for bit, and what is trained to the rounding of sums; then it is the same."""
        self.engine.drain()
        wanted = dict(self.plain.named_parameters())
        for chunk in self.engine.chunks():
            mine = chunk.states.full() if chunk.group.trainable else chunk.states.weights
            whole = torch.empty(mine.numel() * several.RANKS, dtype=mine.dtype)
            dist.all_gather_into_tensor(whole, mine)
            for piece in chunk.group.pieces:
                found = whole[piece.offset : piece.offset + piece.numel]
                theirs = wanted[piece.name]
                four_bits = packed.of(piece.parameter)
                if four_bits is not None:
                    same = torch.equal(_bytes(four_bits.bytes_of(found)), _bytes(theirs))
                    assert same, f"{piece.name} has other bits"
                elif chunk.group.trainable:
                    torch.testing.assert_close(found.view(piece.shape), theirs, **one.CLOSE)
                    theirs.copy_(found.view(piece.shape))
                else:
                    assert torch.equal(found.view(piece.shape).to(theirs.dtype), theirs)

    def _kept(self) -> Any:
        trained = {n: p.detach() for n, p in self.plain.named_parameters() if p.requires_grad}
        return trained, self.plain_optimizer.state_dict()

    @torch.no_grad()
    def _back(self, saved: Any) -> None:
        for name, value in saved[0].items():
            self.plain.get_parameter(name).copy_(value)
        self.plain_optimizer.load_state_dict(saved[1])


def run(rank: int, _size: int, program: Program, fault: str, folder: str) -> str:
    """One rank: "" or "refused"; raises where something differs."""
    logging.getLogger("evener").setLevel(logging.ERROR)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        pair = Ranked(program, rank, folder)
        try:
            return several.follow(pair, program)
        finally:
            pair.close()


def check(program: Program) -> None:
    """Run it with both, on one rank or on two."""
    fault = _switch.fault
    with tempfile.TemporaryDirectory() as folder:
        if "stage" in program:
            found = _world().run("tests.twins.zero_packed:run", program, fault, folder)
            assert len({*found}) == 1, found
            return
        with FAULTS[fault]() if fault else contextlib.nullcontext():
            pair = Pair(program, folder)
            try:
                for step in program["steps"]:
                    pair.run(step)
                for seed in (1, 2):
                    pair.run(["train", seed, "plain"])
                pair.compare()
            finally:
                pair.close()


_switch = Switch()
_world = functools.cache(lambda: Ranks(several.RANKS, timeout=60))


# --- Programs -------------------------------------------------------------------------------------

_step = one._step
STEPS = st.one_of(
    _step("train", st.sampled_from(sorted(one.LOSSES))),
    _step("train", st.sampled_from(sorted(one.LOSSES))),
    _step("branch", st.booleans(), st.integers(-1, 2)),
    _step("twice"),
    _step("body"),
    _step("evaluate", st.booleans()),
    _step("attack"),
    _step("state"),
    _step("freeze", st.integers(0, 2)),
    _step("forget"),
    _step("fail"),
    _step("adapter"),
    _step("without"),
    _step("save"),
    _step("load", st.booleans()),
    _step("stranger"),
    _step("resume", st.booleans()),
    _step("resume", st.booleans()),
    _step("back"),
)
_some = st.lists(st.sampled_from(LINEAR), max_size=2, unique=True)
_kinds = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["nf4", "fp4"]),
        "double": st.booleans(),
        "block": st.sampled_from([32, 64, 64, 128, 256, 1024]),
        "compute": st.sampled_from([None, "float32", "bfloat16", "float16"]),
        "storage": st.sampled_from(["uint8", "uint8", "bfloat16", "float32"]),
    }
)
MODEL = {
    "seed": st.integers(0, 100),
    "blocks": st.integers(1, 4),
    "norm": st.sampled_from(["none", "layer"]),
    "tied": st.booleans(),
    "width": st.sampled_from([10, 20, 24]),
    "kinds": st.lists(_kinds, min_size=1, max_size=2),
    "whole": _some,
    "targets": st.lists(st.sampled_from(LINEAR), min_size=1, max_size=3, unique=True),
    "rank": st.integers(1, 4),
    "head": st.booleans(),
    "dora": st.sampled_from([False, False, True]),
    "optimizer": st.sampled_from(["SGD", "AdamW"]),
    "accumulate": st.integers(1, 2),
    "clip": st.sampled_from([0.0, 0.5]),
    "recompute": st.sampled_from([False, True, "offload"]),
    "resident": st.sampled_from([0, 0, 1, 2]),
}


def _whole_bytes(program: Program) -> Program:
    """bitsandbytes keeps an odd number of bytes as bytes alone."""
    if program["width"] == 10:
        kinds = [{**kind, "storage": "uint8"} for kind in program["kinds"]]
        return {**program, "kinds": kinds}
    return program


def _one_order(program: Program) -> Program:
    """At stage 3 ranks run blocks in one order: chunks of a block have other sizes here, which Gloo
    does not survive where ranks gather different ones."""
    steps = [step for step in program["steps"] if program["stage"] < 3 or step[0] != "order"]
    if program["stage"] == 3 and {*program["targets"], *program["whole"]} == {"side"}:
        # Only a rank that takes the branch has a backward pass through the block: the same limit.
        steps = [["branch", s[1], s[2][:1] * 2] if s[0] == "branch" else s for s in steps]
    return several._bounded({**program, "steps": steps or [["train", 0, "plain"]]})


ALONE = st.fixed_dictionaries(
    {
        **MODEL,
        "bf16": st.booleans(),
        "depth": st.integers(1, 3),
        "schedule": st.sampled_from(["", "warm", "milestones", "steps"]),
        "steps": st.lists(STEPS, min_size=1, max_size=7),
    }
)
SHARED = st.fixed_dictionaries(
    {
        **MODEL,
        "stage": st.integers(1, 3),
        "steps": st.lists(several.STEPS, min_size=1, max_size=5),
    }
).map(_one_order)
PROGRAMS = often(ALONE, ALONE, SHARED).map(_whole_bytes)


# --- Faults ---------------------------------------------------------------------------------------


def _put(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, value)


def _state(change: Callable[[Any], None]) -> Callable[[], AbstractContextManager[Any]]:
    """What a layer computes with, after `change`."""
    made = packed._Layer.state

    def state(self: packed._Layer) -> Any:
        found = copy.copy(made(self))
        found.state2 = copy.copy(found.state2)
        change(found)
        return found

    return _put(packed._Layer, "state", state)


def _other_scales(state: Any) -> None:
    state.absmax = state.absmax.roll(1)


def _other_block(state: Any) -> None:
    state.blocksize *= 2


def _no_offset(state: Any) -> None:
    if state.nested:
        state.offset = torch.zeros_like(state.offset)


def _other_nested(state: Any) -> None:
    if state.nested:
        state.state2.absmax = state.state2.absmax * 1.01


def _other_type(state: Any) -> None:
    import bitsandbytes

    other = {"nf4": "fp4", "fp4": "nf4"}[state.quant_type]
    state.quant_type = other
    state.code = bitsandbytes.functional.get_4bit_type(other, device="cpu")


_load = Loading._load


def _flipped(self: Loading, chunk: Any) -> None:
    """A bit of the bytes is lost on the way to the device."""
    _load(self, chunk)
    if not chunk.group.trainable and chunk.error is None:
        for piece in chunk.group.pieces:
            if packed.of(piece.parameter) is not None:
                chunk.flat[piece.offset : piece.offset + 1].view(torch.uint8)[0] ^= 1


@contextlib.contextmanager
def _stale() -> Iterator[None]:
    """The memory that a frozen chunk gets holds one that was there before, of the same size."""
    before: dict[Any, torch.Tensor] = {}

    def load(self: Loading, chunk: Any) -> None:
        _load(self, chunk)
        if chunk.group.trainable or chunk.keeps or chunk.error is not None:
            return
        size = chunk.flat.numel()
        mine = chunk.flat.clone()
        if size in before:
            chunk.flat.copy_(before[size])
        before[size] = mine

    with mock.patch.object(Loading, "_load", load):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "scales are those of the block before": _state(_other_scales),
    "blocks are twice as long": _state(_other_block),
    "the offset of scales in 8 bits is lost": _state(_no_offset),
    "the scale of the scales is off by a percent": _state(_other_nested),
    "nf4 is read as fp4": _state(_other_type),
    "a bit flips on its way": _put(Loading, "_load", _flipped),
    "a chunk that comes is one that left": _stale,
    "checkpoints do not know their scales": _put(packed, "marks", lambda _: {}),
}
TWIN = Twin(
    name="zero_packed",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=30,
    needs=("bitsandbytes", "peft"),
)
