"""Mixtures of experts against a plain loop over experts.

A program is a layer (router, experts, top-k, groups, capacity, shared expert), batches (also empty
ones, and choices of nobody) and what a user does with them: train, accumulate, clip, skip, move the
router's bias, move experts, evaluate, save, and go on elsewhere; in one process, or with experts
over two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from evener import moe
from evener.errors import UsageError
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin

# Modules whose names are those of functions of the package.
_BALANCE, _SPREAD = (importlib.import_module(f"evener.moe.{n}") for n in ("balance", "spread"))
_MATRICES = ("experts.gate_up_proj", "experts.down_proj")


class Loop(nn.Module):
    """The same layer as a loop over tokens and experts, in plain torch."""

    def __init__(self, program: Program, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.program = program
        self.weights = nn.ParameterDict(
            {k.replace(".", "/"): nn.Parameter(v.clone()) for k, v in state.items()
             if "bias" not in k}
        )  # fmt: skip
        bias = state.get("gate.e_score_correction_bias")
        self.bias = None if bias is None else bias.clone()
        self.load, self.seen = torch.zeros(2, program["experts"])
        self.dropped = 0
        self.aux: torch.Tensor | None = None

    def of(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.weights[name.replace(".", "/")]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.program
        flat = x.reshape(-1, x.shape[-1])
        logits = flat @ self.of("gate.weight").T
        scores = logits.softmax(-1) if p["score"] == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weights = (
            torch.stack([row[to] for row, to in zip(scores, chosen, strict=True)])
            if len(flat)
            else scores[:, : p["top_k"]]
        )
        if p["normalize"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * p["scale"]
        self._aux(scores, logits, chosen)
        out = self.experts(flat, chosen, weights)
        if p["shared"]:
            gate, up = (flat @ self.of(f"shared_experts.{n}_proj.weight").T for n in ("gate", "up"))
            out = out + (functional.silu(gate) * up) @ self.of("shared_experts.down_proj.weight").T
        return out.view(x.shape)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        p = self.program
        biased = scores if self.bias is None else scores + self.bias
        rows = []
        for row in biased:
            allowed = list(range(p["experts"]))
            each = p["experts"] // p["groups"]
            if p["top_groups"] < p["groups"]:
                worth = [
                    sum(sorted((float(v) for v in row[g * each :][:each]), reverse=True)[:2])
                    for g in range(p["groups"])
                ]
                best = sorted(range(p["groups"]), key=lambda g: -worth[g])[: p["top_groups"]]
                allowed = [e for g in best for e in range(g * each, (g + 1) * each)]
            rows.append(sorted(allowed, key=lambda e: -float(row[e]))[: p["top_k"]])
        return torch.tensor(rows, dtype=torch.long).view(-1, p["top_k"])

    def experts(
        self, flat: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        p = self.program
        room = [math.inf] * p["experts"]
        if p["capacity"] is not None:
            room = [max(1, math.ceil(chosen.numel() / p["experts"] * p["capacity"]))] * p["experts"]
        out, self.dropped, load = [], 0, [0.0] * p["experts"]
        for row, to, share in zip(flat, chosen.tolist(), weights, strict=True):
            total = torch.zeros_like(row)
            for slot, expert in enumerate(to):
                if not 0 <= expert < p["experts"]:
                    continue
                if load[expert] >= room[expert]:
                    self.dropped += 1
                    continue
                load[expert] += 1
                gate, up = (self.of("experts.gate_up_proj")[expert] @ row).chunk(2)
                given = self.of("experts.down_proj")[expert] @ (functional.silu(gate) * up)
                total = total + given * share[slot]
            out.append(total)
        if self.training:
            self.load += torch.tensor(load)
        # An expert without a token has a gradient of zeros.
        nothing = 0 * sum(w.sum() for w in (weights, *(self.of(n) for n in _MATRICES)))
        return (torch.stack(out) if out else flat * 1) + nothing

    def _aux(self, scores: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        if not self.training:
            self.aux = None
            return
        count = self.program["experts"]
        chance = scores
        if self.program["score"] == "sigmoid":
            chance = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        total = logits.new_zeros(())
        for expert in range(count):
            share = float((chosen == expert).sum()) / max(1, len(chosen))
            total = total + share * chance[:, expert].sum() / max(1, len(chosen))
        self.aux = total * count


def _layer(program: Program) -> moe.MoE:
    torch.manual_seed(program["seed"])
    names = ("score", "normalize", "scale", "groups", "top_groups", "capacity", "shared")
    return moe.MoE(
        program["width"], program["inner"], program["experts"], program["top_k"],
        **{name: program[name] for name in names},
    ).double()  # fmt: skip


def _batch(program: Program, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(program["seed"] * 997 + step * 31 + rank)
    tokens = program["tokens"][(step + rank) % len(program["tokens"])]
    shape = (tokens, program["width"])
    if program["wide"]:
        shape = (1, *shape)
    x, seed = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return x, seed


def _close(what: str, ours: torch.Tensor, wanted: torch.Tensor) -> None:
    assert ours.shape == wanted.shape and ours.dtype == wanted.dtype, what
    both_nan = torch.allclose(ours, wanted, rtol=1e-6, atol=1e-8, equal_nan=True)
    assert both_nan, f"{what}: {(ours - wanted).abs().max()} apart"


def run(rank: int, size: int, program: Program, fault: str) -> str:
    """One rank's part; raises AssertionError where it differs. Gives what was refused, or ""."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return _run(rank, size, program)


