"""The page of `evener bench train`: what it says first, and that all of it is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evener.tools.bench.train import page
from evener.tools.bench.train.results import Results
from evener.tools.bench.train.verdict import verdict
from tests import pages
from tests.bench.test_train_figures import FIXED, made

DEMO = Path(__file__).parents[2] / "benchmarks" / "results" / "demo.json"


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (
            FIXED,
            "On 2 nodes x 2 (4 GPUs) Evener top-k is 2.30 x as fast as DDP (920 images/s, 400)",
        ),
        (
            {**FIXED, "exact": [480.0, 500.0, 470.0]},
            "Evener top-k is 2.30 x as fast as DDP (920 images/s, 400); Evener exact, which sends "
            "every gradient, 1.20 x",
        ),
        (
            {**FIXED, "topk": [300.0, 310.0, 305.0]},
            "has 0.76 x the speed of DDP (305 images/s, 400)",
        ),
        ({**FIXED, "topk": [395.0, 415.0, 405.0]}, "are as fast as each other within the spread"),
        (
            {"plain": [9.0], "topk": [8.0]},
            "Evener top-k reaches 8.0 images/s per GPU; plain DDP was not",
        ),
        ({"plain": [9.0], "ddp": [8.0]}, "DDP reaches 8.0 images/s"),
    ],
)
def test_the_verdict(rates: dict[str, list[float]], said: str) -> None:
    assert said in verdict(made(rates))


def test_a_failure_is_in_the_verdict() -> None:
    change: dict[str, dict[str, Any]] = {"topk": {"checksum": "mine"}}
    rates = {**FIXED, "exact": [480.0, 500.0, 470.0]}
    assert verdict(made(rates, change=change)).endswith("; Evener top-k failed")
    assert "plain DDP failed" in verdict(made(FIXED, change={"ddp": {"checksum": "mine"}}))


def test_the_demos_page_begins_with_its_verdict_and_names_every_column_in_every_row() -> None:
    taken = Results.from_json(json.loads(DEMO.read_text()))
    text = page.render(taken)
    assert f"<h1>{verdict(taken)}</h1>" in text
    assert "3.34 x as fast as DDP" in verdict(taken)
    for column in ("Evener exact", "Evener FP16", "Evener top-k"):
        assert text.count(f'data-column="{column}"') >= len(taken.rows)
    assert re.search(r"<h1>.*</h1>\s*<p>vgg-tiny", text)


@pages.needs_browser
@pytest.mark.parametrize("name", ["demo", "vgg16-2x2-25gbit", "bert-base-2x1-25gbit"])
def test_nothing_is_cut_off(name: str, tmp_path: Path) -> None:
    raw = json.loads((DEMO.parent / f"{name}.json").read_text())
    taken = Results.from_json(raw)
    for found in pages.nothing_is_clipped(page.render(taken), tmp_path).values():
        for column in taken.columns:
            assert column.title in found.text
        assert verdict(taken) in found.text


@pages.needs_browser
def test_the_measure_itself_sees_what_is_cut_off(tmp_path: Path) -> None:
    page = """<!doctype html><body><p style='width:900px'>too wide</p><div style='overflow:auto'>
    <svg viewBox='0 0 900 9' style='width:900px'><text font-size='8'>a</text></svg></div></body>"""
    found = pages.lay_out(page, tmp_path)
    assert (found[390].width != 390, found[390].cut) == (True, ["P: too wide"])
    assert (found[390].sideways, found[390].letters) == (["svg"], 8)
    assert (found[1280].width, found[1280].cut, found[1280].sideways) == (1280, [], [])
