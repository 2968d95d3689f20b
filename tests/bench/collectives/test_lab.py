"""`--algo` between two nodes of a lab: each wire of `evener.comm` is a row, crossing as itself."""

import json
import sys
from pathlib import Path

import pytest

from evener.tools.bench.collectives.algorithms import names
from evener.tools.lab import Lab, Spec, unavailable


@pytest.mark.lab
def test_every_wire_is_a_row(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    _, wires = names()
    rows = ["flat", *(f"2d+{wire}" for wire in wires)]
    out = tmp_path / "out.json"
    size = ["-b", "64K", "-e", "64K", "-n", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "evener", "bench", "all_reduce", *size]
    said: list[str] = []
    with Lab(Spec(nodes=2, slots=2, link="1gbit"), keep=[tmp_path]) as lab:
        result = lab.launch(
            [*command, "--algo", ",".join(rows), "-J", str(out)],
            timeout=150,
            on_line=lambda *line: said.append(line[3]),
        )
    assert result.ok, "".join(said)
    found = {row["algorithm"]: row for row in json.loads(out.read_text())["algorithms"]}
    assert list(found) == rows
    for wire in wires:
        row = found[f"2d+{wire}"]
        assert "2-D" in row["detail"], row["detail"]
        assert row["wire"] == wire
        assert row["bus_bw"] > 0
    assert found["flat"]["nwrong"] == found["2d+exact"]["nwrong"] == found["2d+bf16"]["nwrong"] == 0
    assert found["2d+int8"]["nwrong"] is None  # it keeps less than the values, so nothing is right