def _run(rank: int, size: int, program: Program) -> str:
    ours = _layer(program)
    plain = Loop(program, ours.state_dict())
    if size > 1:
        try:
            moe.spread(ours, size, route=program["route"], chunks=program["chunks"])
        except UsageError as error:
            assert program["experts"] % size, str(error)
            return str(error)
    optimizer = _optimizer(program, ours)
    other = _optimizer(program, plain)
    for step, op in enumerate(program["steps"]):
        ours.train(op != "evaluate")
        plain.train(op != "evaluate")
        parts = [_batch(program, step, r) for r in range(size)]
        if op == "direct":
            _direct(program, ours, plain, parts, rank, step)
            continue
        if op == "save":
            states = moe.optimizer_state(ours, optimizer) if size > 1 else None
            ours = _elsewhere(program, ours, size)
            # Counts are not saved, nor are gradients.
            plain.load, plain.seen = torch.zeros(2, program["experts"])
            other.zero_grad()
            fresh = _optimizer(program, ours)
            if states is None:
                fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            else:
                moe.load_optimizer_state(ours, fresh, states)
            optimizer = fresh
            continue
        _pass(program, ours, plain, parts, rank, size, op)
        if op in ("evaluate", "accumulate"):
            continue
        if op == "clip" and size > 1:
            found = nn.utils.clip_grad_norm_(_averaged(ours, size), 0.01)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            _close("the norm", found.double(), wanted.double())
        elif op == "clip":
            for one in (ours, plain):
                nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        elif size > 1:
            _averaged(ours, size)
        if op != "skip":
            optimizer.step()
            other.step()
        optimizer.zero_grad()
        other.zero_grad()
        if op == "rebalance" and size > 1:
            moe.rebalance(ours, optimizer)
        if op == "balance" and program["score"] == "sigmoid":
            moe.balance(ours, 0.01)
            since = plain.load - plain.seen
            plain.bias = plain.bias + 0.01 * (since.mean() - since).sign()
            plain.seen = plain.load.clone()
            _close("the bias", ours.gate.e_score_correction_bias, plain.bias)
    mine = {k: v for k, v in ours.state_dict().items() if "bias" not in k}
    for name, tensor in mine.items():
        _close(name, tensor, plain.of(name).detach())
    return ""


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if program["optimizer"] == "adamw" else torch.optim.SGD
    return kind(model.parameters(), lr=0.01)


def _averaged(ours: nn.Module, size: int) -> list[nn.Parameter]:
    """The mean of what is not spread over ranks, as DDP leaves it."""
    for name, parameter in ours.named_parameters():
        if not name.startswith("experts."):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= size
    return list(ours.parameters())


