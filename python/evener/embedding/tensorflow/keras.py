"""A Keras 3 layer on a dynamic embedding, for the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from evener.embedding.tensorflow import _optimizer, _stores
from evener.embedding.tensorflow._lookup import (
    Pooled,
    lookup_spread,
    safe_embedding_lookup_sparse,
    safe_lines,
)
from evener.embedding.tensorflow._options import EmbeddingVariableOption, initial
from evener.embedding.tensorflow._sharded import Asked
from evener.embedding.tensorflow._variable import DynamicVariable
from evener.embedding.tensorflow._weights import Anchor
from evener.errors import UsageError

_optimizer.register()


@keras.saving.register_keras_serializable(package="evener")
class Embedding(keras.layers.Layer):
    """Like `keras.layers.Embedding` without an `input_dim`: any id, and rows that come as needed.

    `dim`: values per row. `key_dtype`: "int64" or "string". `combiner`: None (the result is the
    ids' shape, then dim) or "sum", "mean", "sqrtn" over the last axis of dense or sparse ids.
    `initializer`, `ev_option`, `optimizer`, `seed`, `init_size`, `shard`: as for `get_variable`.
    Rows are added while training; `evaluate` and `predict` add none. `.save()`, `save_weights()`
    and `export()` hold rows and optimizer slots; `get_weights()` and `set_weights()` (so also
    callbacks that bring the best weights back) hold rows. With `shard=True` `get_weights()` has
    those of this rank, and `evener.embedding.tensorflow.save` is what saves.

    Compile the model with `DynamicEmbeddingOptimizer(...)`.
    """

    def __init__(
        self,
        dim: int,
        *,
        key_dtype: str = "int64",
        value_dtype: str = "float32",
        combiner: str | None = None,
        initializer: Any = None,
        ev_option: EmbeddingVariableOption | Mapping[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        seed: int | None = None,
        init_size: int = 0,
        shard: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"Keras runs on {keras.backend.backend()}",
                "set KERAS_BACKEND=tensorflow; for PyTorch use evener.embedding.torch",
            )
        self.dim = dim
        self.key_dtype = key_dtype
        self.value_dtype = value_dtype
        self.combiner = combiner
        # A plain dict of the store's is taken as it is.
        own = isinstance(initializer, Mapping) and "kind" in initializer
        self.initializer = (
            initializer
            if own or initializer is None or isinstance(initializer, int | float)
            else keras.initializers.get(initializer)
        )
        if isinstance(ev_option, Mapping):
            ev_option = EmbeddingVariableOption.from_config(ev_option)
        self.ev_option = ev_option
        self.seed = seed
        self.init_size = init_size
        self.shard = shard
        self._store_optimizer = optimizer
        self.table: DynamicVariable | None = None
        self.supports_masking = False
        # Ids must arrive as they are: Keras would make them of the layer's float type.
        self.autocast = False
        self._convert_input_args = False

    def build(self, input_shape: Any) -> None:
        """Makes the table, under the layer's name."""
        anchor = Anchor("zeros", (self.dim,), "float32", trainable=self.trainable, name="anchor")
        self._track_variable(anchor)
        self.table = DynamicVariable(
            _stores.unused_name(self.path or self.name),
            dim=self.dim,
            key_dtype=self.key_dtype,
            value_dtype=self.value_dtype,
            initializer=self.initializer,
            seed=self.seed,
            init_size=self.init_size,
            ev_option=self.ev_option,
            optimizer=self._store_optimizer,
            anchor=anchor,
            checkpoint=False,
            shard=self.shard,
        )
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The rows of the ids."""
        assert self.table is not None
        adds = bool(training) and self.trainable
        if isinstance(inputs, tf.RaggedTensor):
            inputs = inputs.to_sparse()
        if isinstance(inputs, tf.SparseTensor):
            return safe_embedding_lookup_sparse(
                self.table, inputs, combiner=self.combiner or "mean", insert=adds
            )
        return self._combined(self.table.lookup(inputs, insert=adds))

    def ask(self, inputs: Any, adds: bool) -> tuple[Asked, Pooled]:
        """What a lookup asks for, and what it makes of the rows: for lookups that go together."""
        assert self.table is not None
        table = self.table
        if isinstance(inputs, tf.RaggedTensor):
            inputs = inputs.to_sparse()
        if isinstance(inputs, tf.SparseTensor):
            return safe_lines(table, inputs, combiner=self.combiner or "mean", insert=adds)
        keys = table.keys(inputs, adds)

        def pooled(rows: Any) -> Any:
            rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.dim]], 0))
            rows.set_shape(keys.shape.concatenate([self.dim]))
            return self._combined(rows)

        return Asked(table, tf.reshape(keys, [-1]), adds), pooled

    def _combined(self, rows: Any) -> Any:
        if self.combiner is None:
            return rows
        if self.combiner == "sum":
            return tf.reduce_sum(rows, -2)
        mean = tf.reduce_mean(rows, -2)
        return (
            mean
            if self.combiner == "mean"
            else mean * tf.sqrt(tf.cast(tf.shape(rows)[-2], rows.dtype))
        )

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """The ids' shape (without the last axis under a combiner), then dim."""
        kept = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.dim)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """Said, not traced: tracing would look rows up."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.value_dtype)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of it. Raises UsageError for a whole model in HDF5."""
        if global_state.get_global_attribute("use_legacy_config", False):
            raise UsageError(
                f"a whole model in an .h5 file would lose the rows of embedding {self.name!r}",
                "save it as .keras, or its weights: save_weights('NAME.weights.h5')",
            )
        return {
            **super().get_config(),
            "dim": self.dim,
            "key_dtype": self.key_dtype,
            "value_dtype": self.value_dtype,
            "combiner": self.combiner,
            "initializer": keras.initializers.serialize(self.initializer)
            if isinstance(self.initializer, keras.initializers.Initializer)
            else self.initializer,
            "ev_option": self.ev_option.to_config() if self.ev_option else None,
            # A table's own seed comes from its name, and a clone's has another name.
            "seed": self.table.seed if self.table else self._given_seed(),
            "init_size": self.init_size,
            "shard": self.shard,
            "optimizer": self._store_optimizer,
        }

    def _given_seed(self) -> int | None:
        if self.seed is not None or self.ev_option is None or self.initializer is not None:
            return self.seed
        return initial(self.ev_option.init_option.initializer)[1]

    def save_own_variables(self, store: Any) -> None:
        """The anchor and the whole content of the stores, for `.keras` and `.weights.h5`."""
        store["0"] = np.zeros(self.dim, np.float32)
        for key, tensor in self._saved().items():
            store[key] = np.asarray(tensor)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the content of the stores."""
        assert self.table is not None
        for index, part in enumerate(self.table.parts):
            part._restore_from_tensors(
                {
                    what: tf.constant(np.asarray(store[f"{what}_{index}"]), tf.uint8)
                    for what in ("snapshot", "made_with")
                }
            )

    def _saved(self) -> dict[str, Any]:
        assert self.table is not None
        return {
            f"{what}_{index}": tensor
            for index, part in enumerate(self.table.parts)
            for what, tensor in part._serialize_to_tensors().items()
        }


BasicEmbedding = Embedding


@keras.saving.register_keras_serializable(package="evener")
class EmbeddingCollection(keras.layers.Layer):
    """Features and the `Embedding` of each: a dict of ids to a dict of what each layer gives.

    Layers with `shard=True` are looked up together: their keys cross in one exchange, their rows in
    one and their gradients in one, whatever the number of tables. A layer may serve several
    features; a key of both counts once. Every rank must call the same collections in the same
    order, and train by their results alike.
    """

    def __init__(self, embeddings: Mapping[str, Any], **options: Any) -> None:
        """Raise UsageError for a layer that is no `Embedding`."""
        super().__init__(**options)
        for feature, layer in embeddings.items():
            if not isinstance(layer, Embedding):
                raise UsageError(
                    f"feature {feature!r} has a {type(layer).__name__}",
                    "give each feature an Embedding of evener.embedding.tensorflow.keras",
                )
        self.features = list(embeddings)
        self.embeddings = list({id(layer): layer for layer in embeddings.values()}.values())
        self._of = {
            feature: next(i for i, each in enumerate(self.embeddings) if each is layer)
            for feature, layer in embeddings.items()
        }
        self.autocast = False
        self._convert_input_args = False

    def _layer(self, feature: str) -> Embedding:
        found: Embedding = self.embeddings[self._of[feature]]
        return found

    def build(self, input_shape: Any) -> None:
        """Makes the tables."""
        for layer in self.embeddings:
            if not layer.built:
                layer.build(None)
        self.built = True

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> dict[str, Any]:
        """What the layer of each feature gives for its ids."""
        if missing := [feature for feature in self.features if feature not in inputs]:
            raise UsageError(
                f"the ids of feature {missing[0]!r} are not given",
                f"give a dict of ids for {', '.join(self.features)}",
            )
        found: dict[str, Any] = {}
        spread: list[tuple[str, Asked, Pooled]] = []
        for feature in self.features:
            layer = self._layer(feature)
            if layer.shard:
                adds = bool(training) and layer.trainable
                spread.append((feature, *layer.ask(inputs[feature], adds)))
            else:
                found[feature] = layer(inputs[feature], training=training)
        if spread:
            rows = lookup_spread([keys for _, keys, _ in spread])
            for (feature, _, pooled), each in zip(spread, rows, strict=True):
                found[feature] = pooled(each)
        return {feature: found[feature] for feature in self.features}

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """Said, not traced: tracing would look rows up."""
        return {
            feature: self._layer(feature).compute_output_spec(inputs[feature])
            for feature in self.features
        }

    def get_config(self) -> dict[str, Any]:
        """The layers, once each, and which feature has which."""
        return {
            **super().get_config(),
            "layers": [keras.saving.serialize_keras_object(each) for each in self.embeddings],
            "of": self._of,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmbeddingCollection:
        """What `get_config` gave."""
        given = dict(config)
        layers = [keras.saving.deserialize_keras_object(each) for each in given.pop("layers")]
        return cls({feature: layers[i] for feature, i in given.pop("of").items()}, **given)
