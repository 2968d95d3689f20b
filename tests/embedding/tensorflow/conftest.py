"""Every check gets a name for its tables that no other check has, and no store is left behind."""

import itertools
from collections.abc import Iterator

import pytest

from evener.embedding import forget, names

_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """For a table."""
    # Not above: whoever collects the tests around this folder reads this file too.
    from evener.embedding.tensorflow import _library, _variable

    yield f"table_{next(_numbers)}"
    _variable.named.clear()
    for store in names():
        forget(store)
    _library.forget()
