"""Eight recommenders as users write them, each beside the same program without Evener.

    python -m tests.wild.recommenders

Keras: two towers with string ids, two towers that retrieve (a history that shares the items' table,
the batch's other items as negatives), a DLRM with multi-hot features, wide and deep with Ftrl, and
a GRU over hashed tokens of varying length under `bucketed`. torch: a DLRM with a weight for each id
of a bag, two tasks that share their tables, and on TorchRec's collections a model that attends to a
history (as DIN). Losses must be those of a dense table or of the plain function, within 1e-4. Exit
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


def product(start: Any) -> Any:
    """A dense table with these rows, looked up by a product.

    With tf.gather Keras' Adagrad squares the parts of a row's gradient, and not their sum.
    """
    import keras

    class Product(keras.layers.Layer):
        def build(self, _shape: Any) -> None:
            self.table = self.add_weight(shape=start.shape, initializer="zeros")  # draws nothing
            self.table.assign(start)

        def call(self, ids: Any) -> Any:
            return keras.ops.one_hot(ids, start.shape[0]) @ self.table

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, start.shape[1])

    layer = Product()
    layer.build(None)  # in a graph nothing would be assigned
    return layer


def retrieval() -> Losses:
    """Keras: a user is the mean of the items that he has seen; a class with a step of its own."""
    import keras
    import tensorflow as tf

    import evener.embedding.tensorflow as de
    from evener.embedding.tensorflow.keras import Embedding

    draw = np.random.default_rng(5)
    seen, users = draw.integers(0, 40, (96, 6)), draw.integers(0, 25, (96, 1))
    items = draw.integers(0, 40, (96, 1))

    class Towers(keras.Model):
        def __init__(self, tables: list[Any]) -> None:
            super().__init__()
            keras.utils.set_random_seed(7)
            self.items, self.users = tables
            self.left, self.right = keras.layers.Dense(8, "relu"), keras.layers.Dense(8)

        def call(self, given: dict[str, Any], training: bool = False) -> Any:
            history = tf.reduce_mean(self.items(given["seen"], training=training), 1)
            user = tf.concat([history, self.users(given["user"], training=training)[:, 0]], 1)
            item = self.items(given["item"], training=training)[:, 0]
            left, right = (tf.nn.l2_normalize(x, 1) for x in (self.left(user), self.right(item)))
            return left @ tf.transpose(right) / 0.2  # [batch, batch]

        def train_step(self, given: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = self(given, training=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        labels=tf.range(tf.shape(logits)[0]), logits=logits
                    )
                )
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"nll": loss}

    def fit(tables: list[Any], optimizer: Any, scale: int) -> list[float]:
        given = {"seen": seen * scale, "user": users * scale, "item": items * scale}
        model = Towers(tables)
        model.compile(optimizer)
        batches = tf.data.Dataset.from_tensor_slices(given).batch(32)
        return model.fit(batches, shuffle=False, epochs=STEPS, verbose=0).history["nll"]

    scale = 2**45 + 1
    tables = [Embedding(8, seed=i, name=f"retrieval-{i}") for i in range(2)]
    found = fit(tables, de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.05)), scale)
    dense = []
    for layer, count in zip(tables, (40, 25), strict=True):
        layer.table.clear()
        start = layer.table.lookup(tf.range(count, dtype=tf.int64) * scale, insert=False)
        dense.append(product(start))
    return found, fit(dense, keras.optimizers.Adagrad(0.05), 1)


def dlrm_keras() -> Losses:
    """Keras' functional API: ids of three multi-hot features, a bottom net, and their products."""
    import keras
    import tensorflow as tf

    import evener.embedding.tensorflow as de
    from evener.embedding.tensorflow.keras import Embedding

    draw = np.random.default_rng(6)
    sizes, hots = (30, 3, 50), (4, 1, 7)
    numbers = draw.normal(size=(64, 5)).astype("float32")
    ids = [draw.integers(0, n, (64, hot)) for n, hot in zip(sizes, hots, strict=True)]
    clicks = draw.integers(0, 2, (64, 1)).astype("float32")

    def fit(
        tables: list[Any], optimizer: Any, given: list[Any], pool: Callable[[Any], Any]
    ) -> list[float]:
        keras.utils.set_random_seed(8)
        dense = keras.Input((5,))
        inputs = [keras.Input((hot,), dtype="int64") for hot in hots]
        bottom = keras.layers.Dense(8, "relu")(keras.layers.Dense(16, "relu")(dense))
        bags = [pool(table(given)) for table, given in zip(tables, inputs, strict=True)]
        vectors = keras.ops.stack([bottom, *bags], 1)
        products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
        upper = [products[:, i, j] for i in range(4) for j in range(i)]
        top = keras.ops.concatenate([bottom, keras.ops.stack(upper, 1)], 1)
        score = keras.layers.Dense(1)(keras.layers.Dense(16, "relu")(top))
        model = keras.Model([dense, *inputs], score)
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        return model.fit(
            [numbers, *given], clicks, epochs=STEPS, batch_size=32, shuffle=False, verbose=0
        ).history["loss"]

    adagrad = keras.optimizers.Adagrad
    tables = [Embedding(8, combiner="sum", seed=i, name=f"dlrm-{i}") for i in range(3)]
    found = fit(
        tables,
        de.DynamicEmbeddingOptimizer(adagrad(0.05)),
        [each - 2**60 for each in ids],
        lambda rows: rows,
    )
    plain = []
    for layer, count in zip(tables, sizes, strict=True):
        layer.table.clear()
        start = layer.table.lookup(tf.range(count, dtype=tf.int64) - 2**60, insert=False)
        plain.append(product(start))
    return found, fit(plain, adagrad(0.05), ids, lambda rows: keras.ops.sum(rows, 1))


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


