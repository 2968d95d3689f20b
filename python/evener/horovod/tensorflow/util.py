"""Small tools that scripts and tests take from `horovod.tensorflow.util`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def _executing_eagerly() -> bool:
    """Whether operations run at once: not inside tf.function, nor in a v1 graph."""
    return bool(context.executing_eagerly())


def plain(variable: Any) -> Any:
    """TensorFlow's variable of a variable of Keras 3; any other as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def _make_subgraph(function: Any) -> Any:
    return tf.function(function)


def vars_to_refs(variables: Any) -> Any:
    """Variables as keys of a dict; lists as tuples."""
    if isinstance(variables, list):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """The other way."""
    if isinstance(refs, tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()
