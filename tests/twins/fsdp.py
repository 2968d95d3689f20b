"""FSDP2 with weights as exact differences against plain FSDP2, on two ranks over Gloo.

Both models of a rank do the same. Weights, gradients and outputs are the same bits after each step,
whoever changed a weight: an optimizer, a checkpoint, or a hand on one rank alone. Where gradients
go in a form, the plain model's are reduced by `Plain`: whole gradients to everybody, and the form's
arithmetic from its definition (`codecs`), one sender after the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

import evener.fsdp
from evener.base import torch_names
from evener.comm import ahead, mirrors, shards
from evener.comm.codecs import differences, int4, int8, rows
from evener.comm.mirrors import Found, Mirror
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin, often

RANKS, ROWS, WORDS = 2, 3, 7
POLICIES: dict[str, MixedPrecisionPolicy] = {
    "float32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 both": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
# What a hand does to the first rows of a shard.
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "scale": lambda rows: rows.mul_(-3),
    "zero": lambda rows: rows.zero_(),
    "minus zero": lambda rows: rows.fill_(-0.0),
    "one": lambda rows: rows.view(-1)[:1].add_(1),
    "nan": lambda rows: rows.fill_(float("nan")),
    "infinite": lambda rows: rows.fill_(float("inf")),
    "tiny": lambda rows: rows.fill_(1e-40),
}
_mesh = functools.cache(lambda: init_device_mesh("cpu", (RANKS,)))


class Net(nn.Module):
    """An embedding, blocks of odd widths, a head that may be tied."""

    def __init__(self, width: int, blocks: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width + 3), nn.GELU(), nn.Linear(width + 3, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, skip: int = -1, spoil: bool = False) -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = x + block(x)
                if spoil and number == 0:
                    x.register_hook(_spoil)
        out: torch.Tensor = self.head(x)
        return out


def _spoil(gradient: torch.Tensor) -> torch.Tensor:
    """One entry is infinite: behind it, some gradients of a block are, and some are not."""
    gradient = gradient.clone()
    gradient.view(-1)[0] = float("inf")
    return gradient


class Pair:
    """One rank's two models, plain and over the mirrors."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.saved: Any = None
        self.owed: Any = None  # what INT4 had not sent, beside the plain model's
        self.defaults: dict[Any, Any] = {}
        self.models = [self._net(program["seed"]) for _ in range(2)]
        make = OPTIMIZERS[program["optimizer"]]
        self.optimizers = [make(model.parameters(), lr=program["rate"]) for model in self.models]
        self._accelerate()

    def _net(self, seed: int) -> Any:
        given = self.program
        torch.manual_seed(seed)
        net = Net(given["width"], given["blocks"], given["tied"])
        how = {
            "mesh": _mesh(),
            "mp_policy": POLICIES[given["policy"]],
            "reshard_after_forward": given["reshard"],
        }
        for block in net.blocks:
            fully_shard(block, **how)
        fully_shard(net, **how)
        if factor := given.get("divide"):
            for unit in (net, *net.blocks):
                unit.set_gradient_divide_factor(factor)
                unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other sum with a factor
        return net

    def _accelerate(self) -> None:
        form = self.program["form"]
        with mock.patch.dict(os.environ, EVENER_GUARD_STEPS="0"):  # forms stay what they are
            evener.fsdp.accelerate(self.models[1], mode=form, mirror=self.program["mirror"])
        self.owed, self.plains = None, list[Plain]()
        if form != "exact":
            self._reduce_plainly(form)

    def _reduce_plainly(self, form: str) -> None:
        index = 0
        for module in (self.models[0], *self.models[0].blocks):
            unit = torch_names.fsdp_group(module._get_fsdp_state(), "")
            own = self.defaults.setdefault(module, unit._reduce_scatter_comm)
            unit._reduce_scatter_comm = own
            unit.force_sum_reduction_for_comms = bool(self.program.get("divide"))
            if not any(p.sharded_param.requires_grad for p in unit.fsdp_params):
                continue
            module.set_force_sum_reduction_for_comms(True)
            self.plains.append(Plain(unit, form, index))
            module.set_custom_reduce_scatter(self.plains[-1])
            index += 1

    def close(self) -> None:
        evener.fsdp.release(self.models[1])

    def _data(self, seed: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(10 * seed + self.rank)
        return torch.randint(0, WORDS, (ROWS, 2), generator=made)

    def do_train(self, seed: int, passes: int, skip: int, late: bool) -> None:
        """A step; `late`: gradients are reduced with the last micro-batch alone.

        FSDP2 itself fails where a block was not used and nothing is reduced.
        """
        late = late and skip < 0
        for model in self.models:
            for part in range(passes):
                model.set_requires_gradient_sync(not late or part == passes - 1)
                logits = model(self._data(100 * seed + part), skip)
                try:
                    logits.float().square().mean().backward()
                except RuntimeError as error:
                    if model is self.models[0]:
                        raise PlainError from error
                    raise
            if self.program["clip"]:
                nn.utils.clip_grad_norm_(model.parameters(), self.program["clip"])
        self._one_nan()
        self._compare("gradients", lambda p: p.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _one_nan(self) -> None:
        """Which NaN a sum gives depends on its order: ours become those of the plain model."""
        for plain, ours in zip(*(model.parameters() for model in self.models), strict=True):
            if plain.grad is not None and ours.grad is not None:
                a, b = _local(plain.grad), _local(ours.grad)
                both = a.isnan() & b.isnan()
                b[both] = a[both]

    def do_spoil(self, seed: int) -> None:
        """A step that the program skips, on one rank's account, and the next one."""
        for model in self.models:
            spoil = self.rank == seed % RANKS
            model.set_requires_gradient_sync(True)
            model(self._data(seed), spoil=spoil).float().square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.do_train(seed, 1, -1, False)

    def do_restart(self, seed: int) -> None:
        """A step, weights that are loaded, and a step of theirs."""
        self.do_train(seed, 1, -1, False)
        self.do_load(seed)
        self.do_train(seed + 1, 1, -1, False)

    def do_evaluate(self, seed: int) -> None:
        with torch.no_grad():
            plain, ours = (model(self._data(seed)) for model in self.models)
        assert _same(plain, ours), "outputs differ"

    def do_idle(self, _seed: int) -> None:
        """A step without gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def do_freeze(self, seed: int, on: bool) -> None:
        for model in self.models:
            model.blocks[seed % len(model.blocks)].requires_grad_(on)

    def do_write(self, seed: int, what: str, everywhere: bool) -> None:
        """A hand writes into a weight, on one rank or on all."""
        for model in self.models:
            weights = list(model.parameters())
            shard = _local(weights[seed % len(weights)])
            if shard.numel() and (everywhere or self.rank == seed % RANKS):
                with torch.no_grad():
                    WRITES[what](shard[:1])

    def do_load(self, seed: int) -> None:
        """Weights of another model."""
        other = copy.deepcopy(get_model_state_dict(self._net(seed)))
        for model in self.models:
            set_model_state_dict(model, other)
        for plain in self.plains:
            plain.kept.clear()

    def do_save(self, _seed: int) -> None:
        self.saved = [copy.deepcopy(model.state_dict()) for model in self.models]
        kept = [copy.deepcopy(plain.kept) for plain in self.plains]
        self.owed = (copy.deepcopy(self.models[1].evener.state_dict()), kept)

    def do_back(self, seed: int, owed: bool = False) -> None:
        """`owed`: and what was not sent then, before the weights or after."""
        if self.saved is None:
            return
        owed = owed and self.owed is not None
        if owed and seed % 2:
            self.models[1].evener.load_state_dict(self.owed[0])
        for model, saved in zip(self.models, self.saved, strict=True):
            model.load_state_dict(saved)
        if owed and not seed % 2:
            self.models[1].evener.load_state_dict(self.owed[0])
        for at, plain in enumerate(self.plains):
            plain.kept = copy.deepcopy(self.owed[1][at]) if owed else {}

    def do_ahead(self, _seed: int) -> None:
        """Gather before the forward pass: the same weights. They are given back unused."""
        units = [[model, *model.blocks] for model in self.models]
        for plain, ours in zip(*units, strict=True):
            plain.unshard()
            ours.unshard()
        self._compare("gathered weights", lambda p: p.detach())
        for unit in (*units[0], *units[1]):
            unit.reshard()

    def do_signs(self, seed: int) -> None:
        """Zeros become minus zeros, and nothing else changes."""
        for what in ("zero", "minus zero"):
            self.do_write(seed, what, True)
            self.do_ahead(seed)

    def do_keep(self, _seed: int, reshard: bool) -> None:
        for model in self.models:
            model.set_reshard_after_forward(reshard)

    def do_again(self, _seed: int) -> None:
        """Release the model and accelerate it anew."""
        self.close()
        self._accelerate()

    def _compare(self, what: str, of: Callable[[Any], Any]) -> None:
        named = [list(model.named_parameters()) for model in self.models]
        for (name, plain), (_, ours) in zip(*named, strict=True):
            a, b = of(plain), of(ours)
            assert (a is None) == (b is None), f"{what} of {name}"
            if a is not None:
                assert _same(_local(a), _local(b)), f"{what} of {name} differ"

    def compare(self) -> None:
        self._compare("weights", lambda p: p.detach())


class Plain(ReduceScatter):
    """What `comm.shards` says of itself, with nothing clever: whole gradients to everybody."""

    def __init__(self, unit: Any, form: str, index: int) -> None:
        self.form, self.index, self.calls = form, index, 0
        self.pieces, at = [], 0
        for parameter in unit.fsdp_params:
            if parameter.sharded_param.requires_grad:
                numel = parameter.padded_sharded_param_size.numel()
                self.pieces.append((at, at + numel, parameter.sharded_param.dim() <= 1))
                at += numel
        self.numel = at
        self.kept: dict[int, torch.Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        small = all(dense for _, _, dense in self.pieces)
        narrow = self.form == "bf16" and input_tensor.element_size() == 2
        if output_tensor.numel() != self.numel or small or narrow:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
            return
        self.calls += 1
        every = [torch.empty_like(input_tensor) for _ in range(RANKS)]
        dist.all_gather(every, input_tensor, group=group)
        rank = dist.get_rank()
        rows = [each.view(RANKS, -1)[rank] for each in every]
        others = [sender for sender in range(RANKS) if sender != rank]
        total = torch.zeros(self.numel)
        for sender in others:
            total += self._sent(sender, rank, rows[sender].clone())
        total += rows[rank]
        for sender in others:
            for start, end, dense in self.pieces:
                if dense:
                    total[start:end] += rows[sender][start:end]
        output_tensor.copy_(total)

    def _sent(self, sender: int, rank: int, row: torch.Tensor) -> torch.Tensor:
        """What of the sender's row arrives, norms and biases apart."""
        for start, end, dense in self.pieces:
            if dense:
                row[start:end] = 0
        if self.form == "bf16":
            return row.bfloat16().float()
        out = torch.zeros(self.numel)
        if self.form == "int8":
            room = int8.room(self.numel)
            codes, scales = torch.empty(room, dtype=torch.int8), torch.empty(room // int8.BLOCK)
            key = int8.key(self.calls, self.index, sender, rank)
            int8.quantize_reference(row, None, codes, scales, key)
            int8.dequantize_sum_reference(codes[None], scales[None], 1.0, out)
            return out
        room = int4.room(self.numel)
        codes = torch.empty(room // 2, dtype=torch.uint8)
        scales = torch.empty(room // int4.BLOCK)
        kept = self.kept.get(sender, torch.zeros(self.numel)).clone()
        int4.quantize_reference(row, kept, codes, scales)
        if not scales.isnan().any():
            self.kept[sender] = kept.bfloat16().float()
        int4.dequantize_sum_reference(codes[None], scales[None], 1.0, out)
        return out


def _local(weight: Any) -> torch.Tensor:
    """A rank's shard; all of it while the weight is gathered."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class PlainError(Exception):
    """FSDP2 itself fails: in 16 bits, with a block that trains again after it was frozen."""


def run(rank: int, _size: int, program: Program, fault: str) -> None:
    """One rank: raises where something differs."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        pair = Pair(program, rank)
        try:
            wrong = ""
            for kind, *given in [*program["steps"], ["evaluate", 7], ["evaluate", 8]]:
                try:
                    getattr(pair, f"do_{kind}")(*given)
                    pair.compare()
                except PlainError:
                    return  # on all ranks
                except AssertionError as error:
                    wrong = str(error)
                # Ranks go on together, or stop together.
                found: list[str] = [""] * RANKS
                dist.all_gather_object(found, wrong)
                assert not any(found), found
        finally:
            pair.close()


# --- Faults ---------------------------------------------------------------------------------------


def _put(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


def _flipped(message: torch.Tensor, into: torch.Tensor, read: Any = differences.read) -> None:
    read(message, into)
    into.view(torch.int16)[0] ^= 1


def _overlooked(headers: torch.Tensor) -> torch.Tensor:
    return torch.tensor(headers.numel(), dtype=torch.int64)


def _own_row_left(self: Mirror, found: Found, apply: Any = Mirror.apply) -> None:
    before = self.rows[self.rank].clone() if self.filled else None  # type: ignore[index]
    apply(self, found)
    if before is not None:
        self.rows[self.rank].copy_(before)  # type: ignore[index]


def _mixed(looked: Sequence[tuple[Mirror, Found]], announce: Any = mirrors.announce) -> None:
    announce(looked)
    if len(looked) > 1:
        one, other = looked[0][1], looked[1][1]
        one.stated, other.stated = other.stated, one.stated


def _not_asked(group: Any, state: Any = torch_names.fsdp_training_state) -> str:
    """Every gather is taken for one of a backward pass."""
    return state(group) and "PRE_BACKWARD"


def _forgotten(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(self.nodes - 1, rows.shape[1], dtype=torch.bfloat16)


def _drops_nothing(self: Any) -> None:
    """Weights are loaded, and what is kept stays."""


def _nothing_is_spoiled(left: torch.Tensor, scales: Any, residual: torch.Tensor) -> None:
    residual.copy_(left)


def _without_own(
    came: Any, start: int, places: Any, own: torch.Tensor, out: Any, give: Any = rows.give
) -> None:
    give(came, start, places, torch.zeros_like(own), out)


FAULTS: dict[str, Callable[[], Any]] = {
    "a decoded weight is off by a bit": _put(mirrors.differences, "read", _flipped),
    "a change is overlooked": _put(mirrors.differences, "size", _overlooked),
    "the mirror's own row stays as it was": _put(Mirror, "apply", _own_row_left),
    "minus zero is zero": _put(mirrors, "bits", lambda weights: weights.float()),
    "units of a group get each other's checksums": _put(ahead, "announce", _mixed),
    "nobody asks before a gather": _put(torch_names, "fsdp_training_state", _not_asked),
    "what INT4 did not send outlives a load": _put(
        shards.FormedReduceScatter, "will_load", _drops_nothing
    ),
    "what is finite of a spoiled step is kept": _put(shards.row_parts, "keep", _nothing_is_spoiled),
    "a node's own part of a norm's gradient is left out": _put(
        shards.row_parts, "give", _without_own
    ),
    "what INT4 did not send is forgotten": _put(shards.FormedReduceScatter, "_kept", _forgotten),
}
# Noticed before a comparison where a forward pass comes first.
_CHECKSUM = "do not match what was sent"
ENDS = {
    "a decoded weight is off by a bit": _CHECKSUM,
    "the mirror's own row stays as it was": f"{_CHECKSUM}|ends within tile",
    "units of a group get each other's checksums": _CHECKSUM,
}
_switch = Switch()
_world = functools.cache(lambda: Ranks(RANKS, timeout=60))


def check(program: Program) -> None:
    """Run it on both ranks."""
    _world().run("tests.twins.fsdp:run", program, _switch.fault)


_seeds = st.integers(0, 30)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), _seeds, *given).map(list)


_train = _step("train", st.integers(1, 3), st.integers(-1, 2), st.booleans())
STEPS = often(
    _train,
    _train,
    _step("evaluate"),
    _step("idle"),
    _step("freeze", st.booleans()),
    _step("write", st.sampled_from(sorted(WRITES)), st.booleans()),
    _step("load"),
    _step("save"),
    _step("back", st.booleans()),
    _step("ahead"),
    _step("signs"),
    _step("spoil"),
    _step("restart"),
    _step("keep", st.booleans()),
    _step("again"),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": _seeds,
        "width": st.sampled_from([1, 5, 8, 37]),
        "blocks": st.integers(1, 6),
        "tied": st.booleans(),
        "policy": st.sampled_from(sorted(POLICIES)),
        "reshard": st.booleans(),
        "divide": st.sampled_from([0.0, 0.0, 1.0, 4.0]),
        "mirror": st.sampled_from(["host", "gpu", "off"]),
        "form": st.sampled_from(["exact", "exact", "bf16", "int8", "int4"]),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "rate": st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
        "clip": st.sampled_from([0.0, 0.5]),
        "steps": st.lists(STEPS, min_size=1, max_size=8),
    }
)
TWIN = Twin(
    name="fsdp",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    ends=ENDS,
    programs_per_round=60,
)
