"""How far ranks of local steps come apart: by hand, over ranks, at a hub, and in the records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.base import records
from evener.comm import drift
from evener.comm.hub.shared import Form, Sizes, average
from evener.ddp import accelerate
from tests import worlds

# How far the ranks go in a round, and their drift.
ROUNDS: list[tuple[list[list[float]], float | None]] = [
    ([[3.0, 0.0], [3.0, 0.0]], 0.0),
    ([[3.0, 0.0], [3.0, 4.0]], math.sqrt(17 / 13 - 1)),
    ([[3.0, 0.0], [0.0, 3.0]], 1.0),
    ([[3.0, 0.0], [-3.0, 0.0]], None),
    ([[0.0, 0.0], [0.0, 0.0]], None),
    ([[5.0, 1.0], [1.0, 5.0]], math.sqrt(26 / 18 - 1)),
]


def by_ranks(rank: int, size: int, overlap: int, folder: str) -> list[float | None]:
    """What the model says of each round: an exchange tells the drift of the one before it."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENER_STATS_DIR", folder)
        patch.setattr(records, "EVERY", 0.0)
        model: Any = accelerate(DistributedDataParallel(net), optimizer, every=2, overlap=overlap)
        for ways, _ in [*ROUNDS, ROUNDS[0], ROUNDS[0]]:
            net.weight.grad = torch.tensor([ways[rank]])
            optimizer.step()
            said.append(model.evener.drift)
            net.weight.grad.zero_()
            optimizer.step()
        model.evener.end_round()
        model.evener.close()
    return said[2:]


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_drift_of_two_ranks(overlap: int, tmp_path: Path) -> None:
    wanted = [drift for _, drift in ROUNDS]
    for found in worlds.run((1, 1), by_ranks, overlap, str(tmp_path)):
        assert found == pytest.approx(wanted, abs=1e-6)
    written = records.read(tmp_path)
    assert [record["rank"] for record in written] == [0, 1]
    last = written[0]["local"]
    assert (last["every"], last["overlap"], last["bytes_sent"]) == (2, overlap, 128)
    assert last["rounds"] == len(ROUNDS) + 2 and last["steps"] == 2 * last["rounds"]
    assert last["step_ms"] > 0 and last["exchange_ms"] > 0


def test_the_drift_at_a_hub_counts_steps() -> None:
    form = Form("exact", Sizes(2, 0, 0))
    changes = [torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])]
    brought = [(bytearray(form.write(c, torch.zeros(0), None, (0, 0))), 1) for c in changes]
    assert average(form, brought)[3] == pytest.approx(math.sqrt(17 / 13 - 1))
    (first, _), (second, _) = brought
    weighted = average(form, [(first, 3), (second, 1)])[3]
    assert weighted == pytest.approx(average(form, [(first, 1)] * 3 + [(second, 1)])[3])
    assert weighted != pytest.approx(math.sqrt(17 / 13 - 1))


@given(st.floats(allow_nan=False))
def test_a_number_comes_as_it_was(value: float) -> None:
    assert drift.from_bits(drift.to_bits(value)) == value


def test_what_is_not_known_has_no_drift() -> None:
    assert drift.of([drift.UNKNOWN, 1.0], 1.0) is None
    assert drift.of([math.inf, 1.0], 1.0) is None
    assert drift.of([1.0, 1.0], 1.0 + 1e-9) == 0.0  # rounding is no direction
