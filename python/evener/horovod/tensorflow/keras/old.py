"""What scripts for Horovod say to Keras, and Keras 3 does not take any more.

Upstream's examples, and the scripts that were made from them, call
`model.compile(..., experimental_run_tf_function=False)`: with Keras 2 it made Keras use the
optimizer's own gradients. Keras 3 always does, and refuses the argument. So it is left out, and one
line says so.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from evener.base.log import info0

_ARGUMENT = "experimental_run_tf_function"


def accept_old_arguments() -> None:
    """From the first distributed optimizer on. Does nothing where it is done already."""
    # Where it is defined: Keras takes a model with a `compile` of its own for one that it cannot
    # compile again when it is loaded.
    model = next(kind for kind in tf.keras.Model.__mro__ if "compile" in vars(kind))
    given = model.compile
    if hasattr(given, "evener"):
        return

    @functools.wraps(given)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ARGUMENT in kwargs:
            del kwargs[_ARGUMENT]
            info0("model.compile(%s=...) is Keras 2's: it is left out", _ARGUMENT)
        return given(self, *args, **kwargs)

    compiled.evener = True  # type: ignore[attr-defined]
    model.compile = compiled
