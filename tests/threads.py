"""One thread per process, for folders whose models are tiny: waiting threads of OpenMP spin, and
more threads than the ranks have add in another order.

A folder's conftest.py imports the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
