"""Embeddings taken apart: the same training as DDP's, whatever else the script does with them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evener.comm import lookups, wires
from evener.comm.buckets import Bucket, Buckets
from evener.comm.errors import CommError
from evener.comm.exchange import Step
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.parts import fewer_whole
from evener.comm.planner.costs import Costs, Curve
from evener.comm.profile import StepProfile
from evener.comm.rows import Rows, RowsExchange, merged
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models, scripts
from tests.comm.scripts import accumulation, clipping, heard, keeps_zeros, plain, two_backwards

SYMBOLS, WIDTH = 151, 6
ENV = {"EVENER_ROWS_THRESHOLD": "1"}


class Words(nn.Module):
    """`tied`: the output's weight is the embedding's. `extra`: used in some steps only."""

    def __init__(self, tied: bool, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH, **embedding)
        self.extra = nn.Embedding(SYMBOLS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, SYMBOLS)
        if tied:
            self.output.weight = self.embed.weight

    def forward(self, x: torch.Tensor, how: frozenset[str] = frozenset()) -> torch.Tensor:
        if "recomputed" in how or "reentrant" in how:
            one = torch.ones((), requires_grad=True)  # a reentrant one needs an input with gradient
            return checkpoint(self.all, x, how, one, use_reentrant="reentrant" in how)
        return self.all(x, how)

    def all(self, x: torch.Tensor, how: frozenset[str], one: Any = 1.0) -> torch.Tensor:
        y = self.embed(x) * one
        if "twice" in how:
            y = y + self.embed(x.flip(0) // 2)
        if "extra" in how:
            y = y + self.extra(x[:, :2]).mean(1, keepdim=True)
        y = y + self.mix(y).tanh()
        if "loose" in how:  # nobody sees these
            y = y + functional.embedding(x, self.embed.weight)
            y = y + 0.1 * functional.linear(y, self.embed.weight)[..., :WIDTH]
        if "layer twice" in how:
            y = y + 0.1 * self.output(y)[..., :WIDTH]
        return self.output(y)


def tokens(rank: int, step: int, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, SYMBOLS, (2, count // 2), generator=generator).to(models.device())


class Script(scripts.Script):
    """One training, by DDP alone (`mode` None) or accelerated."""

    steps = 6

    def __init__(self, rank: int, mode: str | None, **changes: Any) -> None:
        torch.manual_seed(5)
        super().__init__(
            rank, Words(changes.get("tied", True), **changes.get("embedding", {})), changes
        )
        self.model = DistributedDataParallel(
            self.module, find_unused_parameters=changes.get("find_unused", True)
        )
        if mode is not None:
            self.model = accelerate(
                self.model,
                self.optimizer if changes.get("overlapped", True) else None,
                mode=None if mode in ("exact", "whole") else mode,
                bucket_bytes=600,
                partition_bytes=1024,
            )
            parts = self.model.evener.parts
            parts.detach()
            if mode != "whole":  # layers too where all is exact, to see that the sums are right
                parts.watch(self.module, layers=True)
            agree, self.sent = parts.agree, []

            def agreed() -> None:
                agree()
                self.sent.append(max((part.most for part in parts.of.values()), default=0))

            parts.agree = agreed
            if mode not in ("auto", "whole", "exact"):
                # It would leave whole what is so small that nothing is gained by taking it apart.
                self.model.evener_steps.planner = None

    def loss(self, step: int, **given: Any) -> torch.Tensor:
        how = self.changes.get("how", "")
        how = how(step, self.rank) if callable(how) else how
        x = tokens(self.rank, step, self.changes.get("count", lambda *_: 12)(step, self.rank))
        output = self.model(x, frozenset(filter(None, how.split(","))))
        return functional.cross_entropy(output.flatten(0, 1), x.flatten())


def later_accumulation(s: Script) -> None:
    """The first steps do not tell that there will be any."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        if step > 2:
            with s.model.no_sync():
                s.loss(100 + step).backward()
        s.loss(step).backward()
        s.step()


