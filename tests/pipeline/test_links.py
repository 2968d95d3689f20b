"""What links carry is measured where nothing is said, and goes into the plan."""

from __future__ import annotations

from typing import Any

import torch

from evener import pipeline
from tests import worlds
from tests.pipeline import models


def planned(rank: int, size: int) -> Any:
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    torch.manual_seed(3)
    pipe = pipeline.auto(models.GPT(layers=2), inputs, microbatches=4, timeout=30)
    sends = [m for m in pipe.plan.marks if m.kind == "send"]
    value = pipe.step(**inputs).item()
    pipe.close()
    return pipe.plan.to_dict(), [m.end - m.begin for m in sends], value


def test_what_links_carry_goes_into_the_plan() -> None:
    (plan, sends, value), (other, *_, same) = worlds.run([1, 1], planned)
    assert plan == other and value == same
    # A default of 3 GB/s and 50 us would give 50.3 us for these 1,024 bytes.
    size = plan["stages"][0]["sent"]
    assert size and all(abs(took - (size / 3e9 + 50e-6)) > 1e-9 for took in sends)
    assert plan["profile"] == "measured on cpu" and plan["step_seconds"] > 0
