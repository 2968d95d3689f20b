"""Objects and functions as bytes: by cloudpickle where it is installed, which takes lambdas too."""

from __future__ import annotations

import pickle
from typing import Any


def dumps(value: Any) -> bytes:
    """`value` as bytes. Raises what pickle raises for what cannot be pickled."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return bytes(cloudpickle.dumps(value))


def loads(data: bytes) -> Any:
    """The other way; runs code that `data` names."""
    return pickle.loads(data)