def _pass(
    program: Program, ours: moe.MoE, plain: Loop, parts: list[Any], rank: int, size: int, op: str
) -> None:
    x = parts[rank][0].clone().requires_grad_()
    out = ours(x)
    total = torch.zeros(())
    for r, (given, seed) in enumerate(parts):
        y = given.clone().requires_grad_()
        wanted = plain(y)
        if r == rank:
            _close("outputs", out, wanted)
            if op != "evaluate":
                assert plain.aux is not None and ours.aux_loss is not None
                _close("the auxiliary loss", ours.aux_loss.double(), plain.aux.float().double())
            if program["capacity"] is not None and size == 1:
                assert int(ours.experts.dropped) == plain.dropped, "the number of dropped choices"
            mine = y
        if op != "evaluate":
            (wanted * seed).sum().div(size).backward()
    if op == "evaluate":
        assert ours.aux_loss is None
        return
    total = (out * parts[rank][1]).sum()
    total.backward()
    assert x.grad is not None or not x.numel()
    if x.numel():
        _close("the gradient of tokens", x.grad, mine.grad * size)
    if size == 1:
        assert torch.equal(ours.experts.load, plain.load), "the load"
        for name, parameter in ours.named_parameters():
            if parameter.grad is not None:
                wanted = plain.of(name).grad
                _close(f"the gradient of {name}", parameter.grad,
                       torch.zeros_like(parameter) if wanted is None else wanted)  # fmt: skip


def _direct(
    program: Program, ours: moe.MoE, plain: Loop, parts: list[Any], rank: int, step: int
) -> None:
    """The experts alone, with choices of nobody, and of one expert twice."""

    def drawn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        flat = x.reshape(-1, x.shape[-1])
        shape = (len(flat), program["top_k"])
        chosen = torch.randint(-1, program["experts"] + 1, shape, generator=generator)
        return flat, chosen, torch.rand(shape, generator=generator, dtype=torch.float64)

    for r, (other, _) in enumerate(parts):
        if r != rank:  # the load is that of all ranks
            plain.experts(*drawn(other))
    x, seed = parts[rank]
    flat, chosen, weights = drawn(x)
    given = [w.clone().requires_grad_() for w in (weights, weights)]
    out, wanted = ours.experts(flat, chosen, given[0]), plain.experts(flat, chosen, given[1])
    _close("outputs of the experts", out, wanted)
    # Also without a token: the backward pass of spread experts is one of all ranks.
    for one, w in ((out, given[0]), (wanted, given[1])):
        if one.requires_grad:
            w.grad = torch.autograd.grad((one * seed.reshape(one.shape)).sum(), w,
                                         allow_unused=True)[0]  # fmt: skip
    if given[0].grad is not None and given[1].grad is not None:
        _close("the gradient of weights", given[0].grad, given[1].grad)


def _elsewhere(program: Program, ours: moe.MoE, size: int) -> moe.MoE:
    """A new layer with the state of this one."""
    state = {k: v.clone() for k, v in ours.state_dict().items()}
    made = _layer({**program, "seed": program["seed"] + 1})
    made.load_state_dict(state)
    if size > 1:
        moe.spread(made, size, route=program["route"], chunks=program["chunks"])
    return made


# --- Faults ---------------------------------------------------------------------------------------


def _own_norms() -> Any:
    from evener.comm import total_norm

    return mock.patch.object(total_norm, "_asked", _Deaf())


class _Deaf(list[Any]):
    """Hears nobody."""

    def append(self, _: Any) -> None:
        pass


def _no_capacity() -> Any:
    from evener.moe import permute

    plain = permute.positions
    return mock.patch.object(permute, "positions", lambda to, n, _=None: plain(to, n))


def _nobody_is_the_last() -> Any:
    from evener.moe import permute

    plain = permute.positions
    return mock.patch.object(
        permute, "positions", lambda to, n, limit=None: plain(to.clamp(min=0), n, limit)
    )


def _biased_weights() -> Any:
    from evener.moe.router import Router

    def forward(self: Any, x: torch.Tensor) -> Any:
        found = plain(self, x)
        if self.e_score_correction_bias is None:
            return found
        return found._replace(weights=found.weights + self.e_score_correction_bias[found.experts])

    plain = Router.forward
    return mock.patch.object(Router, "forward", forward)


