"""One program of the doors' twin on one rank, under plain DDP or under Evener."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from tests.twins._doors_programs import ROWS, WARM
from tests.twins.harness import Program

DEVICE = os.environ.get("TWIN_DEVICE", "cpu")


class Net(nn.Module):
    """Two branches around a middle, of a kind; `b` is used where it is said."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "embedding":
            self.table = nn.Embedding(12, 8)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "attention" else None
        self.head = nn.Linear(8, 8)
        if kind == "branches":
            self.head.weight = self.a[0].weight
        self.scale = nn.Parameter(torch.ones(8))
        self.raises = False

    def forward(self, x: torch.Tensor, use: bool = True, inner: str = "") -> torch.Tensor:
        if self.kind == "embedding":
            x = x + self.table((x[:, 0].abs() * 7).long() % 12)
        y = self.a(x) * self.scale
        if self.raises:
            raise ArithmeticError("as it happens")
        if use:
            y = y + self.b(self.norm(y))
        if self.mix is not None:
            z = y[:, None]
            y = y + self.mix(z, z, z, need_weights=False)[0][:, 0]
        if inner == "vjp":
            weights = dict(self.head.named_parameters())
            return torch.func.vjp(
                lambda w: torch.func.functional_call(self.head, w, (y,)), weights
            )[0]
        if inner == "functional call":
            return torch.func.functional_call(self.head, dict(self.head.named_parameters()), (y,))
        return self.head(y)


def _optimizers(kind: str, net: Net) -> list[Optimizer]:
    o = torch.optim
    made: dict[str, Callable[[Any], Optimizer]] = {
        "SGD": lambda p: o.SGD(p, 0.05),
        "momentum": lambda p: o.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        "Adam": lambda p: o.Adam(p, 0.01),
        "AdamW": lambda p: o.AdamW(p, 0.01, amsgrad=True),
        "RMSprop": lambda p: o.RMSprop(p, 0.01, momentum=0.5),
        "Adagrad": lambda p: o.Adagrad(p, 0.05),
        "NAdam": lambda p: o.NAdam(p, 0.01),
    }
    if kind == "two":
        mine = {id(p) for p in net.b.parameters()}
        rest = [p for p in net.parameters() if id(p) not in mine]
        return [o.SGD(rest, 0.05, momentum=0.9), o.Adam(net.b.parameters(), 0.01)]
    return [made[kind](net.parameters())]


def _wrap_step(optimizer: Optimizer) -> None:
    inner = optimizer.step
    optimizer.step = lambda *args: inner(*args)  # type: ignore[method-assign]


