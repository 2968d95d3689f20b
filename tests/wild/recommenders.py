"""Five recommenders as users write them, each beside the same program without Evener.

    python -m tests.wild.recommenders

Keras: two towers with string ids, wide and deep with Ftrl, and a GRU over hashed tokens of varying
length under `bucketed`. torch: a DLRM with a weight for each id of a bag, and two tasks that share
their tables. Losses must be those of a dense table or of the plain function, within 1e-4. Exit
status 1 where one is not.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable
from typing import Any

import numpy as np

STEPS, TOLERANCE = 12, 1e-4
Losses = tuple[list[float], list[float]]


def two_towers() -> Losses:
    """Keras' functional API: users and items by name, scored by the product of their towers."""
    import keras
    import tensorflow as tf

    import evener.embedding.tensorflow as de
    from evener.embedding.tensorflow.keras import Embedding

    draw = np.random.default_rng(0)
    users = np.array([[f"user:{i}"] for i in draw.integers(0, 40, 64)])
    items = np.array([[f"item/{i}"] for i in draw.integers(0, 30, 64)])
    clicks = draw.integers(0, 2, (64, 1)).astype("float32")

    def model(tables: list[Any], optimizer: Any, kind: str) -> Any:
        keras.utils.set_random_seed(3)
        inputs = [keras.Input((1,), dtype=kind, name=name) for name in ("user", "item")]
        towers = [
            keras.layers.Dense(8, name=f"tower-{i}")(keras.layers.Flatten()(table(given)))
            for i, (table, given) in enumerate(zip(tables, inputs, strict=True))
        ]
        score = keras.layers.Dot(1)(towers)
        made = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(score))
        made.compile(optimizer, "binary_crossentropy")
        return made

    def fit(made: Any, given: list[Any]) -> list[float]:
        return made.fit(
            given, clicks, epochs=STEPS, batch_size=64, shuffle=False, verbose=0
        ).history["loss"]

    sgd = keras.optimizers.SGD
    tables = [Embedding(8, key_dtype="string", name=name) for name in ("users", "items")]
    ours = model(tables, de.DynamicEmbeddingOptimizer(sgd(0.5)), "string")
    given = [tf.constant(users), tf.constant(items)]
    found = fit(ours, given)

    numbers, starts = [], []
    for layer, ids in zip(tables, (users, items), strict=True):
        names, index = np.unique(ids, return_inverse=True)
        numbers.append(index.reshape(-1, 1))
        layer.table.clear()  # rows begin anew, with the values that they began with
        starts.append(layer.table.lookup(tf.constant(names), insert=False).numpy())
    dense = [keras.layers.Embedding(len(start), 8) for start in starts]
    plain = model(dense, sgd(0.5), "int64")
    for layer, start in zip(dense, starts, strict=True):
        layer.set_weights([start])
    return found, fit(plain, numbers)


def wide_and_deep() -> Losses:
    """A wide part of single numbers by Ftrl and a deep part by Adagrad, in a loop of one's own."""
    import keras
    import tensorflow as tf

    import evener.embedding.tensorflow as de

    draw = np.random.default_rng(1)
    ids = draw.integers(0, 25, (64, 4))
    keys = ids * 2**50 - 7
    truth = draw.integers(0, 2, (64, 1)).astype("float32")
    every = np.arange(25) * 2**50 - 7
    wide = de.get_variable("wild-wide", 0.0, dim=1)
    deep = de.get_variable("wild-deep", dim=8)
    first = deep.lookup(tf.constant(every), insert=False)
    # Looked up by a product: with tf.gather Ftrl steps otherwise, by up to 1.5e-3 in the loss here.
    tables = (tf.Variable(tf.zeros([25, 1])), tf.Variable(first))

    def losses(
        look: Callable[[int, Any], Any], given: Any, anchors: list[Any], own: bool
    ) -> list[float]:
        keras.utils.set_random_seed(4)
        tower = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        tower.build((None, 32))
        wrap = de.DynamicEmbeddingOptimizer if own else lambda optimizer: optimizer
        ftrl = wrap(keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.001))
        adagrad = wrap(keras.optimizers.Adagrad(0.1))
        ftrl.build(anchors[:1])
        adagrad.build([anchors[1], *tower.trainable_variables])
        found = []
        for _ in range(STEPS):
            with tf.GradientTape() as tape:
                linear = tf.reduce_sum(look(0, given), 1)
                logits = linear + tower(tf.reshape(look(1, given), [64, 32]))
                loss = tf.reduce_mean(
                    tf.nn.sigmoid_cross_entropy_with_logits(labels=truth, logits=logits)
                )
            gradients = tape.gradient(loss, [*anchors, *tower.trainable_variables])
            ftrl.apply(gradients[:1], anchors[:1])
            adagrad.apply(gradients[1:], [anchors[1], *tower.trainable_variables])
            found.append(float(loss))
        return found

    variables = (wide, deep)
    found = losses(
        lambda i, given: variables[i].lookup(given, insert=True),
        tf.constant(keys),
        [wide.anchor, deep.anchor],
        True,
    )
    right = losses(
        lambda i, given: tf.one_hot(given, 25) @ tables[i], tf.constant(ids), list(tables), False
    )
    return found, right


