"""What a table of rows that come and go must equal: a dense torch parameter of all keys, stepped by
torch's own optimizers. The twins of tables on one rank, of several and on the device share it.

The reference holds every key that a program may use as a row of one dense weight. A row that the
store would not have (never admitted, evicted, removed) has its first values and empty slots; a row
that a step does not see is put back after it. So the reference is torch's optimizer on a dict of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evener.embedding import (
    Adagrad,
    Adam,
    AdamW,
    Lamb,
    LazyAdam,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    Sgd,
)
from tests.embedding import formulas

torch.set_num_threads(1)  # rows of 3 numbers; threads would wait for each other
DIM, KEYS, LR, EPS, DECAY = 3, 10, 0.1, 1e-3, 0.2
UNIVERSE = torch.tensor([0, -1, 1, 2**62, -(2**62), 2**63 - 1, -(2**63), 77, -12345, 10**15])
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (Sgd(LR), lambda p: torch.optim.SGD(p, LR)),
    "sgd decay": (Sgd(LR, DECAY), lambda p: torch.optim.SGD(p, LR, weight_decay=DECAY)),
    "adagrad": (Adagrad(LR, EPS), lambda p: torch.optim.Adagrad(p, LR, eps=EPS)),
    "adagrad decay": (
        Adagrad(LR, EPS, weight_decay=DECAY),
        lambda p: torch.optim.Adagrad(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "adam": (Adam(LR, eps=EPS), lambda p: torch.optim.Adam(p, LR, eps=EPS)),
    "adam decay": (
        Adam(LR, eps=EPS, weight_decay=DECAY),
        lambda p: torch.optim.Adam(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "adam_w": (
        AdamW(LR, eps=EPS, weight_decay=DECAY),
        lambda p: torch.optim.AdamW(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "row_wise_adagrad": (
        RowWiseAdagrad(LR, EPS, DECAY),
        lambda p: formulas.RowWiseAdagrad(p, LR, eps=EPS, weight_decay=DECAY, decoupled=False),
    ),
    "row_wise_adagrad decoupled": (
        RowWiseAdagrad(LR, EPS, DECAY, decoupled=True),
        lambda p: formulas.RowWiseAdagrad(p, LR, eps=EPS, weight_decay=DECAY, decoupled=True),
    ),
    "partial_row_wise_adam": (
        PartialRowWiseAdam(LR, eps=EPS, weight_decay=DECAY),
        lambda p: formulas.PartialRowWiseAdam(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "lamb": (
        Lamb(LR, eps=EPS, weight_decay=DECAY),
        lambda p: formulas.Lamb(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "lazy_adam": (LazyAdam(LR, eps=EPS), lambda p: torch.optim.SparseAdam(p, LR, eps=EPS)),
}


@dataclass
class Saved:
    """What the reference has, all of it."""

    weight: torch.Tensor
    slots: dict[str, torch.Tensor]
    there: torch.Tensor
    version: torch.Tensor
    counts: dict[int, int]
    steps: int
    step: int
    aged: int


@dataclass
class Reference:
    """A dense weight, and what admission and expiry do to its rows."""

    kind: str
    count: int
    life: int
    start: torch.Tensor
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.weight = nn.Parameter(self.start.clone())
        self.optimizer = OPTIMIZERS[self.kind][1]([self.weight])
        self.there = torch.zeros(KEYS, dtype=torch.bool)
        self.version = torch.zeros(KEYS, dtype=torch.int64)
        self.counts: dict[int, int] = {}
        self.fresh: set[int] = set()  # counts of the generation that is now
        self.steps = self.step = self.aged = 0

    def slots(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[self.weight]
        return {k: v for k, v in state.items() if torch.is_tensor(v) and v.ndim == 2}

    def begin(self, at: int) -> None:
        """A row that is not there."""
        self.there[at] = False
        with torch.no_grad():
            self.weight[at] = self.start[at]
            for slot in self.slots().values():
                slot[at] = 0

    def insert(self, at: int) -> None:
        self.there[at] = True
        self.version[at] = self.step

    def look(self, ids: list[int], train: bool) -> None:
        for at in ids if train else ():
            if self.there[at]:
                continue
            n = self.counts.pop(at, 0) + 1
            self.fresh.discard(at)
            if n >= self.count:
                self.insert(at)
            else:
                self.counts[at] = n
                self.fresh.add(at)

    def forget(self) -> None:
        self.seen = set()
        self.weight.grad = None

    def apply(self) -> None:
        """One step of torch's optimizer."""
        if self.count < 2:
            for at in self.seen:
                if not self.there[at]:
                    self.insert(at)
        seen = torch.zeros(KEYS, dtype=torch.bool)
        seen[[at for at in self.seen if self.there[at]]] = True
        given = self.weight.grad
        gradient = torch.zeros_like(self.weight) if given is None else given.detach().clone()
        gradient[~seen] = 0
        before = self.weight.detach().clone()
        slots = {name: slot.clone() for name, slot in self.slots().items()}
        if self.kind == "lazy_adam":
            at = seen.nonzero().T
            gradient = torch.sparse_coo_tensor(at, gradient[seen], gradient.shape).coalesce()
        self.weight.grad = gradient
        self.optimizer.step()
        with torch.no_grad():
            self.weight[~seen] = before[~seen]
            for name, slot in self.slots().items():
                old = slots.get(name, torch.zeros_like(slot))
                fade = 1.0
                if self.kind.startswith("adam") and not self.kind.startswith("adam_w"):
                    fade = {"exp_avg": 0.9, "exp_avg_sq": 0.999}[name]
                slot[~seen] = old[~seen] * fade
                slot[~self.there] = 0
        self.version[seen] = self.step
        self.forget()
        self.steps += 1
        self.step += 1

    def evict(self) -> None:
        for at in range(KEYS):
            if self.there[at] and self.step - int(self.version[at]) > self.life:
                self.begin(at)
        if self.step - self.aged >= self.life:
            self.aged = self.step
            self.counts = {at: n for at, n in self.counts.items() if at in self.fresh}
            self.fresh = set()

    def saved(self) -> Saved:
        return Saved(
            self.weight.detach().clone(),
            {name: slot.clone() for name, slot in self.slots().items()},
            self.there.clone(),
            self.version.clone(),
            dict(self.counts),
            self.steps,
            self.step,
            self.aged,
        )

    def load(self, saved: Saved) -> None:
        self.forget()
        with torch.no_grad():
            self.weight.copy_(saved.weight)
        state = self.optimizer.state[self.weight]
        for name, slot in self.slots().items():
            slot.copy_(saved.slots.get(name, torch.zeros_like(slot)))
        if "step" in state:
            if torch.is_tensor(state["step"]):
                state["step"].fill_(float(saved.steps))
            else:
                state["step"] = saved.steps
        self.there = saved.there.clone()
        self.version = saved.version.clone()
        self.counts, self.fresh = dict(saved.counts), set(saved.counts)
        self.steps, self.step, self.aged = saved.steps, saved.step, saved.aged


def near(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape, f"{what}: {list(found.shape)}, not {list(right.shape)}"
    if found.numel():
        off = (found.detach() - right.detach()).abs().max()
        assert off <= 2e-5 * (1 + right.detach().abs().max()), f"{what}: off by {float(off):.2g}"
