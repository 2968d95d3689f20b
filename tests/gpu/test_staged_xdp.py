"""The staged transport past the kernel on GPUs: copy engines fill frames, and copy out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.tools.lab import unavailable
from tests import gpus
from tests.net.test_staged_frames import row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    gpus.needs(1, 1),
]


@pytest.mark.parametrize("case", ["clean", "loss 1%", "path dies"])
def test_a_device_and_a_card_share_frames(tmp_path: Path, case: str) -> None:
    found = row(tmp_path, case)
    assert found["frames"] and found["wrong"] == 0
    assert found["copied"] == [0, 0]
    assert min(found["not_copied"]) > 10_000_000


def test_a_card_that_dies_costs_time_and_no_byte(tmp_path: Path) -> None:
    found = row(tmp_path, "card dies")
    assert found["frames"] and found["wrong"] == 0
