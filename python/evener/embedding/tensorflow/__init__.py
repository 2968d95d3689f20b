"""Dynamic embeddings for TensorFlow: tables that grow and shrink, instead of dense variables.

    import evener.embedding.tensorflow as de        # also makes tf.dynamic_embedding

    table = de.get_variable("user", dim=16)
    rows = de.embedding_lookup(table, user_ids)     # any int64; eager, tf.function, TF1 graphs
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(1e-3))

The names and arguments are those of TensorFlow Recommenders-Addons and DeepRec. The rows are in the
store of `evener.embedding`, which PyTorch shares. Importing this module imports TensorFlow, loads
the ops (so that a SavedModel that uses them can be loaded) and sets `tf.dynamic_embedding` to it.
Keras' layer is in `evener.embedding.tensorflow.keras`.
"""

from __future__ import annotations

import sys

try:
    import tensorflow as _tf
except ModuleNotFoundError as _missing:
    if _missing.name != "tensorflow":
        raise
    from evener.errors import UsageError as _UsageError

    raise _UsageError(
        "TensorFlow is not installed", "pip install 'evener[tensorflow]', or tensorflow-cpu"
    ) from None

from evener.embedding.tensorflow import _library
from evener.embedding.tensorflow._checkpoint import load, save
from evener.embedding.tensorflow._get import get_variable
from evener.embedding.tensorflow._lookup import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    group_embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from evener.embedding.tensorflow._optimizer import DynamicEmbeddingOptimizer
from evener.embedding.tensorflow._options import (
    CBFFilter,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    InitializerOption,
    L2WeightEvict,
    LFUEvict,
    LRUEvict,
    ProbabilityFilter,
    StorageOption,
)
from evener.embedding.tensorflow._stores import thaw
from evener.embedding.tensorflow._variable import DynamicVariable, inference

library_path = _library.path

_library.ops()
_tf.dynamic_embedding = sys.modules[__name__]
_tf.compat.v1.dynamic_embedding = sys.modules[__name__]

__all__ = [
    "CBFFilter",
    "CounterFilter",
    "DynamicEmbeddingOptimizer",
    "DynamicVariable",
    "EmbeddingVariableOption",
    "GlobalStepEvict",
    "InitializerOption",
    "L2WeightEvict",
    "LFUEvict",
    "LRUEvict",
    "ProbabilityFilter",
    "StorageOption",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "get_variable",
    "group_embedding_lookup_sparse",
    "inference",
    "library_path",
    "load",
    "safe_embedding_lookup_sparse",
    "save",
    "thaw",
]
