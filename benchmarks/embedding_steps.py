"""Training steps over sparse ids: Evener beside dense variables, nn.EmbeddingBag and TFRA.

    python benchmarks/embedding_steps.py --json benchmarks/results/embedding-steps.json

A batch is 4096 samples of 26 ids (Zipf 1.05 over `--rows` ids); a step is the lookup, a tower of
two layers, its gradients, and the optimizer's step on all of it. Every way gets the same batches,
one after another in turn; a figure is its median step. A dense variable and nn.EmbeddingBag have a
row for each id from the start. TFRA needs TensorFlow 2.16: what is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import torch
from torch import nn

import evener.embedding.tensorflow as de
from evener.embedding import Adagrad, LazyAdam, Options
from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer
from evener.tools.bench.embedding.command import draw

SAMPLES, FIELDS, DIM, HIDDEN, LR = 4096, 26, 16, 64, 0.01
Step = Callable[[Any, Any], Any]


def tower() -> tuple[tf.Variable, tf.Variable]:
    """Two layers without biases."""
    shape = [FIELDS * DIM, HIDDEN]
    return tf.Variable(tf.random.normal(shape, stddev=0.05)), tf.Variable(tf.ones([HIDDEN, 1]))


def loss_of(rows: Any, layers: Any, labels: Any) -> Any:
    """Cross entropy of [samples * fields, dim]."""
    hidden = tf.nn.relu(tf.reshape(rows, [SAMPLES, FIELDS * DIM]) @ layers[0])
    logits = (hidden @ layers[1])[:, 0]
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def keras_optimizer(kind: str) -> Any:
    return getattr(tf.keras.optimizers, kind.title())(LR)


def with_evener(kind: str) -> Step:
    table, layers = de.get_variable(f"steps-{kind}", dim=DIM), tower()
    optimizer = de.DynamicEmbeddingOptimizer(keras_optimizer(kind))
    variables = [table.anchor, *layers]
    optimizer.build(variables)

    @tf.function
    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(de.embedding_lookup(table, ids), layers, labels)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def with_dense(kind: str, rows: int) -> Step:
    table, layers = tf.Variable(tf.random.normal([rows, DIM], stddev=0.05)), tower()
    optimizer = keras_optimizer(kind)
    variables = [table, *layers]
    optimizer.build(variables)

    @tf.function
    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf.gather(table, ids), layers, labels)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def with_tfra(kind: str, rows: int) -> Step:
    import tensorflow_recommenders_addons.dynamic_embedding as tfra  # optional

    table = tfra.get_variable(
        f"tfra-{kind}", dim=DIM, init_size=rows, initializer=tf.random_normal_initializer(0, 0.05)
    )
    made = {"adagrad": "AdagradOptimizer", "adam": "AdamOptimizer"}[kind]
    optimizer = tfra.DynamicEmbeddingOptimizer(getattr(tf.compat.v1.train, made)(LR))
    layers, shadow = tower(), tfra.shadow_ops.ShadowVariable(table, name=f"shadow-{kind}")
    variables = [shadow, *layers]

    @tf.function
    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tfra.shadow_ops.embedding_lookup(shadow, ids), layers, labels)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


class Model(nn.Module):
    """The same in torch: `bag` gives [samples * fields, dim]."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        self.top = nn.Sequential(
            nn.Linear(FIELDS * DIM, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, 1, bias=False)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.bag(ids, torch.arange(len(ids)))
        return self.top(rows.view(SAMPLES, FIELDS * DIM))[:, 0]


def with_torch(kind: str, rows: int | None) -> Step:
    """Evener's where `rows` is None, else nn.EmbeddingBag(sparse=True)."""
    dense = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[kind]
    optimizers: list[Any]
    if rows is None:
        own = Adagrad(lr=LR) if kind == "adagrad" else LazyAdam(lr=LR)
        bag: nn.Module = DynamicEmbeddingBag(Options(DIM, optimizer=own), f"torch-{kind}")
        model = Model(bag)
        optimizers = [DynamicOptimizer(model, dense(model.top.parameters(), lr=LR))]
    else:
        bag = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
        model = Model(bag)
        sparse = torch.optim.Adagrad if kind == "adagrad" else torch.optim.SparseAdam
        optimizers = [sparse(bag.parameters(), lr=LR), dense(model.top.parameters(), lr=LR)]

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    """Both optimizers, all ways."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    drawn = draw(given.rows, SAMPLES * FIELDS, given.zipf, given.steps + 5)
    labels = (np.random.default_rng(3).random(SAMPLES) < 0.3).astype(np.float32)
    forms: dict[str, list[Any]] = {
        "tf": [(tf.constant(ids), tf.constant(labels)) for ids in drawn],
        "torch": [(torch.from_numpy(ids), torch.from_numpy(labels)) for ids in drawn],
    }
    results: dict[str, Any] = {}
    for kind in ("adagrad", "adam"):
        makers: dict[str, tuple[str, Callable[[], Step]]] = {
            "evener, TensorFlow": ("tf", lambda kind=kind: with_evener(kind)),
            "tf.Variable": ("tf", lambda kind=kind: with_dense(kind, given.rows)),
            "TFRA": ("tf", lambda kind=kind: with_tfra(kind, given.rows)),
            "evener, torch": ("torch", lambda kind=kind: with_torch(kind, None)),
            "nn.EmbeddingBag": ("torch", lambda kind=kind: with_torch(kind, given.rows)),
        }
        steps: dict[str, tuple[str, Step]] = {}
        for name, (form, make) in makers.items():
            try:
                steps[name] = (form, make())
            except ImportError as error:
                print(f"left out: {name}: {error}")
        took: dict[str, list[float]] = {name: [] for name in steps}
        for at in range(given.steps + 5):
            for name, (form, step) in steps.items():
                began = time.perf_counter()
                float(step(*forms[form][at]))
                if at >= 5:
                    took[name].append((time.perf_counter() - began) * 1e3)
        own = took["evener, TensorFlow"]
        results[kind] = {
            name: {
                "ms": round(statistics.median(each), 2),
                "best_ms": round(min(each), 2),
                "by_evener_tensorflow": round(
                    statistics.median(t / e for t, e in zip(each, own, strict=True)), 2
                ),
            }
            for name, each in took.items()
        }
        for name, one in results[kind].items():
            print(
                f"{kind:8} {name:20} {one['ms']:7.1f} ms, best {one['best_ms']:7.1f}, "
                f"{one['by_evener_tensorflow']:5.2f} x Evener's in TensorFlow",
                flush=True,
            )
    if given.json:
        result = {
            "what": f"steps of {SAMPLES} x {FIELDS} ids, dim {DIM}, {given.rows} ids",
            "machine": {"cpus": len(os.sched_getaffinity(0)), "arch": platform.machine()},
            "versions": {"tensorflow": tf.__version__, "torch": torch.__version__},
            "results": results,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
