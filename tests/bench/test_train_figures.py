"""What the table says, from results that are written down: no process is started here."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evener.errors import EvenerError, UsageError
from evener.tools.bench.train import (
    columns,
    files,
    guard,
    markdown,
    page,
    plan,
    results,
    stats,
    table,
)
from evener.tools.bench.train.results import Results

UPDATE = guard.encode([1.0, -2.0, 3.0, 0.5])
NEARLY = guard.encode([1.0, -2.0, 3.0, 0.501])
OTHER = guard.encode([-3.0, 1.0, 0.0, 2.0])


def outcome(rank: int, world: int, rate: float, **more: Any) -> dict[str, Any]:
    """What a rank reports that trained 100 steps of 8 images at `rate` images/s."""
    return {
        "status": "ok",
        "rank": rank,
        "group": 0,
        "world": world,
        "steps": 100,
        "samples": 800,
        "elapsed_s": 800 / rate,
        "step_ms": [8000 / rate] * 100,
        "checksum": "same",
        "update": UPDATE if rank == 0 else None,
        "sent_bytes": 400_000_000 if rank % 2 == 0 else None,
        "gradient_bytes": 16_000_000,
        "device": "cuda",
        **more,
    }


def made(
    rates: dict[str, list[float]], *, change: dict[str, dict[str, Any]] | None = None
) -> Results:
    """Results of 2 x 2 GPUs; `rates`: images/s by column, one a repeat, "plain" for one GPU."""
    repeats = len(rates["plain"])
    wanted = columns.parse(",".join(name for name in rates if name != "plain"))
    options = plan.Options(model="vgg16", batch_size=8, repeats=repeats, device="cuda")
    todo = plan.make(options, nodes=2, slots=2, rows=["one", "all"], columns=wanted)
    taken = results.begin(
        todo,
        command="evener bench train --lab 2x2@25gbit",
        cluster={"kind": "lab", "spec": "2x2@25gbit", "nodes": 2, "slots": 2},
    )
    taken.machine = {"cpu": "a processor", "cores": 8, "gpus": ["a GPU"] * 4}
    taken.versions = {"python": "3.11.0", "torch": "2.11.0"}
    for run in todo.runs:
        world = todo.row(run.row).ranks
        more = (change or {}).get(run.column, {})
        outcomes = [
            outcome(rank, world, rates[run.column][run.repeat], **(more if rank == 0 else {}))
            for rank in range(world)
        ]
        results.add(taken, todo, run, json.loads(json.dumps(outcomes)), 3.0)
    return taken


FIXED = {
    "plain": [1000.0, 1010.0, 990.0],
    "ddp": [400.0, 410.0, 390.0],
    "topk": [900.0, 940.0, 920.0],
}


def test_a_cell_is_the_median_with_its_range_and_its_paired_efficiency() -> None:
    taken = made(FIXED)
    cell = taken.cell(taken.rows[1], "ddp")
    assert cell is not None
    assert cell.rate is not None
    assert list(cell.rate.to_json().values()) == pytest.approx([400, 390, 410, 3])
    assert cell.efficiency is not None
    # 400/1000, 410/1010, 390/990: each run by the reference of its own repeat
    assert cell.efficiency.median == pytest.approx(0.4)
    assert cell.efficiency.low == pytest.approx(390 / 990)
    assert cell.efficiency.high == pytest.approx(410 / 1010)
    assert cell.sent_bytes_per_step == 4_000_000


def test_the_rate_is_the_slowest_ranks() -> None:
    taken = made(FIXED, change={"ddp": {"elapsed_s": 10.0}})
    cell = taken.cell(taken.rows[1], "ddp")
    assert cell is not None and cell.rate is not None
    assert cell.rate.median == 80


def test_terminal_table() -> None:
    console = Console(width=100, no_color=True, highlight=False, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        table.show(made(FIXED), console)
    text = captured.get()
    assert "\x1b" not in text
    assert (
        "vgg16 (16.0 MB of gradients), batch 8 per GPU, TF32, simulated cluster 2x2@25gbit" in text
    )
    assert re.search(r"2 nodes x 2: 4 GPUs +│ +400 +40% +│ +920 +93%", text)
    assert re.search(r"390–410 +39–41% +│ +900–940 +90–93%", text)
    assert re.search(r"times DDP +│ +1\.00 +│ +2\.30", text)
    assert re.search(r"images/s in total +│ +1,600 +│ +3,680", text)


def test_markdown() -> None:
    text = markdown.render(made(FIXED))
    lines = text.splitlines()
    assert "| images/s per GPU | DDP | Evener top-k |" in lines
    assert "| 1 GPU, plain PyTorch | 1,000<br><sub>990–1,010</sub> |  |" in lines
    assert (
        "| 2 nodes x 2: 4 GPUs | 400 (40%)<br><sub>390–410, 39–41%</sub> "
        "| **920** (93%)<br><sub>900–940, 90–93%</sub> |" in lines
    )
    assert "Made by `evener bench train --lab 2x2@25gbit` on a processor" in text
    assert {line.count("|") for line in lines if line.startswith("|")} == {4}


def test_ranks_that_do_not_agree_have_no_figure() -> None:
    taken = made(FIXED, change={"topk": {"checksum": "mine"}})
    assert [run.column for run in taken.failures] == ["topk"] * 3
    assert "does not synchronise: parameters of rank 1, 2, 3 differ" in taken.failures[0].reason
    assert not taken.complete
    text = markdown.render(taken)
    assert "| 2 nodes x 2: 4 GPUs | **400** (40%)<br><sub>390–410, 39–41%</sub> | failed |" in text
    assert "failed: topk, row all: does not synchronise" in text


def test_an_update_that_is_not_ddps_has_no_figure() -> None:
    rates = {"plain": [1000.0], "ddp": [400.0], "exact": [500.0], "fp16": [600.0]}
    change = {"exact": {"update": OTHER}, "fp16": {"update": NEARLY}}
    taken = made(rates, change=change)
    assert [run.column for run in taken.failures] == ["exact"]
    assert "wrong result" in taken.failures[0].reason
    fp16 = taken.cell(taken.rows[1], "fp16")
    assert fp16 is not None and fp16.runs[0].distance == pytest.approx(0.001 / 3.77, rel=0.01)


def test_later_updates_are_compared_too() -> None:
    """A form with error feedback sends its first step exactly; and no update is no update."""
    rates = {"plain": [1000.0], "ddp": [400.0], "topk": [500.0], "ddp-powersgd": [600.0]}
    nothing = guard.encode([0.0] * 4)
    right = {"update": UPDATE, "later": UPDATE}
    for column in ("topk", "ddp-powersgd"):
        taken = made(rates, change={"ddp": right, column: {**right, "later": nothing}})
        assert [run.column for run in taken.failures] == [column]
        assert "its next 6 updates are 1 from DDP's" in taken.failures[0].reason
        assert "--lr 0.0001" in taken.failures[0].reason
    taken = made(rates, change={"ddp": right, "topk": {"update": OTHER, "later": nothing}})
    assert "--lr" not in taken.failures[0].reason, "the first one is wrong, too"
    taken = made(rates, change={"ddp": right, "topk": {**right, "later": NEARLY}})
    assert not taken.failures


def test_a_failed_run_keeps_its_reason_and_the_others_their_figures() -> None:
    todo = plan.make(
        plan.Options(repeats=1), nodes=2, slots=1, rows=["all"], columns=columns.parse("ddp,exact")
    )
    taken = results.begin(todo, command="x", cluster={"kind": "loopback", "nodes": 2, "slots": 1})
    lost = {"status": "failed", "reason": "RuntimeError: Connection reset by peer", "tail": []}
    cause = {"status": "failed", "reason": "ended with signal SIGABRT", "tail": ["last words"]}
    results.add(taken, todo, todo.runs[0], [lost, cause], 1.0)
    fine = [outcome(rank, 2, 100.0) for rank in range(2)]
    results.add(taken, todo, todo.runs[1], fine, 1.0)
    assert taken.runs[0].reason == "ended with signal SIGABRT"
    assert taken.runs[0].tail == ["last words"]
    assert taken.runs[1].ok
    assert not taken.complete
    assert "failed" in markdown.render(taken)


def test_json_keeps_every_sample_and_draws_the_same_table(tmp_path: Path) -> None:
    taken = made(FIXED)
    path = tmp_path / "deep" / "results.json"
    files.write(path, results.dump(taken))
    again = files.read(path)
    assert results.dump(again) == results.dump(taken)
    assert page.render(again) == page.render(taken)
    raw = json.loads(path.read_text())
    assert len(raw["runs"]) == 9
    assert all(len(rank["step_ms"]) == 100 for run in raw["runs"] for rank in run["ranks"])


def test_the_schema_is_stable() -> None:
    """A change here is a change of the file's form: give SCHEMA a new number if readers break."""
    raw = json.loads(results.dump(made(FIXED)))
    assert raw["schema"] == "evener.bench.train/1"
    assert sorted(raw) == [
        "cells",
        "cluster",
        "columns",
        "command",
        "duration_s",
        "environment",
        "machine",
        "notes",
        "planned_runs",
        "rows",
        "runs",
        "schema",
        "settings",
        "started",
        "versions",
    ]
    assert sorted(raw["cells"][0]) == [
        "coding_share",
        "column",
        "efficiency",
        "images_per_second_per_rank",
        "images_per_second_total",
        "nccl",
        "reason",
        "row",
        "sent_bytes_per_step",
    ]
    assert sorted(raw["cells"][0]["images_per_second_per_rank"]) == [
        "count",
        "high",
        "low",
        "median",
    ]
    assert sorted(raw["runs"][0]) == [
        "column",
        "distance",
        "equal",
        "later",
        "nccl",
        "ranks",
        "rate",
        "reason",
        "repeat",
        "row",
        "seconds",
        "sent_bytes_per_step",
        "tail",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "evener.bench.train/0"}', "{", '{"a": 1}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        files.read(path)


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    raw = json.loads(results.dump(made(FIXED)))
    del raw["rows"]
    with pytest.raises(UsageError, match="rows"):
        Results.from_json(raw)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvenerError, match=r"file/x.json"):
        files.write(tmp_path / "file" / "x.json", "{}")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action")]


