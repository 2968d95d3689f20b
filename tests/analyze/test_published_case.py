"""The published run of 2 x 8 GPUs: every number and pair, from the file alone and with a map."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from nccl_logs import PUBLISHED_PAIRS, published_case

from evener.tools.analyze.command import analyze

ROOT = Path(__file__).parents[2]
ORIGINAL = ROOT.parent / "shared" / "reference" / "asterfusion.log"
MAP = ROOT / "examples" / "asterfusion" / "map.yaml"


@pytest.fixture(params=["made", "original"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "made":
        path = tmp_path / "run.log"
        path.write_text(published_case())
        return path
    # Beside the checkout, or one folder further up where the checkout is a work tree.
    for path in (ORIGINAL, ROOT.parents[1] / "shared" / "reference" / "asterfusion.log"):
        if path.exists():
            return path
    pytest.skip(f"the published log is not at {ORIGINAL}")


@pytest.fixture
def map_file(log: Path, tmp_path: Path) -> Path:
    text = MAP.read_text()
    if "server-one" in log.read_text():
        text = text.replace("bm-2204kzq", "server-one").replace("bm-2204qhn", "server-two")
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def run(*arguments: object) -> dict:
    result = CliRunner().invoke(analyze, [*map(str, arguments), "--json", "-"])
    assert result.exit_code == 1, result.output
    return json.loads(result.stdout)


def test_from_the_file_alone(log: Path) -> None:
    found = run(log)
    bandwidth = found["bandwidth"]
    assert round(bandwidth["mean"], 2) == 22.04
    assert bandwidth["values"] == 52
    assert bandwidth["peak"] == 48.23
    assert bandwidth["peak_size"] == 256 << 20
    assert bandwidth["peak_side"] == "out_of_place"
    assert bandwidth["collective"] == "all_reduce"
    assert max(row["in_place"] for row in bandwidth["rows"]) == 47.56
    assert bandwidth["rows"][-1] == {"size": 16 << 30, "out_of_place": 33.94, "in_place": 33.36}
    assert found["rings"]["channels"] == 16
    assert found["rings"]["distinct"] == 4
    assert [len(order["channels"]) for order in found["rings"]["orders"]] == [4, 4, 4, 4]
    pairs = {(pair["from"], pair["to"]): pair["channels"] for pair in found["pairs"]}
    assert pairs == PUBLISHED_PAIRS
    assert found["rails"]["status"] == "unknown"
    assert found["fabric"] is None
    falls = next(f for f in found["findings"] if f["id"] == "bandwidth.falls-with-size")
    assert "30%" in falls["title"]
    assert all(":" in place for place in falls["evidence"])
    assert found["lines"]["unknown"] == 0


def test_with_the_cabling(log: Path, map_file: Path) -> None:
    found = run(log, "--map", map_file)
    assert all(route["crosses"] for pair in found["pairs"] for route in pair["routes"])
    titles = {finding["id"]: finding["title"] for finding in found["findings"]}
    assert titles["fabric.crossings"].startswith("8 of 8 pairs cross")
    assert titles["fabric.one-link"].startswith("the peak is about 1 link out of 4")
    assert titles["fabric.rewire"].endswith("about 195 GB/s")
    assert found["fabric"]["today"]["one_link_bound"] == pytest.approx(50)
    assert found["fabric"]["rewired"]["bound"] == pytest.approx(200)
    assert found["fabric"]["rewired"]["payload_bound"] == pytest.approx(195, abs=1)
    assert found["fabric"]["rewired"]["crossing_share"] == 0
    assert len(found["fabric"]["moves"]) == 4
    # Cards come from the map's nearest ones, and it says so.
    assert found["rails"]["confidence"] == "inferred"


def test_the_terminal_says_the_same(log: Path) -> None:
    shown = CliRunner().invoke(analyze, [str(log)])
    assert shown.exit_code == 1
    assert "mean 22.04 GB/s over 52 values, peak 48.23 out of place at 256 MiB" in shown.output
    assert "4 distinct rings" in shown.output
    assert "rails        unknown" in shown.output
    assert "\x1b" not in shown.output
