"""Both ranks of a world run the checks in this folder, in the same order."""

from __future__ import annotations

import pytest

import evener.horovod.tensorflow as hvd


@pytest.fixture(autouse=True, scope="session")
def world() -> None:
    """Begin once: TensorFlow takes seconds to import."""
    even = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=even)