def test_the_page_needs_nothing_else_and_escapes_what_it_shows() -> None:
    taken = made(FIXED, change={"topk": {"checksum": "mine"}})
    taken.command = "evener bench train --model '<script>alert(1)</script>'"
    taken.machine["cpu"] = '"><img src=x onerror=alert(1)>'
    text = page.render(taken)
    seen = _Links()
    seen.feed(text)
    assert seen.found == []
    assert not {"script", "img", "link", "iframe"} & set(seen.tags)
    assert "url(" not in text and "@import" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg") == 1
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_the_bars_are_as_long_as_their_figures() -> None:
    text = page.render(made(FIXED))
    widths = [
        float(width)
        for width in re.findall(r'class="(?:peer|evener)" [^>]*width="([\d.]+)%"', text)
    ]
    assert widths == pytest.approx([100 * 400 / 1010, 100 * 920 / 1010], abs=0.01)
    assert f'x1="{round(100 * 1000 / 1010, 2)}%"' in text


def test_results_without_any_figure_can_be_drawn() -> None:
    taken = made(FIXED)
    taken.runs.clear()
    assert "not finished: 9 of 9" in page.render(taken)
    assert "not finished: 9 of 9" in markdown.render(taken)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1))
def test_a_spread_holds_its_median(samples: list[float]) -> None:
    found = stats.spread(samples)
    assert found is not None
    assert found.low <= found.median <= found.high
    assert found.count == len(samples)


