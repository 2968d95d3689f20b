"""`evener plan --every`: rounds follow speeds and bytes, and the tables of the docs are its own."""

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
from evener.comm import pace

DOCS = Path(__file__).parent.parent / "docs"
_CHECKED = DOCS / "benchmarks" / "planner.md"
_PLANNED = DOCS / "guide" / "planning.md"


@cache
def plan(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:2] == ["evener", "plan"]
    done = CliRunner().invoke(evener, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(found: dict[str, Any], way: str, form: str, nodes: int, rounds: str) -> dict[str, Any]:
    def name(r: dict[str, Any]) -> str:
        return f"{r['every']}+{r['overlap']}" if r["overlap"] else str(r["every"])

    wanted = (way, form, nodes, rounds)
    (one,) = (r for r in found["rows"] if (r["way"], r["form"], r["nodes"], name(r)) == wanted)
    return dict(one)


BASE = "evener plan --model 100m --compute-ms 100 --network 1gbit --latency-us 0 --goodput 1"


def test_a_round_between_ranks() -> None:
    """400 MB, two nodes: 3.2 s at 1 Gb/s. Ten steps of the slower node take 2 s."""
    found = plan(f"{BASE} --every 10 --speeds 1,0.5 --floor exact --bucket-mb 1024")
    one = row(found, "ranks", "exact", 2, "10")
    assert one["exchange_ms"] == pytest.approx(3200)
    assert one["round_ms"] == pytest.approx(5200)
    # Alone the nodes take 10 and 5 steps a second: 78 in a round, of which 20 are taken.
    assert one["share"] == pytest.approx(20 / 78)
    assert one["slowest"] == pytest.approx(10 / 78), "the fast node stands still for ten steps"
    assert one["share"] + one["slowest"] + one["network"] == pytest.approx(1)
    assert one["sent"] == pytest.approx(400e6)
    behind = row(found, "ranks", "exact", 2, "10+2")
    assert behind["round_ms"] == pytest.approx(5200 - 2 * 200)


def test_a_round_through_a_hub() -> None:
    """The fast node has ten steps after 1 s; the slow one brings its sixth, 0.2 s later."""
    found = plan(f"{BASE} --every 10 --speeds 1,0.5 --floor exact --nodes 2x1 --hub 1gbit")
    one = row(found, "hub", "exact", 2, "10")
    up = down = 2 * 3200  # two changes of 3.2 s each through one card, the first at 1 s
    assert one["round_ms"] == pytest.approx(1000 + up + down)
    assert one["steps_per_ms"] == pytest.approx((10 + 6) / one["round_ms"])
    assert one["hub"] == 2 * one["sent"] == pytest.approx(800e6)
    wide = row(
        plan(f"{BASE} --every 10 --speeds 1,0.5 --floor exact --hub 100gbit"),
        "hub", "exact", 2, "10",
    )  # fmt: skip
    # The last to come has its own card to pass: 1.2 s + 3.2 s up + 3.2 s down.
    assert wide["round_ms"] == pytest.approx(1200 + 2 * 3200)


def test_auto_is_what_training_would_choose() -> None:
    found = plan(f"{BASE} --every auto --floor int8")
    assert {r["way"] for r in found["rows"]} == {"ranks"}, "a hub waits for each exchange"
    for one in found["rows"]:
        chosen = pace.choose(100, one["exchange_ms"])
        assert (one["every"], one["overlap"]) == (chosen.every, chosen.overlap)


def test_a_ring_pays_its_latency_for_each_bucket() -> None:
    far = BASE.replace("--latency-us 0", "--latency-us 10000") + " --every 10 --nodes 8x1"
    one = row(plan(f"{far} --bucket-mb 1024 --floor exact"), "ranks", "exact", 8, "10")
    many = row(plan(f"{far} --bucket-mb 1 --floor exact"), "ranks", "exact", 8, "10")
    buckets = -(-400_000_000 // (1 << 20))
    # A hop is a round trip of 20 ms: 14 of them for a bucket, and 7 in which the ranks meet.
    assert many["exchange_ms"] - one["exchange_ms"] == pytest.approx((buckets - 1) * 14 * 20)
    near = row(plan(f"{BASE} --every 10 --nodes 8x1 --bucket-mb 1024 --floor exact"),
               "ranks", "exact", 8, "10")  # fmt: skip
    assert one["exchange_ms"] - near["exchange_ms"] == pytest.approx((14 + 7) * 20)


@pytest.mark.parametrize(
    ("model", "unit", "rate"),
    [
        ("100m", "steps/s", 20),
        ("gpt2 --batch-size 4", "tokens/s", 20 * 4 * 1024),
        ("vgg-tiny --batch-size 4", "samples/s", 20 * 4),
        ("7b --batch-size 1", "tokens/s", 20 * 4096),
    ],
)
def test_rates_are_in_what_the_model_eats(model: str, unit: str, rate: float) -> None:
    found = plan(f"evener plan --model {model} --compute-ms 100 --every auto --network 400gbit")
    one = next(r for r in found["rows"] if r["form"] == "int8")
    assert found["unit"] == unit
    assert one["rate"] == pytest.approx(rate * one["share"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model 10b --every 16", "not known"),
        ("--model 0b --every 16 --compute-ms 1", "no weights"),
        ("--model 10b --every 0 --compute-ms 1", "--every"),
        ("--model 10b --every 16 --compute-ms 1 --speeds 1,0", "'1,0' are no speeds"),
        ("--model 10b --every 16 --compute-ms 1 --speeds fast", "'fast' are no speeds"),
        ("--model 10b --every 16 --compute-ms 1 --hub 25", "has no unit"),
        ("--model 10b --every 16 --compute-ms 1 --bucket-mb 0", "--bucket-mb"),
        ("--model vgg-tiny --compute-ms 1 --speeds 1,2", "--speeds goes with --every"),
        ("--model vgg-tiny --compute-ms 1 --hub 1gbit", "--hub goes with --every"),
        ("--every 16", "either --model or --profile"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: str, said: str) -> None:
    done = CliRunner().invoke(evener, ["plan", *arguments.split()])
    assert done.exit_code != 0
    assert said in (done.output + str(done.exception) + getattr(done.exception, "fix", ""))


def cells(page: Path, after: str) -> list[list[str]]:
    """The cells of the first table behind a line that begins with `after`."""
    text = page.read_text(encoding="utf-8").split(after, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def test_what_the_docs_check_is_what_is_planned() -> None:
    """Each row's command gives its prediction, and the distance to what was found."""
    table = cells(_CHECKED, "## Local steps")
    for _, what, found, command, which, predicted, off in table:
        form, rounds = which.split(", ")
        made = plan(command.strip("`"))
        one = row(made, "ranks", form, made["rows"][0]["nodes"], rounds)
        whole = next(r for r in made["rows"] if r["form"] == "exact")["sent"]
        ours = {"of no network": 100 * one["share"]}.get(what, one["every"] * whole / one["sent"])
        theirs = float(found.rstrip("%"))
        shown = f"{ours:.1f}%" if what == "of no network" else f"{ours:.0f}"
        assert predicted == shown, command
        assert off == f"{ours / theirs - 1:+.1%}", command


def test_the_clusters_of_the_docs() -> None:
    after = "## Local steps on many nodes"
    base = re.search(r"`(evener plan [^`]*)`", _PLANNED.read_text().split(after, 1)[1])
    assert base is not None
    table = cells(_PLANNED, after)
    assert {line[0] for line in table} == {"64 x 8", "1,024 x 8"}
    for nodes, way, more, rounds, sent, rate, share, slowest, network in table:
        made = plan(f"{base[1]} {more.strip('`')}")
        one = row(made, way, "int4", int(nodes.split()[0].replace(",", "")), rounds)
        assert sent == f"{one['sent'] / 1e9:.1f}"
        assert rate == f"{one['rate'] / 1e6:.2f}M"
        shares = [f"{one[key]:.0%}" for key in ("share", "slowest", "network")]
        assert shares == [share, slowest, network]
