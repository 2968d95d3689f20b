"""Embeddings taken apart, on GPUs: rows and layers' parts on streams of their own."""

from __future__ import annotations

import pytest
import torch

from tests import worlds
from tests.comm import test_parts
from tests.gpu.test_overlap import ENV

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
CASES = [
    "tied",
    "untied, AdamW",
    "looked up twice",
    "rows differ",
    "nearly all rows",
    "other uses in one rank",
    "clipping",
    "later accumulation",
]


@pytest.mark.parametrize("outer", ["nccl", "staged"])
def test_trains_as_ddp_does(outer: str) -> None:
    env = {**ENV, **test_parts.ENV, "EVENER_OUTER": outer}
    found = worlds.run([1, 1], test_parts.train_all, CASES, "exact", gpu=True, env=env)
    for name in CASES:
        for apart, equal, behind in (rank[name] for rank in found):
            assert apart < 1e-4, (name, apart)
            assert equal, name
            assert behind == test_parts.CASES[name][2], (name, behind)


def test_trains_in_every_form() -> None:
    for form in test_parts.FORMS:
        found = worlds.run(
            [1, 1], test_parts.train_all, ["tied", "untied"], form, gpu=True,
            env={**ENV, **test_parts.ENV},
        )  # fmt: skip
        test_parts.check_form(form, found)
