"""A recommender on tables that need no vocabulary: any id is a key, and rows come when ids do."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import evener.embedding.tensorflow as de
from evener.embedding.tensorflow.keras import Embedding

FIELDS = ("user", "item")


def clicks(samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Ids int64 [samples, 1] by field, and whether each was a click, float32 [samples]."""
    draw = np.random.default_rng(0)
    known = {name: draw.integers(-(2**63), 2**63 - 1, 500) for name in FIELDS}
    picked = {name: draw.integers(0, 500, samples) for name in FIELDS}
    liked = {name: draw.normal(0, 2, 500) for name in FIELDS}
    score = sum(liked[name][picked[name]] for name in FIELDS)
    ids = {name: known[name][picked[name]][:, None] for name in FIELDS}
    return ids, (draw.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)


def main() -> None:
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in FIELDS}
    vectors = [Embedding(8, combiner="sum", name=f"{name}s")(inputs[name]) for name in FIELDS]
    hidden = keras.layers.Dense(32, "relu")(keras.layers.Concatenate()(vectors))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"])
    ids, labels = clicks(20_000)
    model.fit(ids, labels, epochs=3, batch_size=256, verbose=2)
    model.save("recommender.keras")  # the rows are in it


if __name__ == "__main__":
    main()
