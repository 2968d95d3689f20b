"""`evener plan --fsdp`: steps follow bytes and computing, and the docs' table is its own."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evener.cli import evener
from evener.comm import shards
from evener.tools.plan import shapes, sharded
from evener.tools.plan.given import Links

ROOT = Path(__file__).parent.parent
_PAGE = ROOT / "docs" / "benchmarks" / "planner.md"
_RECORDS = ROOT / "benchmarks" / "results"


@cache
def plan(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:3] == ["evener", "plan", "--fsdp"]
    done = CliRunner().invoke(evener, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(found: dict[str, Any], way: str, nodes: int = 2) -> dict[str, Any]:
    (one,) = (r for r in found["rows"] if (r["way"], r["nodes"]) == (way, nodes))
    return dict(one)


# Four layers of 12 * 1024^2 weights; a network beside which nothing else counts.
SLOW = (
    "evener plan --fsdp --model 4x1024 --compute-ms 0.01 --network 100mbit --goodput 1 "
    "--latency-us 0 --memory 100tbit --inside 100tbit"
)
WEIGHTS = 4 * 12 * 1024**2


def test_a_slow_network_takes_what_the_bytes_take() -> None:
    found = plan(f"{SLOW} --nodes 4x2")
    sent = {r["way"]: r["sent"] for r in found["rows"]}
    # Rings of eight ranks, three times the weights in 16 bits.
    assert sent["fsdp2"] == pytest.approx(3 * 7 / 8 * 2 * WEIGHTS, rel=0.001)
    # Between four nodes once: a few bits of a weight, and the gradient in its form.
    different = 3 / 4 * WEIGHTS * sharded.BITS / 8
    assert sent["exact"] == pytest.approx(different + 7 / 8 * 2 * WEIGHTS, rel=0.001)
    assert sent["int8"] == pytest.approx(different + 3 / 4 * WEIGHTS * (1 + 4 / 1024), rel=0.001)
    assert sent["int4"] == pytest.approx(different + 3 / 4 * WEIGHTS * 4.125 / 8, rel=0.001)
    for one in found["rows"]:
        least = one["sent"] * 8 / 100e6 * 1e3
        assert least <= one["step_ms"] < 1.01 * least + 5 * (sharded.CHECK_MS + sharded.CODE_MS)


def test_a_fast_network_takes_what_computing_takes() -> None:
    fast = "evener plan --fsdp --model 4x1024 --compute-ms 1000 --network 100tbit --latency-us 0"
    found = plan(f"{fast} --inside 100tbit")
    assert row(found, "fsdp2")["step_ms"] == pytest.approx(1000, rel=0.01)
    exact = row(found, "exact")["step_ms"]
    assert exact == pytest.approx(1000 + 5 * sharded.CHECK_MS, rel=0.01), "five units are compared"


def test_micro_batches_gather_again_and_reduce_once() -> None:
    one, three = plan(f"{SLOW}"), plan(f"{SLOW} --micro-batches 3")
    # The root's few weights are gathered once a pass.
    again = (2 * 3 + 1) / 3 * row(one, "fsdp2")["sent"]
    assert row(three, "fsdp2")["sent"] == pytest.approx(again, rel=0.001)
    for way in ("exact", "int8", "int4"):
        assert row(three, way)["sent"] == row(one, way)["sent"], "the mirror is not sent again"


def test_backward_hides_what_computing_leaves_room_for() -> None:
    """Two layers of 10 ms forward and 20 backward: a gradient of 15 ms hides but for the last."""
    unit = shapes.Unit(1_000_000, 0)
    setup = sharded.Setup((shapes.Unit(1, 0), unit, unit), 60.0, 1, 2, 1, _links(2e6 / 2 / 15))
    took, sent = sharded.go_back(setup, "exact", last=True)
    assert took == pytest.approx(20 + 20 + 15, rel=0.001)
    assert sent == pytest.approx(2e6)
    # Plain gathers both layers besides, and the second one while the first computes.
    took, sent = sharded.go_back(setup, sharded.PLAIN, last=True)
    assert took == pytest.approx(15 + 20 + 20 + 15, rel=0.001)
    assert sent == pytest.approx(4e6)


def _links(bytes_a_ms: float) -> Links:
    from evener.comm.planner.costs import Link

    # A memory without an end: the optimizer takes no time.
    return Links(Link(0.0, bytes_a_ms), Link(0.0, 1e12), 1e15)


def test_all_ways_are_planned() -> None:
    assert {*sharded.WAYS, "bf16"} == {sharded.PLAIN, *shards.FORMS}


@pytest.mark.parametrize(
    ("model", "weights", "units"),
    [
        ("7b", 6_738_415_616, 33),
        ("14x2048x256", 14 * (12 * 2048**2 + 2 * 2048) + 256 * 2048 + 2048, 15),
        ("gpt2", 124_439_808, 13),
        ("vit_b_16", 86_567_656, 13),
    ],
)
def test_a_model_is_cut_into_its_blocks(model: str, weights: int, units: int) -> None:
    shape = shapes.of(model, None)
    assert (shape.numel, len(shape.units)) == (weights, units)
    assert len({unit.numel for unit in shape.units[1:]}) == 1, "blocks are alike"


def test_a_config_is_cut_too(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
              "num_hidden_layers": 3, "num_attention_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(shapes.of(str(tmp_path), None).units) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--fsdp --model 7b", "not known"),
        ("--fsdp --model 0x64 --compute-ms 1", "no weights"),
        ("--fsdp --model 10b --compute-ms 1", "which units"),
        ("--fsdp --model 7b --compute-ms 1 --every 16", "give one of them"),
        ("--fsdp --profile x.json", "give --model"),
        ("--model gpt2 --compute-ms 1 --micro-batches 2", "--micro-batches goes with --fsdp"),
        ("--fsdp --model 7b --compute-ms 1 --speeds 1,2", "--speeds goes with --every"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: str, said: str) -> None:
    done = CliRunner().invoke(evener, ["plan", *arguments.split()])
    assert done.exit_code != 0
    assert said in (done.output + str(done.exception) + getattr(done.exception, "fix", ""))


def _measured() -> list[tuple[float, float]]:
    """Median ms and MB per node of all runs."""
    plug_in = json.loads((_RECORDS / "fsdp-sharded-plugin.json").read_text())["columns"]["fsdp2"]
    found = [(plug_in["median_ms"], plug_in["node_sent_mb"][0])]
    for record in ("fsdp-ethernet.json", "fsdp-ethernet-sockets.json", "fsdp-two-levels.json"):
        for each in json.loads((_RECORDS / record).read_text())["rows"].values():
            found += [(one["median_ms"], one["node_sent_mb"]) for one in each["passes"].values()]
    return found


def test_what_the_docs_check_is_what_is_planned() -> None:
    """Each row has its record's figures and its command's prediction, and what lies between."""
    text = _PAGE.read_text(encoding="utf-8").split("## FSDP2 over all ranks", 1)[1]
    commands = dict(re.findall(r"^- ([A-Z]): `([^`]*)`", text, re.MULTILINE))
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]
    known = {(f"{ms:,.0f}", f"{sent:,.1f}"): ms for ms, sent in _measured()}
    assert len(lines) == 13
    for line in lines:
        _, key, way, ms, predicted, off, sent, planned = (cell.strip() for cell in line.split("|"))
        assert (ms, sent) in known, line
        one = row(plan(commands[key]), way)
        assert predicted == f"{one['step_ms']:,.0f}", line
        assert planned == f"{one['sent'] / 1e6:,.1f}", line
        took = known[ms, sent]
        assert off == f"{one['step_ms'] / took - 1:+.0%}", line
        if key != "D" and (key == "C" or way != "fsdp2"):  # sockets do not fill the link
            assert abs(one["step_ms"] / took - 1) < 0.14, line
