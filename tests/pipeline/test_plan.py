"""Capture, costs, the search and the command."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evener import pipeline
from evener.errors import UsageError
from evener.pipeline import cuts, search
from evener.pipeline.operations import root_of, written_by
from evener.pipeline.plan import Plan
from evener.pipeline.search import Costs, Device, Setting
from evener.pipeline.simulate import Network
from evener.tools.plan.pipeline import pipeline_group
from tests import pages
from tests.pipeline import models

RATES = pipeline.Rates(1e12, 1e11, 1e-6)


def labelled(rows: int = 8) -> dict[str, torch.Tensor]:
    return {"tokens": models.tokens(rows), "labels": models.tokens(rows, 1)}


@functools.cache
def gpt() -> models.GPT:
    return models.GPT()


def gpt_plan(**options: object) -> Plan:
    with models.trace_once:
        return pipeline.plan(gpt(), labelled(), rates=RATES, **options)  # type: ignore[arg-type]


def test_what_is_captured() -> None:
    found = pipeline.capture(models.GPT(), labelled())
    assert found.dynamic and found.rows == 8
    assert found.tied == [("embed.weight", "head.weight")]
    assert set(found.blocks) == {"", "layers.0", "layers.1", "layers.2", "layers.3"}
    # Masks and positions are of each stage: only one tensor crosses between two blocks.
    values = cuts.crossings(found)
    edge = found.blocks.index("layers.2")
    crossing = cuts.crossing_at(values, edge)
    assert [tuple(found.shape(v.meta["val"], 3)) for v in crossing] == [(3, 8, 16)]
    assert cuts.cut_bytes(found, 3)[0][edge] == 3 * 8 * 16 * 4
    assert all(not str(node.target).startswith("aten._assert") for node in found.ops)


def test_an_encoders_output_crosses_every_cut_on_its_way() -> None:
    found = pipeline.capture(
        models.EncoderDecoder(), (models.tokens(4), models.tokens(4)),
        target=models.tokens(4), loss=models.cross_entropy,
    )  # fmt: skip
    values = cuts.crossings(found)
    for name, count in (("encoder.1", 1), ("decoder.1", 2), ("decoder.2", 2)):
        assert len(cuts.crossing_at(values, found.blocks.index(name))) == count


def test_writes_in_place_are_not_taken_apart() -> None:
    found = pipeline.capture(
        models.ResNet(), torch.randn(4, 3, 6, 6), target=torch.zeros(4, dtype=torch.long),
        loss=models.cross_entropy,
    )  # fmt: skip
    place = {node: k for k, node in enumerate(found.ops)}
    written = [
        (place[root], k)
        for k, node in enumerate(found.ops)
        for root in map(root_of, written_by(node))
        if root in place
    ]
    assert len(written) == 4 * 3  # in each block two activations and the addition
    for made, changed in written:
        assert all(found.glued[made + 1 : changed + 1])


def test_what_cannot_be_captured_is_said() -> None:
    with pytest.raises(UsageError, match="returns no loss"):
        pipeline.capture(models.GPT(), models.tokens(2))
    with pytest.raises(UsageError, match="belong together"):
        pipeline.capture(models.GPT(), models.tokens(2), loss=models.cross_entropy)

    class Branch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() if x.sum().item() > 0 else x.sum()

    with pytest.raises(UsageError, match="cannot trace Branch"):
        pipeline.capture(Branch(2, 2), torch.randn(2, 2))


def test_times_and_memory_are_those_of_the_operations() -> None:
    model = models.GPT(layers=2)
    found = pipeline.capture(model, labelled())
    profile = pipeline.measure(found, [4, 8], "cpu")
    assert not profile.estimated
    forward, inner, weight, saved = profile.at(8)
    linear = [k for k, node in enumerate(found.ops) if "linear" in str(node.target)]
    assert all(forward[k] > 0 and inner[k] > 0 and weight[k] > 0 for k in linear)
    assert (np.array([a.sum() for a in profile.at(6)]) > 0).all()
    # What is kept for backward is what autograd keeps.
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
        return tensor

    given = labelled()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**given)["loss"]
    inputs = sum(t.untyped_storage().nbytes() for t in given.values())
    # Attention on the meta device is another kernel than on this one.
    assert loss.requires_grad
    assert saved.sum() == pytest.approx(sum(kept.values()) - inputs, rel=0.15)


def test_estimates_follow_arithmetic() -> None:
    found = pipeline.capture(models.GPT(layers=2), labelled())
    slow = pipeline.estimate(found, [8], pipeline.Rates(1e6, 1e15, 0))
    forward, inner, weight, _ = slow.at(8)
    head = next(k for k, n in enumerate(found.ops) if n.name.startswith("linear") and
                n.meta["val"].shape[-1] == models.VOCABULARY)  # fmt: skip
    flops = 2 * 8 * models.LENGTH * models.WIDTH * models.VOCABULARY
    assert forward[head] == pytest.approx(flops / 1e6)
    assert inner[head] == pytest.approx(flops / 1e6) == pytest.approx(weight[head])


def costs(seconds: list[float], across: list[float], saved: list[float] | None = None,
          uses: list[tuple[int, tuple[int, ...]]] | None = None) -> Costs:  # fmt: skip
    count = len(seconds)
    time = np.array(seconds)
    edges = np.array([0.0, *across, 0.0])
    return Costs(time / 3, time / 3, time / 3, np.array(saved or [0.0] * count), edges, edges,
                 list(range(count + 1)), uses or [], 0.0, False)  # fmt: skip


def setting(ranks: int, memory: float = math.inf, speeds: list[float] | None = None,
            microbatches: int = 8) -> Setting:  # fmt: skip
    devices = tuple(Device(memory, s) for s in speeds or [1.0] * ranks)
    return Setting("1F1B", ranks, 1, microbatches, devices, Network())


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.1, 10), min_size=4, max_size=9),
    st.integers(2, 3),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
)
def test_the_longest_stage_is_as_short_as_any_cuts_make_it(
    seconds: list[float], ranks: int, speeds: list[float]
) -> None:
    made = costs(seconds, [0.0] * (len(seconds) - 1))
    where = setting(ranks, speeds=speeds[:ranks], microbatches=64)
    found = search.search(made, where)
    assert found is not None
    total = np.concatenate([[0.0], np.cumsum(seconds)])

    def longest(at: tuple[int, ...]) -> float:
        edges = [0, *at, len(seconds)]
        stages = zip(itertools.pairwise(edges), speeds, strict=False)
        return max((total[b] - total[a]) / speed for (a, b), speed in stages)

    every = itertools.combinations(range(1, len(seconds)), ranks - 1)
    best = min(longest(at) for at in every)
    # With many microbatches the longest stage decides: a slack of some percent is all it may take.
    assert longest(found.cuts) <= best * 1.2 + 1e-9
    exact = min(search.evaluate(made, where, at).result.step
                 for at in itertools.combinations(range(1, len(seconds)), ranks - 1))  # fmt: skip
    assert found.result.step <= exact * 1.05


def test_memory_moves_the_cuts() -> None:
    made = costs([1.0] * 8, [0.0] * 7, saved=[4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    free = search.search(made, setting(2))
    assert free is not None and free.cuts == (4,) and max(free.result.memory) == 32
    # Rank 0 holds two microbatches at a time, rank 1 one.
    tight = search.search(made, setting(2, memory=24))
    assert tight is not None and tight.cuts == (3,) and max(tight.result.memory) == 24
    assert search.search(made, setting(2, memory=10)) is None


def test_a_tied_parameter_counts_once_per_stage() -> None:
    made = costs([1.0] * 4, [0.0] * 3, uses=[(100, (0, 3)), (10, (1,)), (1, (2,))])
    assert made.parameters(0, 4) == 111 and made.parameters(0, 2) == 110
    table = search._parameter_table(made, np.arange(5))
    for begin, end in itertools.combinations(range(5), 2):
        assert table[begin, end] == made.parameters(begin, end)


def test_a_narrow_cut_beats_a_little_balance() -> None:
    across = [1e9] * 7
    across[4] = 0.0
    seconds = [1.0] * 8
    seconds[4] = 0.05
    found = search.search(costs(seconds, across), setting(2, microbatches=2))
    assert found is not None and found.cuts == (5,)


def test_unequal_devices_get_unequal_stages() -> None:
    even = gpt_plan(stages=2, microbatches=4)
    uneven = gpt_plan(stages=2, microbatches=4, speeds=[1.0, 3.0])
    assert uneven.cuts[0] < even.cuts[0]


def test_the_plan_is_balanced_and_says_what_others_give() -> None:
    made = gpt_plan(stages=2, microbatches=4)
    assert made.imbalance < 1.06
    assert set(made.alternatives) == {"uniform by block", "parameter count"}
    for other in made.alternatives.values():
        assert other.cuts is not None and other.step_seconds >= made.step_seconds * 0.999
    assert made.tied == [["embed.weight", "head.weight"]]
    assert made.parameters == sum(p.numel() for p in models.GPT().parameters())
    again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_every_schedule_is_planned(schedule: str) -> None:
    made = gpt_plan(stages=2, schedule=schedule)
    assert len(made.stages) == made.ranks * made.stages_per_rank
    assert made.microbatches * made.rows == 8
    assert sum(stage.operations for stage in made.stages) == sum(
        stage.operations for stage in gpt_plan(stages=1, schedule="GPipe").stages
    )


def test_recompute_where_nothing_fits_without() -> None:
    free = gpt_plan(stages=2, microbatches=2, optimizer="sgd")
    need = max(free.memory)
    tight = gpt_plan(stages=2, microbatches=2, optimizer="sgd", memory=need * 0.8)
    assert tight.recompute and max(tight.memory) <= need * 0.8
    assert tight.step_seconds > free.step_seconds
    with pytest.raises(pipeline.NoFitError, match="no cuts into 2 stages fit"):
        gpt_plan(stages=2, microbatches=2, memory="1kB")


def test_what_cannot_be_planned_is_said() -> None:
    for options, said in (
        ({"stages": 2, "schedule": "2F2B"}, "not known"),
        ({"stages": 2, "microbatches": 3}, "cannot be divided"),
        ({"stages": 4, "microbatches": 2}, "at least as many"),
        ({"stages": 16}, "too small"),
        ({"stages": 2, "memory": "12 parsecs"}, "is not a size"),
        ({"stages": 2, "memory": ["1GB"]}, "of 1 ranks"),
        ({"stages": 2, "optimizer": "lion"}, "not known"),
        ({"stages": 2, "recompute": "no"}, "recompute='no'"),
        ({"pipes": 2}, "pipes"),
    ):
        with pytest.raises(UsageError, match=said):
            gpt_plan(**options)  # type: ignore[arg-type]


def test_a_batch_of_fixed_size_is_captured_for_each_microbatch() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.layers(row).sum() for row in x.unbind(0))

    planned = pipeline.planned(Fixed(), torch.randn(8, 4), stages=2, microbatches=4, rates=RATES)
    assert not planned.plan.dynamic and planned.captured.rows == 2 == planned.plan.rows


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\nfrom tests.pipeline import models\n"
        "def make():\n"
        "    model = models.GPT()\n"
        "    assert model.embed.weight.is_meta\n"
        "    given = torch.zeros(8, 8, dtype=torch.long)\n"
        "    return {'model': model, 'example': {'tokens': given, 'labels': given}}\n"
    )
    rates = ["--flops", "1T", "--bandwidth", "100GB/s"]
    run = CliRunner()
    shown = run.invoke(pipeline_group, ["plan", f"{script}:make", *rates, "--microbatches", "4"])
    assert shown.exit_code == 0, shown.output
    for word in ("uniform by block", "parameter count", "planned", "summed over several stages"):
        assert word in shown.output
    path, page = tmp_path / "plan.json", tmp_path / "deep" / "plan.html"
    more = ["--json", "-o", str(path), "--html", str(page)]
    shown = run.invoke(pipeline_group, ["plan", f"{script}:make", *rates, *more])
    record = json.loads(shown.stdout)
    assert record["schema"] == "evener.pipeline/1" and record["fits"]
    assert json.loads(path.read_text()) == record and "Nothing was measured" in page.read_text()
    shown = run.invoke(pipeline_group, ["report", str(path)])
    assert shown.exit_code == 0 and path.with_suffix(".html").is_file()
    shown = run.invoke(
        pipeline_group, ["plan", f"{script}:make", *rates, "--memory", "1kB", "--json"]
    )
    assert shown.exit_code == 1 and json.loads(shown.stdout)["fits"] is False
    for wrong in ("nothing.json", f"{script}:made", "torchvision:none", f"{tmp_path}/no.py:make"):
        shown = run.invoke(pipeline_group, ["plan", wrong, *rates])
        assert isinstance(shown.exception, UsageError), wrong


@pages.needs_browser
def test_the_page_fits_phones_and_screens(tmp_path: Path) -> None:
    made = gpt_plan(stages=2, microbatches=4)
    record = {"schema": "evener.pipeline/1", "fits": True, "plan": made.to_dict()}
    marks = [list(dataclasses.astuple(mark)) for mark in made.marks]
    took = {"forward": 0.1, "backward": 0.2}
    measured = {"step_seconds": 0.5, "bubble": 0.2, "imbalance": 1.1, "memory": [1e9, 2e9],
                "marks": marks, "stages": {"0": took, "1": took}}  # fmt: skip
    found = pages.nothing_is_clipped(
        pipeline.report.page({**record, "measured": measured}), tmp_path
    )
    for layout in found.values():
        assert "rank 1, measured" in layout.text and "500.0 ms" in layout.text