def _aux_is_kept() -> Any:
    from evener.moe.layer import MoE

    def note(self: Any, logits: torch.Tensor, experts: torch.Tensor) -> None:
        training, self.training = self.training, True
        plain(self, logits, experts)
        self.training = training

    plain = MoE._note_loss
    return mock.patch.object(MoE, "_note_loss", note)


def _any_group() -> Any:
    from evener.moe.router import Router

    def choose(self: Any, scores: torch.Tensor) -> Any:
        with mock.patch.object(self, "top_groups", self.groups):
            return plain(self, scores)

    plain = Router._choose
    return mock.patch.object(Router, "_choose", choose)


def _own_loads() -> Any:
    """Only `balance` is broken: ranks that moved experts by their own loads would wait for ever."""

    def own(found: Any) -> list[torch.Tensor]:
        return [layer.load.double().cpu() for _, layer in found]

    def balance(*given: Any) -> None:
        with mock.patch.object(_BALANCE, "loads", own):
            plain(*given)

    plain = moe.balance
    return mock.patch.object(moe, "balance", balance)


def _no_states() -> Any:
    plain = _BALANCE._states

    def states(name: str, layer: Any, _: Any) -> Any:
        return plain(name, layer, None)

    return mock.patch.object(_BALANCE, "_states", states)


def _sums() -> Any:
    from evener.moe.parallel import Parallel

    def init(self: Any, shared: Any, *arguments: Any) -> None:
        shared.mean = False
        plain(self, shared, *arguments)

    plain = Parallel.__init__
    return mock.patch.object(Parallel, "__init__", init)


def _first_experts() -> Any:
    """A checkpoint gives each rank those experts that it begins with, wherever they are now."""
    gathered = _SPREAD.gathered

    def unordered(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
        held = layer.parallel.held
        with mock.patch.object(layer.parallel, "held", torch.arange(len(held))):
            return gathered(layer, tensor)

    return mock.patch.object(_SPREAD, "gathered", unordered)


FAULTS: dict[str, Callable[[], Any]] = {
    "each rank clips by its own norm": _own_norms,
    "capacity is not kept": _no_capacity,
    "a choice of nobody goes to the first expert": _nobody_is_the_last,
    "the router's bias is in the weights": _biased_weights,
    "the auxiliary loss stays in evaluation": _aux_is_kept,
    "experts of any group are chosen": _any_group,
    "each rank balances by its own load": _own_loads,
    "gradients of spread experts are sums": _sums,
    "experts move without the optimizer's states": _no_states,
    "a checkpoint has experts where they lie": _first_experts,
}

_switch = Switch()
_world = functools.cache(Ranks)


def check(program: Program) -> None:
    if program["ranks"] == 1:
        torch.set_num_threads(1)
        run(0, 1, program, _switch.fault)
        return
    world = _world(program["ranks"])
    world.run("tests.twins.moe:run", program, _switch.fault)


def _program(draw: Any) -> Program:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each = draw(st.integers(1, 4))
    experts = groups * each
    top_groups = draw(st.integers(1, groups))
    ranks = draw(st.sampled_from([1] * 4 + [2]))
    return {
        "width": draw(st.integers(1, 6)),
        "inner": draw(st.integers(1, 5)),
        "experts": experts,
        "top_k": draw(st.integers(1, each * top_groups)),
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "groups": groups,
        "top_groups": top_groups,
        "capacity": draw(st.sampled_from([None, None, 0.3, 1.0, 1.5])) if ranks == 1 else None,
        "shared": draw(st.sampled_from([0, 0, 3])),
        "tokens": draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)),
        "wide": draw(st.booleans()),
        "ranks": ranks,
        "route": draw(st.sampled_from(["flat", "pairs", "auto"])),
        "chunks": draw(st.integers(1, 3)),
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
        "steps": draw(st.lists(st.sampled_from(
            ["train", "train", "accumulate", "clip", "skip", "evaluate", "balance", "rebalance",
             "direct", "save"]), min_size=1, max_size=5)),
        "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


TWIN = Twin(
    name="moe",
    programs=st.composite(_program)(),
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=300,
)
