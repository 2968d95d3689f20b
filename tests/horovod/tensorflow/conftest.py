"""Both ranks of a world run the checks in this folder, in the same order."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def world() -> None:
    """Begin once: TensorFlow takes seconds to import.

    Here and not above: whoever collects the tests around this folder reads this file too.
    """
    import evener.horovod.tensorflow as hvd

    even = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=even)
