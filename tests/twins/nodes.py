"""Nodes that come and go, and the same rounds carried out in one process without hub or messages.

The reference has plain modules, one for each node, and shared weights. It is told the membership
(who lives, who is left out, the slot of each) and makes the outer step by its formula: changes
in the order of slots, weighted by steps, in a form as its codec's definition has it. Evener's side
is a hub and nodes that talk over TLS. All weights and buffers must be equal bit for bit after each
action, whatever happened: deaths before and after a change was sent, torn messages, nodes that are
silent for a round, wrong bits, births in the middle, a hub that is killed and started again. With
overlap a round ends while its nodes go on, and they take its average some steps later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn

from evener.comm.codecs import int4, int8
from evener.comm.hub import frames
from evener.comm.hub.rounds import NodeRounds
from evener.comm.options import Options
from evener.errors import EvenerError, UsageError
from tests.hubs import LiveHub, until
from tests.twins._nodes_faults import FAULTS
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin, often

MOST = 4  # nodes that live at a time


def net_of(program: Program, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    width = program["width"]
    norm = nn.BatchNorm1d(width) if program["norm"] else nn.LayerNorm(width)
    net = nn.Sequential(nn.Linear(5, width), norm, nn.Tanh(), nn.Linear(width, 3))
    return net.to(getattr(torch, program["dtype"]))


def optimizer_of(program: Program, net: nn.Module) -> torch.optim.Optimizer:
    if program["optimizer"] == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-2)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Trainee:
    """A node's program."""

    def __init__(self, program: Program, seed: int) -> None:
        self.seed, self.count = seed, 0
        self.net = net_of(program, seed)
        self.optimizer = optimizer_of(program, self.net)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.count)
        self.count += 1
        dtype = next(self.net.parameters()).dtype
        x = torch.randn(4, 5, generator=generator).to(dtype)
        self.net(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        return [*(p.detach() for p in self.net.parameters()), *self.floats()]

    def floats(self) -> list[torch.Tensor]:
        return [b for b in self.net.buffers() if b.is_floating_point()]


class Plain(Trainee):
    """A node of the reference. `behind`: its next step is for nothing, and the shared weights
    follow. `sent`: weights, buffers and steps of the change that is on its way.
    """

    sent: tuple[list[torch.Tensor], list[torch.Tensor], int] | None = None

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program, seed)
        self.since, self.behind = 0, False
        large = sum(p.numel() for p in self.net.parameters() if p.dim() > 1)
        self.residual = torch.zeros(large)


