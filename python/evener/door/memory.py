"""The memory engine under every transformers Trainer that a program makes, without a changed line.

    EVENER_ZERO=ds_config.json python sft.py --model_name_or_path ...

An instance of Trainer, or of a class that it is a base of, becomes one of `zero.trainer`'s class.
Unlike the other doors this one raises: a program that asked for it would not fit without it.
"""

from __future__ import annotations

import logging
from typing import Any

from evener import zero
from evener.base import settings

logger = logging.getLogger("evener.door")

_kinds: dict[type[Any], type[Any]] = {}


def under(kind: type[Any]) -> type[Any]:
    """`kind` with the engine under it; itself where the script has called `zero.trainer`.

    Raises ConfigError where the configuration that EVENER_ZERO names cannot be.
    """
    if getattr(kind, "evener", None) is True:
        return kind
    if kind not in _kinds:
        given = settings.EVENER_ZERO.get()
        _kinds[kind] = zero.trainer(kind, None if given.lower() == "on" else given)
        logger.info("EVENER_ZERO: %s trains under evener.zero", kind.__name__)
    return _kinds[kind]