def test_efficiency_without_reference_is_none_not_a_guess() -> None:
    assert stats.efficiency({0: 5.0}, {}) is None
    assert stats.spread([]) is None


def test_efficiency_uses_the_median_where_its_own_reference_is_missing() -> None:
    found = stats.efficiency({0: 50.0, 1: 60.0}, {0: 100.0, 2: 200.0, 3: 150.0})
    assert found is not None
    assert (found.low, found.high) == (0.4, 0.5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_sketches_are_at_distance_zero_from_themselves(values: list[float]) -> None:
    text = guard.encode(values)
    assert guard.decode(text) == values
    if any(abs(value) > 1e-3 for value in values):
        assert guard.distance(text, text) == 0
        assert guard.distance(guard.encode([0.0] * len(values)), text) == pytest.approx(1)


def test_a_reference_of_no_length_allows_nothing() -> None:
    assert guard.distance(UPDATE, guard.encode([0.0] * 4)) == float("inf")
    with pytest.raises(ValueError, match="sums"):
        guard.distance(UPDATE, guard.encode([0.0] * 5))


def test_columns_are_found_by_name_and_alias() -> None:
    assert [c.name for c in columns.parse("ddp,ring,ddp-ring,topk")] == ["ddp", "ddp-ring", "topk"]
    with pytest.raises(UsageError, match="nosuch"):
        columns.parse("ddp,nosuch")
    with pytest.raises(UsageError):
        columns.parse(" , ")


def test_every_column_is_complete() -> None:
    from evener.tools.bench.train import wrap

    for name, column in columns.COLUMNS.items():
        assert column.name == name
        assert column.title and column.what
        assert column.wrap in wrap.WRAPPERS
        assert 0 < column.tolerance <= 1
    assert set(columns.ALIASES.values()) <= set(columns.COLUMNS)
    assert len({column.title for column in columns.COLUMNS.values()}) == len(columns.COLUMNS)
    for name in columns.DEFAULT:
        columns.column(name)


def test_repeats_are_interleaved_over_columns() -> None:
    todo = plan.make(
        plan.Options(repeats=2),
        nodes=2,
        slots=2,
        rows=["all", "one", "node"],
        columns=columns.parse("ddp,exact"),
    )
    assert [(run.row, run.column) for run in todo.runs] == 2 * [
        ("one", "plain"),
        ("node", "ddp"),
        ("node", "exact"),
        ("all", "ddp"),
        ("all", "exact"),
    ]
    assert [run.index for run in todo.runs] == list(range(10))


def test_rows_that_would_repeat_another_are_left_out() -> None:
    wanted = columns.parse("ddp")
    flat = plan.make(plan.Options(), nodes=4, slots=1, rows=plan.ROWS, columns=wanted)
    assert [row.name for row in flat.rows] == ["one", "all"]
    single = plan.make(plan.Options(), nodes=1, slots=4, rows=plan.ROWS, columns=wanted)
    assert [row.name for row in single.rows] == ["one", "node"]
    with pytest.raises(UsageError):
        plan.make(plan.Options(), nodes=1, slots=1, rows=["all"], columns=wanted)
    with pytest.raises(UsageError, match="half"):
        plan.make(plan.Options(), nodes=1, slots=1, rows=["half"], columns=wanted)


def test_a_column_that_needs_gpus_is_refused_on_cpus() -> None:
    powersgd = columns.parse("ddp-powersgd")
    with pytest.raises(UsageError, match="Gloo"):
        plan.make(plan.Options(device="cpu"), nodes=1, slots=2, rows=["node"], columns=powersgd)


def test_options_survive_json_and_newer_fields() -> None:
    options = replace(plan.Options(), model="resnet50", amp="bf16")
    assert plan.Options.from_json({**options.to_json(), "of tomorrow": 1}) == options


def test_the_estimate_grows_with_the_work() -> None:
    wanted = columns.parse("ddp,exact")
    few = plan.make(plan.Options(repeats=1), nodes=2, slots=2, rows=["all"], columns=wanted)
    many = plan.make(plan.Options(repeats=5), nodes=2, slots=2, rows=["all"], columns=wanted)
    assert plan.estimate(many, cpu=True) > plan.estimate(few, cpu=True) > 0


def test_every_form_on_the_wire_has_a_column() -> None:
    from evener.comm import wires

    assert set(wires.names()) <= set(columns.COLUMNS)
    assert columns.modes("int8, topk") == "int8,topk"
    with pytest.raises(UsageError, match="--modes='ddp'"):
        columns.modes("ddp")