class Reference:
    """Shared weights, momentum and buffers, and the outer step by its formula."""

    def __init__(self, program: Program, first: Plain) -> None:
        self.program, self.round = program, 0
        self.weights = [p.detach().float().clone() for p in first.net.parameters()]
        self.momentum = [torch.zeros_like(w) for w in self.weights]
        self.buffers = [b.clone() for b in first.floats()]
        self.residual = torch.zeros_like(first.residual)

    @torch.no_grad()
    def take(self, node: Plain) -> None:
        """The node goes on from the shared weights."""
        for parameter, weight in zip(node.net.parameters(), self.weights, strict=True):
            parameter.copy_(weight)
        for buffer, value in zip(node.floats(), self.buffers, strict=True):
            buffer.copy_(value)
        node.since, node.behind, node.sent = 0, False, None
        node.residual.zero_()

    @torch.no_grad()
    def land(self, node: Plain) -> None:
        """The node keeps how far it went since it sent its change."""
        if node.sent is None:
            return
        for parameter, weight, sent in zip(
            node.net.parameters(), self.weights, node.sent[0], strict=True
        ):
            parameter.copy_(weight + (parameter.float() - sent.float()))
        for buffer, value in zip(node.floats(), self.buffers, strict=True):
            buffer.copy_(value)
        node.sent = None

    @torch.no_grad()
    def change(self, node: Plain, weights: list[torch.Tensor], slot: int) -> list[torch.Tensor]:
        pairs = zip(self.weights, weights, strict=True)
        parts = [w.to(p.dtype).float() - p.float() for w, p in pairs]
        return self.coded(parts, node.residual, (self.round, slot))

    def coded(
        self, parts: list[torch.Tensor], residual: torch.Tensor, key: tuple[int, int]
    ) -> list[torch.Tensor]:
        """What arrives of a change."""
        form = self.program["form"]
        if form == "exact":
            return parts
        large = [i for i, part in enumerate(parts) if part.dim() > 1]
        flat = torch.cat([parts[i].flatten() for i in large])
        if form in ("bf16", "fp16"):
            flat = flat.to(torch.bfloat16 if form == "bf16" else torch.float16).float()
        elif form == "int8":
            room = int8.room(flat.numel())
            codes = torch.empty(room, dtype=torch.int8)
            scales = torch.empty(room // int8.BLOCK)
            int8.quantize_reference(flat, residual, codes, scales, int8.key(*key))
            flat = torch.empty_like(flat)
            int8.dequantize_sum_reference(codes[None], scales[None], 1.0, flat)
        else:
            room = int4.room(flat.numel())
            codes, scales = torch.empty(room // 2, dtype=torch.uint8), torch.empty(room // 256)
            int4.quantize_reference(flat, residual, codes, scales)
            flat = torch.empty_like(flat)
            int4.dequantize_sum_reference(codes[None], scales[None], 1.0, flat)
        found, at = list(parts), 0
        for i in large:
            n = parts[i].numel()
            found[i] = flat[at : at + n].view(parts[i].shape)
            at += n
        return found

    @torch.no_grad()
    def close(self, counted: list[tuple[tuple[int, int], Plain]]) -> None:
        """A round ends: changes of `counted`, by slot and number."""
        total = [torch.zeros_like(w) for w in self.weights]
        buffers = [torch.zeros_like(b, dtype=torch.float32) for b in self.buffers]
        steps = 0
        for (slot, _), node in sorted(counted, key=lambda each: each[0]):
            assert node.sent is not None
            weights, own, count = node.sent
            for into, part in zip(total, self.change(node, weights, slot), strict=True):
                into += part * count
            for into, value in zip(buffers, own, strict=True):
                into += value.float() * count
            steps += count
        mean = self.coded([part / steps for part in total], self.residual, (self.round, -1))
        self.buffers = [b / steps for b in buffers]
        lr, mu = self.program["lr"], self.program["momentum"]
        for weight, momentum, part in zip(self.weights, self.momentum, mean, strict=True):
            momentum.copy_(mu * momentum + part)
            weight.copy_(weight - lr * (part + mu * momentum))
        self.round += 1


class Node:
    """Evener's node and the reference's, which take the same steps."""

    def __init__(self, program: Program, hub: LiveHub, name: str, seed: int) -> None:
        self.name, self.plain = name, Plain(program, seed)
        self.ours = Trainee(program, seed)
        self.overlap = program["overlap"]
        options = Options(
            every=10**6,
            overlap=self.overlap,
            timeout=30.0,
            wire=program["form"],
            outer_lr=program["lr"],
            outer_momentum=program["momentum"],
        )
        self.rounds = NodeRounds(list(self.ours.net.named_parameters()), self.ours.net, options)
        self.place = hub.place(name)

    @property
    def link(self) -> Any:
        return self.rounds._link

    def begin(self) -> None:
        self.rounds.begin(self.place)

    def step(self, reference: Reference) -> None:
        if self.overlap and self.plain.behind:
            # Called before it has heard that the round is over, it would send what it has.
            came = self.link.events
            until(lambda: self.has(reference) or not came.empty(), "it hears of a round")
        self.ours.step()
        self.rounds.stepped()
        if self.overlap and self.plain.behind:
            until(lambda: (self.hear(), self.has(reference))[1], "it takes the shared weights")
        elif self.rounds._said == self.link.session > self.rounds._entered:
            until(lambda: not self.link.events.empty(), "the hub answers")
            self.hear()
        self.plain.step()
        self.plain.since += 1
        if self.plain.behind:
            reference.take(self.plain)
        elif self.plain.since >= self.overlap:
            reference.land(self.plain)

    def has(self, reference: Reference) -> bool:
        """Whether it has the shared weights of this round."""
        return bool(self.rounds._shared.round == reference.round)

    def hear(self) -> None:
        """What the end of a step would have it hear and say."""

        def act() -> None:
            self.rounds._handle()
            self.rounds._say()

        self.rounds._lead(act)

    def depart(self, reference: Reference) -> None:
        """Send a change, which is of no round yet."""
        reference.land(self.plain)
        parameters = [p.detach().clone() for p in self.plain.net.parameters()]
        buffers = [b.clone() for b in self.plain.floats()]
        self.plain.sent, self.plain.since = (parameters, buffers, self.plain.since), 0

    def departs(self) -> None:
        """As a step of Evener's, after which it is time."""

        def act() -> None:
            self.rounds._land()
            self.rounds._depart()

        self.rounds._lead(act)

    def die(self) -> None:
        self.link.refused = UsageError("killed", "")
        self.link.again()

    def compare(self) -> None:
        for a, b in zip(self.ours.tensors(), self.plain.tensors(), strict=True):
            assert torch.equal(a, b), f"node {self.name}: weights or buffers differ"
        assert self.rounds.since == self.plain.since, f"node {self.name} counts other steps"


class Job:
    """A program: the hub, its nodes, and the reference."""

    def __init__(self, program: Program) -> None:
        self.program, self.born = program, 0
        self.least = min(program["least"], program["nodes"])
        self.hub = LiveHub(self.least, slots=3)
        self.nodes: list[Node] = []
        try:
            self.nodes = [self._made() for _ in range(program["nodes"])]
            self.together([node.begin for node in self.nodes])
            begins = next(line for line in self.hub.said if "begins with" in line)
            first = next(n for n in self.nodes if begins.endswith(f"node {n.name}"))
            self.plain = Reference(program, first.plain)
            for node in self.nodes:
                self.plain.take(node.plain)
        except BaseException:
            self.end()
            raise

    def _made(self) -> Node:
        self.born += 1
        return Node(self.program, self.hub, f"n{self.born}", self.program["seed"] + self.born)

    def end(self) -> None:
        for node in self.nodes:
            node.die()
        self.hub.stop()

    @staticmethod
    def together(acts: list[Callable[[], None]]) -> None:
        errors: list[Exception] = []

        def run(act: Callable[[], None]) -> None:
            try:
                act()
            except (EvenerError, AssertionError) as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "an exchange hangs"
        if errors:
            raise errors[0]

    def member(self, node: Node) -> Any:
        members = list(self.hub.membership.members.values())
        return next((m for m in members if m.name == node.name), None)

    def slot(self, node: Node) -> tuple[int, int]:
        """Where its change stands in the sum."""
        member = self.member(node)
        return member.slot, member.number

    def place(self, node: Node) -> str:
        member = self.member(node)
        return "" if member is None else str(member.place)

    # --- actions ---

    def do_birth(self) -> None:
        if len(self.nodes) < MOST:
            node = self._made()
            self.nodes.append(node)
            node.begin()
            self.plain.take(node.plain)

    def do_leave(self, which: int) -> None:
        if len(self.nodes) > 1:
            node = self.nodes.pop(which % len(self.nodes))
            self.hear()
            node.rounds.close()
            until(lambda: self.member(node) is None, "it leaves")

    def do_blip(self, which: int) -> None:
        """A connection ends and comes back."""
        self.hear()
        node = self.nodes[which % len(self.nodes)]
        session = node.link.session
        node.link.again()
        until(lambda: node.link.session > session and self.place(node) == "guest", "it is back")
        self._knows(node)

    def do_hub(self) -> None:
        """The hub is killed and started again.

        Not where all are behind: the new one would hear of the furthest weights after their next
        step.
        """
        if all(node.plain.behind for node in self.nodes):
            return
        self.hear()
        self.hub.stop()
        self.hub = LiveHub(min(self.least, len(self.nodes)), 3, self.hub.port)
        until(lambda: all(self.place(node) == "guest" for node in self.nodes), "all are back")
        until(lambda: self._as_far(), "the furthest weights are the hub's")
        for node in self.nodes:
            self._knows(node)
        self.plain.residual.zero_()

    def _knows(self, node: Node) -> None:
        """It hears that it is back: it may take steps before, and then a round ends without it. One
        that is behind hears with its next step, as the reference does.
        """
        if not node.plain.behind:
            until(
                lambda: (node.hear(), node.rounds._ready == node.link.session)[1],
                "it knows that it is back",
            )

    def _as_far(self) -> bool:
        claim = self.hub.membership.shared
        return claim is not None and claim.round == self.plain.round

    def hear(self) -> None:
        """All that are in a round hear that it has ended."""
        for node in self.nodes:
            if node.plain.sent is not None:
                until(lambda n=node: (n.hear(), n.has(self.plain))[1], "it hears of a round")

    def do_land(self) -> None:
        """Before a checkpoint: nothing is on its way any more."""
        for node in self.nodes:
            if node.plain.sent is not None:
                self.plain.land(node.plain)
                node.rounds.land()

    def do_round(self, steps: list[int], which: int, fault: str, waits: bool) -> None:
        while len(self.nodes) < self.hub.membership.need:
            self.do_birth()
        alone = len(self.nodes) == 1
        victim = self.nodes[which % len(self.nodes)]
        for node, count in zip(self.nodes, steps, strict=False):
            for _ in range(count):
                node.step(self.plain)
        self.compare()
        enough = len(self.nodes) > self.hub.membership.need
        takes_part = victim.plain.since > 0
        counted = {n.name for n in self.nodes if n.plain.since}
        there = [n for n in self.nodes if n.plain.since]
        slots: dict[str, tuple[int, int]] = {}
        acting, waiting = list(there), []
        if not takes_part or alone:
            fault = ""
        if fault in ("dies", "dies late", "silent", "misses") and not enough:
            fault = ""
        if len([n for n in there if n is not victim]) < self.hub.membership.need:
            fault = fault if fault in ("torn", "again") else ""
        behind = bool(self.program["overlap"]) and not waits
        for node in there:
            if not (node is victim and fault in ("dies", "silent")):
                node.depart(self.plain)
        if fault == "dies":
            victim.die()
            until(lambda: self.member(victim) is None, "the hub sees the death")
            counted.discard(victim.name)
        elif fault == "dies late":
            waiting += self._ahead(victim, behind, dies=True)
            until(lambda: self._brought(victim), "its change is there")
            slots[victim.name] = self.slot(victim)
            victim.die()
            until(lambda: self.member(victim) is None, "the hub sees the death")
        elif fault == "again":
            waiting += self._ahead(victim, behind)
            until(lambda: self._brought(victim), "its change is there")
            victim.link.again()
            until(lambda: victim.link.session == self._session + 1, "it is back")
            until(lambda: self._brought(victim, behind), "its change came again")
        elif fault == "torn":
            with mock.patch.object(frames, "write", _torn(victim, frames.write)):
                waiting += self._ahead(victim, behind)
                until(lambda: victim.link.session == self._session + 1, "it is back")
            until(lambda: self._brought(victim, behind), "it came whole")
        elif fault == "misses":
            waiting += self._ahead(victim, True)
            until(lambda: self._brought(victim), "its change is there")
            slots[victim.name] = self.slot(victim)
            self._silence(victim)
        elif fault == "digest":
            self.hear()
            victim.rounds._shared.momentum.view(torch.int32)[0] ^= 1
            if behind:
                victim.departs()
                until(lambda: (victim.hear(), not victim.rounds._flight)[1], "it is left out")
            else:
                victim.rounds.exchange()
            counted.discard(victim.name)
            self.plain.take(victim.plain)
        elif fault == "silent":
            self._silence(victim)
            counted.discard(victim.name)
        apart = fault in ("dies late", "again", "torn", "misses")
        acting = [n for n in there if n.name in counted and not (n is victim and apart)]
        if not counted:
            return
        slots |= {node.name: self.slot(node) for node in acting}
        slots |= {victim.name: self.slot(victim)} if fault in ("torn", "again") else {}
        if behind:
            for node in acting:
                node.departs()
        else:
            self.together([node.rounds.exchange for node in acting])
        for thread in waiting:
            thread.join(60)
            assert not thread.is_alive(), "an exchange hangs"
        if behind:  # also where nobody waits for it
            until(lambda: self._ends(acting), "the round ends")
        self.plain.close([(slots[n.name], n.plain) for n in there if n.name in counted])
        if fault in ("dies", "dies late"):
            self.nodes.remove(victim)
        for node in self.nodes:
            if node.name not in counted:
                node.plain.behind, node.plain.sent = True, None
            elif not behind:
                self.plain.land(node.plain)
        if fault == "silent":
            self._speak(victim)
        elif fault == "misses":
            self._speak(victim)
            until(lambda: (victim.hear(), not victim.rounds._flight)[1], "it takes the weights")
            self.plain.take(victim.plain)

    def _ends(self, acting: list[Node]) -> bool:
        """Whether the round has ended while these go on."""
        for node in acting:
            node.hear()
        shared = self.hub.membership.shared
        return shared is not None and shared.round > self.plain.round

    def _brought(self, node: Node, hears: bool = False) -> bool:
        """Whether its change is at the hub. `hears`: it takes steps meanwhile."""
        if hears:
            node.hear()
        return getattr(self.member(node), "brought", None) is not None

    def _ahead(self, node: Node, behind: bool, dies: bool = False) -> list[threading.Thread]:
        """Its exchange, begun before those of the others. `behind`: it goes on at once."""
        self._session = node.link.session
        if behind:
            node.departs()
            return []

        def run() -> None:
            with contextlib.suppress(EvenerError) if dies else contextlib.nullcontext():
                node.rounds.exchange()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return [thread]

    def _silence(self, node: Node) -> None:
        """Nothing is heard of it, and it cannot connect."""
        node.link.place = dataclasses.replace(node.place, port=9)
        member = self.member(node)
        # At once: else a word of it may come before the hub looks.
        self.hub.call(lambda: (setattr(member, "heard", -1e9), self.hub.hub.look()))
        until(lambda: self.member(node) is None, "it is left out")
        until(lambda: node.link.lost_at is not None, "it sees the end of its connection")

    def _speak(self, node: Node) -> None:
        received = node.link.received
        node.link.place = dataclasses.replace(node.place, port=self.hub.port)
        until(lambda: node.link.received > received, "it hears of the shared weights")

    def compare(self) -> None:
        for node in self.nodes:
            node.compare()


def _torn(victim: Node, whole: Any) -> Any:
    """The victim's next change ends in its middle."""
    done: list[bool] = []

    async def write(writer: Any, fields: Any, payload: Any = b"") -> None:
        mine = threading.current_thread() is victim.link._thread
        if mine and fields["is"] == "change" and not done:
            done.append(True)
            cut = memoryview(bytes(payload))[: len(payload) // 2]
            raw = {**fields}
            sent = bytearray()

            class Half:
                def write(self, data: Any) -> None:
                    sent.extend(data)

                async def drain(self) -> None:
                    await asyncio.sleep(0)

            await whole(Half(), raw, payload)
            writer.write(bytes(sent[: len(sent) - len(cut) - 1]))
            await writer.drain()
            writer.transport.abort()
            return
        await whole(writer, fields, payload)

    return write


def run(_rank: int, _size: int, program: Program, fault: str) -> None:
    """All nodes are in this process. Raises where something differs."""
    os.environ.update(EVENER_TIMEOUT="30", EVENER_LOG="error")
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        job = Job(program)
        try:
            # One that was left out last takes part again in the second.
            last = ["round", [1] * MOST, 0, "", False]
            for kind, *given in [*program["steps"], last, last, ["land"]]:
                getattr(job, f"do_{kind}")(*given)
                job.compare()
        finally:
            job.end()


_switch = Switch()
_world = functools.cache(lambda: Ranks(1, timeout=120))


def check(program: Program) -> None:
    """Run it in a process with a group of one rank."""
    _world().run("tests.twins.nodes:run", program, _switch.fault)


_steps = st.lists(st.integers(1, 3), min_size=MOST, max_size=MOST)
_which = st.integers(0, MOST - 1)
_round = st.tuples(
    st.just("round"),
    _steps,
    _which,
    st.sampled_from(["", "", "dies", "dies late", "again", "torn", "misses", "digest", "silent"]),
    st.booleans(),
).map(list)
ACTIONS = often(
    _round,
    _round,
    _round,
    _round,
    st.just(["land"]),
    st.just(["birth"]),
    st.tuples(st.just("leave"), _which).map(list),
    st.tuples(st.just("blip"), _which).map(list),
    st.just(["hub"]),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 9),
        "width": st.sampled_from([1, 7, 40]),
        "norm": st.booleans(),
        "dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
        "optimizer": st.sampled_from(["sgd", "adamw"]),
        "lr": st.sampled_from([0.7, 1.0, 0.5]),
        "momentum": st.sampled_from([0.9, 0.9, 0.0]),
        "overlap": st.sampled_from([0, 1, 2, 4]),
        "form": st.sampled_from(["exact", "exact", "bf16", "fp16", "int8", "int8", "int4"]),
        "least": st.sampled_from([1, 1, 2]),
        "nodes": st.sampled_from([1, 2, 3, 3]),
        "steps": st.lists(ACTIONS, min_size=1, max_size=7),
    }
)
TWIN = Twin(
    name="nodes",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=40,
)
