"""`import horovod.keras as hvd`: the same as `horovod.tensorflow.keras`."""

from __future__ import annotations

from evener.horovod.tensorflow.keras import *  # noqa: F403
from evener.horovod.tensorflow.keras import __all__ as _names
from evener.horovod.tensorflow.keras import callbacks, elastic

__all__ = [*_names]
_MODULES = (callbacks, elastic)