def attention() -> Losses:
    """TorchRec's collections: a history weighed by what it has to do with the item, and bags."""
    import torch
    from torch import nn

    from evener.embedding import RowWiseAdagrad
    from evener.embedding.torch import (
        DynamicOptimizer,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        Jagged,
    )
    from tests.embedding import formulas

    draw = np.random.default_rng(9)
    names, counts = ["history", "item", "user", "tags", "liked"], [30, 30, 20, 12, 12]
    batches = []
    for _ in range(STEPS):
        lengths = np.array(
            [draw.integers(0, 6, 24), *[np.ones(24, int)] * 2, *draw.integers(0, 4, (2, 24))]
        )
        values = np.concatenate(
            [draw.integers(0, n, k.sum()) for n, k in zip(counts, lengths, strict=True)]
        )
        batches.append((torch.tensor(values), torch.tensor(lengths)))
    truth = torch.tensor(draw.integers(0, 2, (24,)), dtype=torch.float32)

    class Model(nn.Module):
        def __init__(self, look: Callable[[Any, Any], tuple[Any, Any]]) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.look = look
            self.weigh = nn.Sequential(nn.Linear(16, 8), nn.PReLU(), nn.Linear(8, 1))
            self.top = nn.Sequential(nn.Linear(16 + 20, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, values: Any, lengths: Any) -> Any:
            (history, item), pooled = self.look(values, lengths)
            of = torch.repeat_interleave(torch.arange(24), lengths[0])
            weight = self.weigh(torch.cat([history, item[of]], 1))
            seen = torch.zeros(24, 8).index_add(0, of, weight * history)
            return self.top(torch.cat([seen, item, pooled], 1))[:, 0]

    def losses(model: Any, optimizer: Any, schedule: Any) -> list[float]:
        found = []
        for values, lengths in batches:
            loss = nn.functional.binary_cross_entropy_with_logits(model(values, lengths), truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            found.append(float(loss.detach()))
        return found

    rate = RowWiseAdagrad(lr=0.05, eps=1e-8)
    rows = EmbeddingCollection(
        [EmbeddingConfig(30, 8, "items", feature_names=names[:2])], optimizer=rate, prefix="wild-"
    )
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(20, 12, "users", feature_names=["user"]),
            EmbeddingBagConfig(12, 4, "tags", feature_names=["tags", "liked"], pooling="MEAN"),
        ],
        optimizer=rate,
        prefix="wild-",
    )

    def ours(values: Any, lengths: Any) -> tuple[Any, Any]:
        given = Jagged(names, values, lengths=lengths.flatten())
        found = rows(given)
        return [found[name].values() for name in names[:2]], bags(given).values()

    modules = [rows.embeddings["items"], bags.embedding_bags["users"], bags.embedding_bags["tags"]]
    starts = [
        module.store.lookup_infer(torch.arange(n))
        for module, n in zip(modules, (30, 20, 12), strict=True)
    ]
    items, users, tags = (nn.Parameter(start.clone()) for start in starts)

    def plain(values: Any, lengths: Any) -> tuple[Any, Any]:
        parts = values.split(lengths.sum(1).tolist())
        ends = [torch.cat([torch.zeros(1, dtype=torch.int64), k.cumsum(0)[:-1]]) for k in lengths]
        pooled = [nn.functional.embedding_bag(parts[2], users, ends[2], mode="sum")]
        pooled += [
            nn.functional.embedding_bag(parts[i], tags, ends[i], mode="mean") for i in (3, 4)
        ]
        return [nn.functional.embedding(part, items) for part in parts[:2]], torch.cat(pooled, 1)

    model = Model(ours)
    model.tables = nn.ModuleList([rows, bags])
    dense = torch.optim.Adam([*model.weigh.parameters(), *model.top.parameters()], 0.01)
    optimizer = DynamicOptimizer(model, dense)
    found = losses(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))

    class Both:
        def __init__(self, *each: Any) -> None:
            self.each = each

        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: [getattr(each, name)() for each in self.each] and None

    model = Model(plain)
    steppers = [
        torch.optim.Adam(model.parameters(), 0.01),
        formulas.RowWiseAdagrad(
            [items, users, tags], 0.05, eps=1e-8, weight_decay=0.0, decoupled=False
        ),
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in steppers]
    return found, losses(model, Both(*steppers), Both(*schedules))


PROGRAMS = {
    "DIN, TorchRec's collections": attention,
    "retrieval, shared items": retrieval,
    "DLRM in Keras, multi-hot": dlrm_keras,
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
            f"{name:27} {right[0]:.4f} to {right[-1]:.4f}, largest difference {far:.1e}: "
            f"{'equal' if same else 'DIFFERS'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