def gru() -> Losses:
    """A GRU over hashed tokens: batches differ in their number of rows, and rows in length."""
    import keras
    import tensorflow as tf

    from evener.compile import Options
    from evener.compile.tensorflow import bucketed

    keras.utils.set_random_seed(5)
    table = keras.layers.Embedding(50, 8, mask_zero=True)
    cell, head = keras.layers.GRU(8), keras.layers.Dense(1)
    cell.build((None, 10, 8))

    def forward(tokens: Any) -> Any:
        mask = tf.not_equal(tokens, 0)
        return head(cell(table(tokens), mask=mask))

    draw = np.random.default_rng(2)
    quick = Options(plan_after=4, hits=1, judge=1000, most=2, background=False)
    made = bucketed(forward, name="wild-gru", options=quick, record=False)
    found, right = [], []
    for size in (16, 16, 16, 16, 16, 11, 14, 9, 16, 13, 12, 15):
        lengths = draw.integers(1, 11, size)
        tokens = draw.integers(1, 50, (size, 10)) * (np.arange(10) < lengths[:, None])
        given = tf.constant(tokens)
        found.append(float(tf.reduce_mean(made(given))))
        right.append(float(tf.reduce_mean(forward(given))))
    for said in made.report().values():
        calls = sum(bucket["calls"] for bucket in said["buckets"])
        print(f"  GRU: {calls} calls in buckets{'; ' + said['off'] if said['off'] else ''}")
    return found, right


def dlrm() -> Losses:
    """Bags with a weight for each id, a bottom net and their products, as in DLRM."""
    import torch
    from torch import nn

    from evener.embedding import Adagrad, Options
    from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer

    draw = np.random.default_rng(3)
    lengths = draw.integers(0, 5, 32)
    ids = torch.tensor(draw.integers(0, 20, lengths.sum()))
    weights = torch.tensor(draw.random(len(ids)), dtype=torch.float32)
    offsets = torch.tensor(np.concatenate([[0], lengths.cumsum()[:-1]]))
    dense = torch.tensor(draw.normal(size=(32, 4)), dtype=torch.float32)
    truth = torch.tensor(draw.integers(0, 2, (32, 1)), dtype=torch.float32)

    def losses(bags: list[Any], wrap: Callable[[Any, Any], Any]) -> list[float]:
        torch.manual_seed(0)
        bottom, top = nn.Linear(4, 8), nn.Linear(3, 1)
        nets = [*bottom.parameters(), *top.parameters()]
        optimizer = wrap(bags, nets)
        found = []
        for _ in range(STEPS):
            parts = [bottom(dense)]
            parts += [bag(ids, offsets, per_sample_weights=weights) for bag in bags]
            products = [(a * b).sum(1) for i, a in enumerate(parts) for b in parts[:i]]
            logits = top(torch.stack(products, 1))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    options = Options(8, optimizer=Adagrad(0.1, 1e-10))
    ours: list[Any] = [DynamicEmbeddingBag(options, f"wild-dlrm-{i}", mode="sum") for i in range(2)]
    plain: list[Any] = []
    for bag in ours:
        start = bag.store.lookup_infer(torch.arange(20))
        plain.append(nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum"))

    def own(bags: list[Any], nets: list[Any]) -> Any:
        return DynamicOptimizer(nn.ModuleList(bags), torch.optim.Adagrad(nets, 0.1))

    def dense_too(bags: list[Any], nets: list[Any]) -> Any:
        tables = [parameter for bag in bags for parameter in bag.parameters()]
        return torch.optim.Adagrad([*nets, *tables], 0.1)

    return losses(ours, own), losses(plain, dense_too)


def tasks() -> Losses:
    """Two tasks that share their tables and take turns; each has a head of its own."""
    import torch
    from torch import nn

    from evener.embedding import LazyAdam, Options
    from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer

    draw = np.random.default_rng(4)
    batches = [torch.tensor(draw.integers(0, 30, (16, 2))) for _ in range(STEPS)]
    truth = torch.tensor(draw.normal(size=(16, 1)), dtype=torch.float32)

    def losses(table: Any, wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
        steppers = wrap(torch.optim.SGD(heads.parameters(), 0.1))
        found = []
        for turn, batch in enumerate(batches):
            logits = heads[turn % 2](table(batch).flatten(1))
            loss = (logits - truth).square().mean()
            if turn % 3 == 0:  # both tasks at once
                other = heads[1 - turn % 2](table(batch.flip(1)).flatten(1))
                loss = loss + (other + truth).square().mean()
            for each in steppers:
                each.zero_grad()
            loss.backward()
            for each in steppers:
                each.step()
            found.append(float(loss.detach()))
        return found

    table = DynamicEmbedding(Options(8, optimizer=LazyAdam(0.01)), "wild-tasks")
    dense = nn.Embedding.from_pretrained(
        table.store.lookup_infer(torch.arange(30)), freeze=False, sparse=True
    )
    found = losses(table, lambda sgd: [DynamicOptimizer(table, sgd)])
    return found, losses(dense, lambda sgd: [sgd, torch.optim.SparseAdam(dense.parameters(), 0.01)])


PROGRAMS = {
    "DLRM, weights in bags": dlrm,
    "two tasks, shared table": tasks,
    "two towers, string ids": two_towers,
    "wide and deep, Ftrl": wide_and_deep,
    "GRU under bucketed": gru,
}


def main() -> int:
    """Run all of them; exit status."""
    good = True
    for name, program in PROGRAMS.items():
        found, right = program()
        far = max(abs(a - b) for a, b in zip(found, right, strict=True))
        same = far < TOLERANCE and len(set(right)) > 1
        good = good and same
        print(
            f"{name:26} {right[0]:.4f} to {right[-1]:.4f}, largest difference {far:.1e}: "
            f"{'equal' if same else 'DIFFERS'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
