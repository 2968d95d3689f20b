"""Objects as text: pickled, in base 64."""

from __future__ import annotations

import base64
from typing import Any

from evener.horovod.common import pickling


def dumps_base64(obj: Any, to_ascii: bool = True) -> Any:
    """`obj` as a str, or as bytes where `to_ascii` is False."""
    data = base64.b64encode(pickling.dumps(obj))
    return data.decode("ascii") if to_ascii else data


def loads_base64(encoded: Any) -> Any:
    """The other way; runs code that `encoded` names."""
    return pickling.loads(base64.b64decode(encoded))
