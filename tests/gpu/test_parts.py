"""Embeddings taken apart, on GPUs: rows and layers' parts on streams of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import gpus, worlds
from tests.comm import test_parts
from tests.gpu.test_overlap import ENV

pytestmark = [
    pytest.mark.gpu,
    gpus.needs(1, 1),
]
NCCL = ["tied", "untied, AdamW"]
STAGED = ["rows differ", "looked up twice", "untied, clipping"]
FORMS = ["int8", "bf16"]


def train(rank: int, size: int) -> dict[str, Any]:
    """Some of the scripts on each carrier, and some forms: one world, for a GPU starts slowly."""
    found = {}
    for outer, names in (("nccl", NCCL), ("staged", STAGED)):
        os.environ["EVENER_OUTER"] = outer
        found.update(test_parts.train_all(rank, size, names, "exact"))
    forms = {form: test_parts.train_all(rank, size, ["tied"], form) for form in FORMS}
    return {"exact": found, **forms}


def test_trains_as_ddp_does() -> None:
    found = worlds.run([1, 1], train, gpu=True, env={**ENV, **test_parts.ENV})
    for rank in found:
        for name, (apart, equal, behind) in rank["exact"].items():
            assert apart < 1e-4, (name, apart)
            assert equal, name
            assert behind == test_parts.CASES[name][2], (name, behind)
    for form in FORMS:
        test_parts.check_form(form, [rank[form] for rank in found])