def asks(s: Script) -> None:
    """Gradients that are asked for, not accumulated, are whole."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        loss = s.loss(step)
        (asked,) = torch.autograd.grad(loss, [s.module.embed.weight], retain_graph=True)
        s.log.append(asked.norm())
        loss.backward()
        s.step()


def double(s: Script) -> None:
    """A penalty on the gradient."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        loss = s.loss(step)
        (asked,) = torch.autograd.grad(loss, [s.module.embed.weight], create_graph=True)
        (loss + asked.square().sum()).backward()
        s.step()


def hooked(s: Script) -> None:
    handle = None
    for step in range(s.steps):
        s.optimizer.zero_grad()
        if step == 3:
            handle = s.module.embed.weight.register_hook(lambda g: 0.5 * g)
        if step == 5 and handle is not None:
            handle.remove()
        s.loss(step).backward()
        s.step()


def copies(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        copied = copy.deepcopy(s.module)
        copied(tokens(0, step)).square().mean().backward()
        s.log.append(copied.embed.weight.grad.norm())
        names = [name for name, _ in s.module.named_parameters()]
        assert names == [name for name, _ in copied.named_parameters()]


def raising(s: Script) -> None:
    """A module that fails is as it was before."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        with pytest.raises(RuntimeError):
            s.module.output(torch.zeros(3, WIDTH + 1, device=models.device()))
        with pytest.raises(IndexError):
            s.module.embed(torch.tensor([SYMBOLS]))
        assert isinstance(s.module.output.weight, nn.Parameter)
        assert isinstance(s.module.embed.weight, nn.Parameter)
        s.loss(step).backward()
        s.step()


Act = Callable[[Script], None]
ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.1}}
MOMENTUM = {"options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
UNTIED = {"tied": False}
# Name: what the script does, how it is made, and how many of the last steps went by rows.
CASES: dict[str, tuple[Act, dict[str, Any], int]] = {
    "tied": (plain, {}, 5),
    "untied": (plain, UNTIED, 5),
    "tied, momentum": (plain, MOMENTUM, 5),
    "untied, momentum": (plain, {**UNTIED, **MOMENTUM}, 5),
    "tied, AdamW": (plain, ADAMW, 5),
    "untied, AdamW": (plain, {**UNTIED, **ADAMW}, 5),
    "tied, no overlap": (plain, {"overlapped": False}, 5),
    "untied, no overlap": (plain, {**UNTIED, "overlapped": False}, 5),
    "all used": (plain, {"find_unused": False, "how": "extra"}, 5),
    "tied, padding": (plain, {"embedding": {"padding_idx": 0}}, 5),
    "untied, padding": (plain, {**UNTIED, "embedding": {"padding_idx": 0}}, 5),
    "max_norm": (plain, {**UNTIED, "embedding": {"max_norm": 1.0}}, 0),
    "by frequency": (plain, {**UNTIED, "embedding": {"scale_grad_by_freq": True}}, 0),
    "looked up twice": (plain, {"how": "twice"}, 5),
    "layer twice": (plain, {"how": "layer twice"}, 5),
    "other uses": (plain, {"how": "loose"}, 0),
    "untied, other uses": (plain, {**UNTIED, "how": "loose"}, 0),
    "some steps": (plain, {**UNTIED, "how": lambda step, _: "extra" if step % 2 else ""}, 5),
    "some ranks": (plain, {**UNTIED, "how": lambda _, rank: "extra" if rank else ""}, 5),
    "rows differ": (plain, {"count": lambda step, rank: 2 + 10 * rank + 2 * step}, 5),
    "nearly all rows": (plain, {"count": lambda step, _: 12 if step < 3 else 1000}, 5),
    "untied, nearly all rows": (
        plain, {**UNTIED, "count": lambda step, _: 12 if step < 3 else 1000}, 0,
    ),
    "all rows": (plain, {"count": lambda *_: 1000}, 0),
    "keeps zeros": (keeps_zeros, {}, 5),
    "untied, keeps zeros": (keeps_zeros, UNTIED, 0),
    "clipping": (clipping, {}, 5),
    "untied, clipping": (clipping, UNTIED, 5),
    "accumulation": (accumulation, {}, 5),
    "untied, accumulation": (accumulation, UNTIED, 0),
    "later accumulation": (later_accumulation, {}, 5),
    "untied, later accumulation": (later_accumulation, UNTIED, 0),
    "recomputed": (plain, {"how": "recomputed"}, 5),
    "reentrant": (plain, {"how": "reentrant,extra", "find_unused": False}, 0),
    "two backwards": (two_backwards, {}, 5),
    "untied, two backwards": (two_backwards, UNTIED, 5),
    "autograd.grad": (asks, {}, 5),
    "double backward": (double, {}, 5),
    "hooks": (hooked, {}, 5),
    "copies": (copies, {}, 5),
    "errors": (raising, {}, 5),
}  # fmt: skip


def train_all(rank: int, size: int, names: list[str], mode: str) -> dict[str, Any]:
    found = {}
    for name in names:
        act, changes, _ = CASES[name]
        results = []
        for kind in (None, mode):
            script = Script(rank, kind, **changes)
            act(script)
            results.append(script.result())
        ddp, ours = results
        assert ddp.keys() == ours.keys(), name
        apart = max(
            ((ours[key] - value).norm() / (1e-3 + value.norm())).item()
            for key, value in ddp.items()
        )
        same = [v.float().cpu().flatten() for k, v in ours.items() if not k.startswith("log")]
        equal = models.raw(torch.cat(same))
        everyone = [b""] * size
        dist.all_gather_object(everyone, equal)
        rows = script.sent
        behind = next((i for i, most in enumerate(reversed(rows)) if not most), len(rows))
        behind = min(behind, Script.steps - 1)  # the first step is whole
        # max_norm changes on each rank the rows that it looks up; a second backward is not reduced,
        # as with DDP.
        own = name == "max_norm" or "two backwards" in name
        found[name] = (apart, len(set(everyone)) == 1 or own, behind)
        script.model.evener_steps.finish("")
        script.model.evener.close()
    return found


CHUNKS = [list(CASES)[i::4] for i in range(4)]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("names", CHUNKS)
def test_trains_as_ddp_does(shape: tuple[int, ...], names: list[str]) -> None:
    if shape != (1, 1):
        names = names[::3]
    problems = []
    for found in worlds.run(shape, train_all, names, "exact", env=ENV):
        for name in names:
            apart, equal, behind = found[name]
            expected = CASES[name][2] if shape == (1, 1) else behind
            if not (apart < 2e-5 and equal and behind == expected):
                problems.append((name, apart, equal, behind, expected))
    assert not problems


# Of the way that the parameters went, what each form may be away from DDP's.
FORMS = {"fp16": 0.002, "bf16": 0.01, "int8": 0.03}


def check_form(form: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name, (apart, equal, behind) in rank.items():
            assert 0 < apart < FORMS[form], (form, name, apart)
            assert equal, (form, name)
            assert behind == Script.steps - 1, (form, name, behind)


@pytest.mark.parametrize("form", FORMS)
def test_trains_in_every_form(form: str) -> None:
    check_form(form, worlds.run((1, 1, 1), train_all, ["tied", "untied"], form, env=ENV))


def bring_all(rank: int, size: int) -> list[tuple[Any, ...]]:
    """Rows of every count, none and all among them: how far the sums are from the exact ones."""
    options = Options(rows_bytes=1)
    communicators = Communicators(options, torch.device("cpu"))
    route, found = communicators.flat(), []
    for form in (name for name in wires.names() if wires.get(name).rows_as == name):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for width in (1, 5, 768):
                generator = torch.Generator().manual_seed(width + 7 * rank)
                counts = torch.randint(0, 40, (3,), generator=generator).tolist()
                for count in (*counts, 0, 40):
                    # Some rank has none, some all.
                    count = count if count != 40 or rank else 0
                    rows = torch.randperm(40, generator=generator)[:count]
                    values = torch.randn(count, width, generator=generator).to(dtype)
                    most = torch.tensor(count)
                    dist.all_reduce(most, dist.ReduceOp.MAX)
                    if not most:
                        continue
                    bucket = Bucket(3, torch.empty(0, dtype=dtype), (), by_rows=True)
                    wire = wires.get(form)(route, options)
                    exchange = RowsExchange(bucket, route, wire, options, ["embed.weight"])
                    view = torch.ones(40, width, dtype=dtype)
                    given = Rows(rows, values, int(most))
                    exchange.bring(given, view, Step(checked=True), lambda: None)
                    expected = torch.zeros(40, width, dtype=torch.float64)
                    expected[rows] = values.double() / size
                    dist.all_reduce(expected)
                    apart = (view.double() - expected - 1).abs().max().item()
                    everyone = [b""] * size
                    dist.all_gather_object(everyone, models.raw(view))
                    assert exchange.sent_bytes >= (size - 1) * int(most) * (4 + width)
                    cosine = 1.0
                    if exchange.measured is not None:
                        _, _, product, result, dense = exchange.measured.tolist()
                        cosine = product / (result * dense) ** 0.5
                    found.append((form, dtype, width, apart, len(set(everyone)) == 1, cosine))
    return found


def test_rows_of_any_size_are_added_up() -> None:
    most = {"exact": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 6e-2}
    for found in worlds.run((1, 1, 1), bring_all):
        assert len(found) > 100
        for form, dtype, width, apart, equal, cosine in found:
            limit = max(most[form], 3e-2 if dtype == torch.bfloat16 else 0)
            assert apart <= limit and equal and cosine > 0.99, (form, dtype, width, apart, cosine)


def test_several_lookups_become_one() -> None:
    rows, values = merged(
        [
            (torch.tensor([1, 4]), torch.tensor([[1.0], [2.0]])),
            (torch.tensor([0, 4]), torch.tensor([[4.0], [8.0]])),
        ]
    )
    assert rows.tolist() == [0, 1, 4, 0], "as many as came in: nobody waits to count them"
    assert values.tolist() == [[4.0], [1.0], [10.0], [0.0]]
    generator = torch.Generator().manual_seed(3)
    given = [torch.randperm(12, generator=generator)[:7] for _ in range(3)]
    parts = [(rows, torch.randint(9, (7, 2), generator=generator).float()) for rows in given]
    rows, values = merged(parts)
    expected = torch.zeros(12, 2)
    for places, part in parts:
        expected.index_add_(0, places, part)
    assert torch.equal(torch.zeros(12, 2).index_add_(0, rows, values), expected)
    some = rows[values.abs().sum(1) > 0]
    assert len(some.unique()) == len(some), "a sum by atomics must not depend on their order"


def test_the_rows_of_a_lookup() -> None:
    assert lookups.Lookup(torch.tensor([[5, 2], [2, 9]])).rows().tolist() == [2, 5, 9]
    assert lookups.Lookup(torch.empty(0, 3, dtype=torch.int32)).rows().tolist() == []


def test_candidates() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied, self.alone = nn.Embedding(9, 4), nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9)
            self.head.weight = self.tied.weight
            self.sparse = nn.Embedding(9, 4, sparse=True)
            self.again = nn.Embedding(9, 4, max_norm=1.0)
            self.again.weight = self.plain = nn.Parameter(torch.zeros(9, 4))
            self.both = nn.Embedding(9, 4)
            self.both.weight = self.again.weight

    model = Several()
    places = {id(p): i for i, p in enumerate(model.parameters())}
    found = lookups.candidates(model, places)
    assert found == {places[id(model.tied.weight)]: True, places[id(model.alone.weight)]: False}


def test_buckets_by_rows_stand_alone_behind_their_parameters() -> None:
    parameters = [torch.empty(4), torch.empty(100, 8), torch.empty(4)]
    made = Buckets(parameters, [2, 1, 0], 1 << 20, 1, partition_bytes=1024, rows={1: 40})
    kinds = [(b.slots[0].index, b.by_rows, b.part, len(b.parts)) for b in made]
    # The other two share a bucket, which is complete with the last of them.
    assert [kind[:2] for kind in kinds] == [(1, False)] * 4 + [(1, True), (2, False)]
    assert made.buckets_of[1] == tuple(b.index for b in made if b.slots[0].index == 1)[:-1]
    (rows,) = [b for b in made if b.by_rows]
    assert rows.part == ", rows" and rows.slots[0].numel == 40 and rows.bytes == 0


def plan(rank: int, size: int, early: bool) -> dict[str, Any]:
    """A planner over a tied and an untied embedding; what it was told and what it decided.

    On rank 0's times nothing can be built here: they are replaced by those of a model that takes
    100 ms backward, whose output layer is done after 10 ms (`early`) or at the end.
    """
    script = Script(rank, "auto", how="extra", find_unused=False)
    steps, reducer = script.model.evener_steps, script.model.evener
    each = 20.0 / (SYMBOLS * WIDTH * 4)
    costs = Costs(
        2, 1, Curve(()), Curve(()),
        {"exact": Curve.line(0.1, 2 * each), "bf16": Curve.line(0.1, each)},
    )  # fmt: skip
    steps.planner._measure = lambda _: costs
    inner, measured = steps._profiled, []

    def profiled(taken: Any) -> StepProfile:
        found = inner(taken)
        measured.append(found)
        buckets = []
        for bucket in found.buckets:
            ready = 100.0 if "extra" in bucket.name or bucket.by_rows else 90.0
            if bucket.name.startswith("embed") and not bucket.by_rows:
                ready = 10.0 if early else 100.0
            buckets.append(dataclasses.replace(bucket, ready_ms=ready, need_ms=0.0))
        return StepProfile(30.0, 100.0, 1.0, tuple(buckets))

    steps._profiled = profiled
    for step in range(8):
        script.optimizer.zero_grad()
        script.loss(step).backward()
        script.step()
    steps.finish("")
    (profile,) = measured
    return {
        "by rows": [b.by_rows for b in profile.buckets],
        "names": [b.name for b in profile.buckets],
        "numel": [b.numel for b in profile.buckets],
        "ready": [b.ready_ms for b in profile.buckets],
        "parts": [b.parts for b in reducer.buckets],
        "forms": [c.form for c in steps.planner.decision.choices],
        "step": steps.planner.decision.step_ms,
        "sequence": reducer.sequence,
        "apart": {reducer.names[i]: part.layers for i, part in reducer.parts.of.items()},
        "whole": [reducer.names[i] for i, part in reducer.parts.of.items() if part.whole],
        "sent": script.sent[-1],
        "embed": models.raw(script.module.embed.weight),
    }


@pytest.mark.parametrize("early", [True, False])
def test_the_planner_knows_rows(early: bool) -> None:
    first, second = worlds.run((1, 1), plan, early, env=ENV)
    for key in ("sequence", "forms", "whole", "embed"):
        assert first[key] == second[key], key
    assert first["apart"] == {"embed.weight": True, "extra.weight": False}
    assert first["whole"] == ([] if early else ["embed.weight"])
    assert first["sent"], "the untied one goes by rows in any case"
    rows = [i for i, by_rows in enumerate(first["by rows"]) if by_rows]
    assert len(rows) == 2
    place = {bucket: i for i, bucket in enumerate(first["sequence"])}
    for bucket in rows:
        assert first["names"][bucket].endswith("weight, rows")
        assert 0 < first["numel"][bucket] <= 12 * WIDTH
        own = first["parts"][bucket][:-1]
        assert all(place[part] < place[bucket] for part in own)
        if first["names"][bucket].startswith("extra"):
            assert [first["numel"][part] for part in own] == [0] * len(own), "not sent as a rule"
        else:
            assert sum(first["numel"][part] for part in own) == SYMBOLS * WIDTH
            assert max(first["ready"][part] for part in own) < first["ready"][bucket]
    # Backward, forward and the rest; apart, only rows and what is complete late are not hidden.
    assert (first["step"] < 140) == early, first["step"]


def say(rank: int, size: int) -> list[str]:
    with heard() as said:
        plain(Script(rank, "int8"))
        plain(Script(rank, "fp16", how="loose"))
    return [line for line in said.lines if "embed.weight:" in line]


def test_says_what_it_does() -> None:
    lines, others = worlds.run((1, 1), say, env=ENV)
    assert not others
    assert (
        lines[0].startswith("embed.weight: ") and "of 151 rows per step, sent as rows" in lines[0]
    )
    assert "sent whole, because it has uses besides" in lines[-1]


def train_without(rank: int, size: int) -> tuple[bool, int]:
    script = Script(rank, "int8")
    plain(script)
    return bool(script.model.evener.parts.of), len(script.model.evener.parts._handles)


@pytest.mark.parametrize(
    ("shape", "env"), [((2,), ENV), ((1, 1), {}), ((1, 1), {"EVENER_ROWS_THRESHOLD": "0"})]
)
def test_nothing_is_taken_apart_without_need(shape: tuple[int, ...], env: dict[str, str]) -> None:
    """In one node, where the embedding is small, where it was said so."""
    for apart, _ in worlds.run(shape, train_without, env=env):
        assert not apart


def train_large(rank: int, size: int) -> list[tuple[bool, list[str]]]:
    """With floor INT8, top-k, top-k under Adam: whether it is taken apart, and what is said."""
    found = []
    for floor, kind in (("int8", "SGD"), ("topk", "SGD"), ("topk", "AdamW")):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Embedding(20_000, 32), nn.Flatten(0, 1), nn.Linear(32, 2))
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
        model = DistributedDataParallel(module)
        with heard() as said:
            model = accelerate(model, optimizer, mode="auto", floor=floor)
            for _ in range(2):
                model(torch.randint(20_000, (4, 1000))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((bool(model.evener.parts.of), [x for x in said.lines if "0.weight:" in x]))
        model.evener.close()
    return found


def test_an_embedding_stays_whole_where_few_of_its_entries_may_be_sent() -> None:
    """2.6 MB with 4,000 of 20,000 rows looked up: 0.13 MB as rows in INT8, 0.03 MB as top-k."""
    first, _ = worlds.run((1, 1), train_large)
    (int8, _), (topk, said), (adam, _) = first
    assert int8 and adam and not topk
    assert "topk-chunk may be planned for it" in said[0], said


def test_fewer_bytes_whole() -> None:
    """As one GPU of two nodes looks them up in an LSTM of 33,278 words by 1,024."""
    shape = (33_278, 1024)
    forms = wires.candidates("topk-chunk")
    form, whole, apart = fewer_whole(7_200, shape, 2, 2, forms, 0.01) or ("", 0.0, 0.0)
    assert form == "topk-chunk" and whole == pytest.approx(0.01 * 4 * shape[0] * shape[1])
    assert apart == pytest.approx(7_200 * (1024 + 4), rel=0.05)
    assert fewer_whole(100, shape, 2, 2, forms, 0.01) is None, "few rows are fewer bytes yet"
    assert fewer_whole(7_200, shape, 2, 2, wires.candidates("int4"), 0.01) is None, "no late form"
    # Four ranks on two nodes: a node sends what two ranks looked up, and its gradient once.
    assert (fewer_whole(7_200, shape, 4, 2, forms, 0.01) or ("", 0.0, 0.0))[2] == 2 * apart


def train_on_staged(rank: int, size: int) -> dict[str, Any]:
    return train_all(
        rank, size, ["tied", "untied", "rows differ", "untied, later accumulation"], "exact"
    )


def test_goes_by_the_staged_transport() -> None:
    for found in worlds.run((1, 1), train_on_staged, env={**ENV, "EVENER_OUTER": "staged"}):
        for name, (apart, equal, behind) in found.items():
            assert apart < 2e-5 and equal and behind == CASES[name][2], (name, apart, behind)


def leave_alone(rank: int, size: int) -> str:
    script = Script(rank, "int8", tied=False, overlapped=False, how="extra", find_unused=False)
    for step in range(4):
        script.optimizer.zero_grad()
        if step == 3 and rank:
            return ""
        try:
            script.loss(step).backward()
        except CommError as error:
            return str(error)
        script.step()
    return "nothing happened"


def test_a_peer_that_has_gone_is_an_error() -> None:
    first, _ = worlds.run((1, 1), leave_alone, env={**ENV, "EVENER_TIMEOUT": "5"})
    assert first.startswith("rank 0"), first


def use_late(rank: int, size: int, last: int) -> list[Any]:
    """From step 3 to `last`, one rank also uses the weight beside its modules."""
    found = []
    for tied in (True, False):
        results = []
        for mode in (None, "exact"):
            with heard() as said:
                script = Script(rank, mode, tied=tied)
                for step in range(7):
                    script.optimizer.zero_grad()
                    loss = script.loss(step)
                    if 3 <= step <= last and rank:
                        weight = script.module.embed.weight
                        loss = loss + (weight * torch.linspace(-1, 1, WIDTH)).square().sum()
                    loss.backward()
                    script.step()
            results.append(script.result())
        ddp, ours = results
        apart = max((ours[key] - value).abs().max().item() for key, value in ddp.items())
        told = [line for line in said.lines if "is sent whole in steps" in line]
        found.append((apart, script.sent, len(told), models.raw(script.module.embed.weight)))
        script.model.evener.close()
        assert type(script.module.embed._parameters) is dict
    return found


@pytest.mark.parametrize("last", [3, 6])
def test_a_use_that_comes_up_later(last: int) -> None:
    for first, second in zip(*worlds.run((1, 1), use_late, last, env=ENV), strict=True):
        assert first[3] == second[3]
        assert first[0] < 2e-5
        assert [first[2], second[2]] == [0, 1], "who has it says so"
        assert first[1][-1] or last == 6, "a use that is over leaves the rows as they were"


def use_unseen(rank: int, size: int, tied: bool) -> str:
    """By a reference that was kept; both ranks, so that none waits for the other."""
    script = Script(rank, "exact", tied=tied)
    kept = script.module.embed.weight
    for step in range(4):
        loss = script.loss(step)
        if step == 3:
            loss = loss + kept.square().sum()
        try:
            loss.backward()
        except CommError as error:
            return str(error)
        script.step()
        script.optimizer.zero_grad()
    return "nothing happened"


@pytest.mark.parametrize("tied", [True, False])
def test_a_use_that_cannot_be_seen_is_an_error(tied: bool) -> None:
    for said in worlds.run((1, 1), use_unseen, tied, env=ENV):
        assert "embed.weight: in step 4" in said and "EVENER_ROWS_THRESHOLD=0" in said


def keep_an_old_gradient(rank: int, size: int) -> list[bool]:
    """A parameter that nobody uses in a step keeps the gradient that it had."""
    script = Script(rank, "exact", tied=False, how=lambda step, _: "extra" if step < 3 else "")
    weight, kept = script.module.extra.weight, []
    for step in range(6):
        before = None if weight.grad is None else weight.grad.clone()
        if step != 3:
            script.optimizer.zero_grad()
        script.loss(step).backward()
        if step >= 3:
            same = before is not None and weight.grad is not None and weight.grad.equal(before)
            kept.append(same if step == 3 else weight.grad is None)
        script.step()
    script.model.evener_steps.finish("")
    script.model.evener.close()
    assert isinstance(script.module.embed.weight, nn.Parameter)
    assert not script.module.embed._forward_hooks
    return kept


def test_an_unused_embedding_keeps_its_gradient() -> None:
    for kept in worlds.run((1, 1), keep_an_old_gradient, env=ENV):
        assert kept == [True, True, True]