def _drawn(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Run:
    """One program on one rank, one way."""

    def __init__(self, program: Program, way: str, rank: int) -> None:
        self.program, self.way, self.rank = program, way, rank
        torch.manual_seed(program["seed"])
        self.log: list[torch.Tensor] = []
        self.draws, self.rows = 0, ROWS
        self.models: list[Any] = []
        self.optimizers: list[list[Optimizer]] = []
        for _ in range(program["models"]):
            net = Net(program["model"]).to(DEVICE)
            if program["compile"]:
                torch._dynamo.reset()
                net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
            optimizers = _optimizers(program["optimizer"], net)
            model = DistributedDataParallel(
                net,
                find_unused_parameters=program["unused"],
                gradient_as_bucket_view=program["views"],
            )
            if program["frozen"] is not None and program["unused"]:
                self._part(net, program["frozen"]).requires_grad_(False)
            if program["rank 0 wraps"] and rank == 0:
                _wrap_step(optimizers[0])
            self.models.append(model)
            self.optimizers.append(optimizers)
        self.armed: set[int] = (
            set()
        )  # models of which a forward was synchronised, without a backward
        self.kept: dict[str, Any] = {}
        self.saved: list[Any] = []
        if not program["begin"]:
            self.take_over()

    def take_over(self) -> None:
        """Evener's turn."""
        from evener.ddp import accelerate

        if self.way == "plain":
            return
        for i, model in enumerate(self.models):
            both = self.way != "line" and len(self.optimizers[i]) == 1
            mode = "exact" if self.way == "door" else self.program["mode"]
            accelerate(
                model,
                self.optimizers[i][0] if both else None,
                mode=mode,
                bucket_bytes=self.program["bucket_bytes"],
            )

    @staticmethod
    def _part(net: Net, which: int) -> nn.Module:
        return net.b if which else net.a[0]

    def data(self) -> torch.Tensor:
        """This rank's next batch; draws are counted alike on all ranks."""
        self.draws += 1
        return _drawn(7919 * self.program["seed"] + 2 * self.draws + self.rank, self.rows)

    def same(self) -> torch.Tensor:
        """A batch that all ranks have."""
        self.draws += 1
        return _drawn(104729 * self.program["seed"] + self.draws, self.rows)

    # --- a step ---

    def train(self) -> None:
        self.number = -1
        for _ in range(self.program["warm"]):
            for model, optimizers in zip(self.models, self.optimizers, strict=True):
                self.step(model, optimizers, WARM)
        for number, step in enumerate(self.program["steps"]):
            self.number = number
            if number == self.program["begin"] and number:
                self.take_over()
            if number == 3 and self.program["frozen"] is not None:
                for model in self.models:
                    self._part(model.module, self.program["frozen"]).requires_grad_(True)
            if number == self.program["own"]:
                self._own()
            for model, optimizers in zip(self.models, self.optimizers, strict=True):
                self.step(model, optimizers, step)

    def _own(self) -> None:
        """DDP's own reducer takes over, as a planner may find it the fastest."""
        from evener.comm.planner.choose import LIBRARY, Choice, Decision
        from evener.comm.planner.trial import Way

        for model in self.models if self.way != "plain" else []:
            planner, reducer = model.evener_steps.planner, model.evener
            if planner is None or planner.forced is not None or model._evener_own.refusal():
                continue
            choices = tuple(Choice(LIBRARY, "exact", (0.0, 1.0, 0.0)) for _ in reducer.exchanges)
            decision = Decision(choices, tuple(reducer.sequence), False, 1.0, 1.0, 1.0)
            planner._take(Way("own", decision))

    def step(self, model: Any, optimizers: list[Optimizer], step: dict[str, Any]) -> None:
        net = model.module
        inner, self.rows = step.get("inner", ""), step.get("rows", ROWS)
        use = [self.program["unused"] is False or bool(u) for u in step["use"]]
        zero = step["zero"]
        if zero in ("none", "zeros"):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zero == "none")
        elif zero == "model":
            model.zero_grad()
        elif zero == "by hand":
            for parameter in net.parameters():
                parameter.grad = None
        for _ in range(0 if id(model) in self.armed else step["accumulate"]):
            with model.no_sync():
                model(self.data(), use[self.rank]).square().mean().backward()
        loss = self.loss(model, use[self.rank], inner)
        if zero == "late":
            model.zero_grad()
        if loss.requires_grad:
            loss.backward()
            self.armed.discard(id(model))
        else:
            self.armed.add(id(model))
        self.log.append(loss.detach().clone())
        for act in step["between"]:
            self.act(model, optimizers, act)
        if step["clip"]:
            self.log.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if not step["skip"]:
            for optimizer in optimizers:
                optimizer.step()
        for act in step["after"]:
            self.act(model, optimizers, act)

    def loss(self, model: Any, use: bool, inner: str) -> torch.Tensor:
        """The loss on the next batch. "penalty" adds WGAN-GP's penalty on the inputs' gradient."""
        if inner != "penalty" or self.program["model"] == "attention":  # has no second derivative
            return model(self.data(), use, inner).square().mean()
        x = self.data().requires_grad_()
        y = model(x, use)
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return y.square().mean() + slope.square().mean()

    def act(self, model: Any, optimizers: list[Optimizer], act: list[Any]) -> None:
        """What happens between steps, or between backward and step."""
        name, *args = act
        net, key = model.module, str(self.models.index(model))
        mine = bool(args) and args[0] in (2, self.rank)
        if name == "around" and self.program["unused"]:
            return  # plain DDP that looks for unused parameters counts it, and may fail next
        if "kept grads" in name and self.program["views"]:
            return  # with plain DDP they are the buckets of later steps: docs/reference/limits.md
        parameters = list(net.parameters())
        optimizer = optimizers[0]
        if name == "freeze" and self.program["unused"]:
            self._part(net, args[0]).requires_grad_(False)
        elif name == "thaw":
            self._part(net, args[0]).requires_grad_(True)
        elif name == "restart":
            for value in self._values(optimizers):
                value.zero_()
        elif name == "edit state":
            for value in self._values(optimizers)[::2]:
                value.mul_(0.5)
        elif name == "replace state":
            optimizer.state = collections.defaultdict(dict)
        elif name == "keep state":
            self.kept["state" + key] = self._values(optimizers)
        elif name == "scale kept state":
            for value in self.kept.get("state" + key, []):
                value.mul_(0.5)
        elif name == "keep grads":
            self.kept["grads" + key] = [p.grad for p in parameters if p.grad is not None]
        elif name == "keep flat grads":
            self.kept["grads" + key] = [p.grad.view(-1) for p in parameters if p.grad is not None]
        elif name == "zero kept grads":
            for grad in self.kept.get("grads" + key, []):
                grad.zero_()
        elif name == "sum kept grads":
            self.log += [g.double().sum() for g in self.kept.get("grads" + key, [])]
        elif name == "drop kept grads":
            self.kept.pop("grads" + key, None)
        elif name == "keep data":
            self.kept["data" + key] = [p.data for p in parameters]
        elif name == "sum kept data":
            self.log += [d.double().sum() for d in self.kept.get("data" + key, [])]
        elif name == "read grad":
            self.log += [p.grad.clone() for p in parameters[:3] if p.grad is not None]
        elif name == "around" and id(model) not in self.armed:
            x = self.same() if args[0] == 2 else self.data()
            if mine:
                with torch.enable_grad():
                    loss = net(x).square().sum()
                if loss.requires_grad:
                    loss.backward()
            if args[0] != 2:  # its rank alone has that: gone, before it makes the ranks differ
                for parameter in parameters:
                    parameter.grad = None
        elif name == "input gradient":
            self.armed.add(id(model))
            x = self.data().requires_grad_()
            self.log.append(torch.autograd.grad(model(x).square().mean(), x)[0])
        elif name == "weight gradient":
            self.armed.add(id(model))
            loss, weights = model(self.data()).square().mean(), list(net.head.parameters())
            self.log += torch.autograd.grad(loss, [w for w in weights if w.requires_grad])
        elif name == "backward to inputs":
            self.armed.add(id(model))
            x = self.data().requires_grad_()
            model(x).square().mean().backward(inputs=[x])
            self.log.append(x.grad)
        elif name == "raise in backward":
            self.armed.add(id(model))
            y = model(self.data())
            if y.requires_grad:
                y.register_hook(_raise)
                with contextlib.suppress(ArithmeticError):
                    y.square().mean().backward()
        elif name == "evaluate":
            x = self.same()
            if mine and self.program["model"] != "norm":
                model.eval()
                with torch.no_grad():
                    self.log.append(model(x).double().sum())
                model.train()
        elif name == "evaluate with gradients":
            x = self.same()
            # In its second forward plain DDP lays its buckets out anew, with all ranks.
            if mine and self.number > 2 and self.program["model"] != "norm":
                self.log.append(model(x).detach().double().sum())
            self.armed.add(id(model))
            dist.barrier()
        elif name == "save":
            file = io.BytesIO()
            state = [model.state_dict(), [o.state_dict() for o in optimizers]]
            torch.save(state, file)
            self.saved.append((key, file.getvalue()))
        elif name == "roll back":
            found = [data for of, data in self.saved if of == key]
            if found:
                weights, states = torch.load(io.BytesIO(found[0]))
                model.load_state_dict(weights)
                for one, state in zip(optimizers, states, strict=True):
                    one.load_state_dict(state)
        elif name == "copy":
            made = copy.deepcopy(net)
            with torch.no_grad():
                self.log.append(made.eval()(self.same()).double().sum())
            self.log += [
                v.double().sum()
                for v in copy.deepcopy(optimizer).state_dict()["state"].get(0, {}).values()
                if torch.is_tensor(v)
            ]
        elif name == "vector":
            self.log.append(nn.utils.parameters_to_vector(parameters).double().sum().detach())
        elif name == "raise in forward":
            net.raises = True
            with contextlib.suppress(ArithmeticError):
                model(self.data())
            net.raises = False
        elif name == "raise in loss":
            self.armed.add(id(model))
            model(self.data())  # and what follows it does not happen
        elif name == "lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        elif name == "add to weights":
            with torch.no_grad():
                for parameter in parameters[::2]:
                    parameter.add_(0.01)
        elif name == "ema":
            now = [p.detach().clone() for p in parameters]
            before = self.kept.get("ema" + key, now)
            self.kept["ema" + key] = [0.9 * a + 0.1 * b for a, b in zip(before, now, strict=True)]

    @staticmethod
    def _values(optimizers: list[Optimizer]) -> list[torch.Tensor]:
        # In the order of parameters: the first update of each adds its state, in any order.
        return [
            value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for value in optimizer.state.get(parameter, {}).values()
            if torch.is_tensor(value) and value.is_floating_point() and value.dim()
        ]

    def result(self) -> dict[str, torch.Tensor]:
        """Logs, weights, buffers, state."""
        found = {f"log {i}": value.detach().clone() for i, value in enumerate(self.log)}
        for i, model in enumerate(self.models):
            found |= {f"{i} {k}": v.clone() for k, v in model.module.state_dict().items()}
            for j, optimizer in enumerate(self.optimizers[i]):
                for index, state in optimizer.state_dict()["state"].items():
                    for name, value in state.items():
                        if torch.is_tensor(value):
                            found[f"{i} state {j} {index} {name}"] = value.clone()
        for name, values in self.kept.items():
            if name.startswith("ema"):
                found |= {f"{name} {i}": v for i, v in enumerate(values)}
        return found


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("as it happens")
