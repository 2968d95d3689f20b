"""Every check gets a name for its tables that no other check has, and no store is left behind."""

import itertools
from collections.abc import Iterator

import pytest

import evener.embedding.tensorflow  # noqa: F401  (loads the ops, sets tf.dynamic_embedding)
from evener.embedding import forget, names
from evener.embedding.tensorflow import _library, _variable

_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """For a table."""
    yield f"table_{next(_numbers)}"
    _variable.named.clear()
    for store in names():
        forget(store)
    _library.forget()
