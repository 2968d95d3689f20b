"""Programs of TensorFlow 1: graphs, sessions, scopes, partitioned variables, Savers."""

import numpy as np
import tensorflow as tf

import evener.embedding.tensorflow  # noqa: F401  (the one import)

v1 = tf.compat.v1


def program(name, optimizer):
    """A click model of TensorFlow 1.15: a table and a partitioned dense variable."""
    ids = v1.placeholder(tf.int64, [None, 3])
    label = v1.placeholder(tf.float32, [None])
    with v1.variable_scope("model"):
        table = tf.dynamic_embedding.get_variable(
            name, v1.random_uniform_initializer(-0.1, 0.1, seed=4), 8,
            partitioner=v1.fixed_size_partitioner(2),
        )  # fmt: skip
        tower = v1.get_variable(
            "tower", [8, 1], partitioner=v1.fixed_size_partitioner(4),
            initializer=v1.ones_initializer(),
        )  # fmt: skip
    rows = tf.reduce_sum(tf.dynamic_embedding.embedding_lookup(table, ids), 1)
    logits = tf.matmul(rows, tf.convert_to_tensor(tower))[:, 0]
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logits))
    step = v1.train.get_or_create_global_step()
    train = tf.dynamic_embedding.DynamicEmbeddingOptimizer(optimizer).minimize(loss, step)
    return ids, label, table, loss, train, table.size()


def test_monitored_session_trains_saves_and_goes_on(name, tmp_path):
    draw = np.random.default_rng(1)
    x = draw.integers(-(2**60), 2**60, 40)[draw.integers(0, 40, (64, 3))]
    y = (x[:, 0] % 2).astype(np.float32)
    seen = []
    for _ in range(2):
        with tf.Graph().as_default():
            ids, label, table, loss, train, size = program(name, v1.train.AdamOptimizer(0.05))
            assert table.name == f"model/{name}"
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), save_checkpoint_steps=20, log_step_count_steps=None
            ) as session:
                feed = {ids: x, label: y}
                seen.append(session.run(loss, feed))
                for _ in range(40):
                    session.run(train, feed)
                seen += session.run([loss, size, v1.train.get_global_step()], feed)
        table.close()
    first, trained, rows, step, resumed, ended, _, last = seen
    assert trained < 0.5 * first and rows == len(np.unique(x)) and step == 40
    # The second session found what the first had saved, slots and steps too.
    assert abs(resumed - trained) < 1e-5 and ended < resumed and last == 80


def test_each_optimizer_of_tensorflow_1(name):
    train = v1.train
    for number, optimizer in enumerate(
        [
            train.GradientDescentOptimizer(0.5),
            train.AdagradOptimizer(0.5),
            train.FtrlOptimizer(0.5),
            train.AdamOptimizer(tf.constant(0.05).numpy()),
        ]
    ):
        with tf.Graph().as_default(), v1.Session() as session:
            ids, label, _, loss, step, _ = program(f"{name}_{number}", optimizer)
            session.run(v1.global_variables_initializer())
            feed = {ids: [[1, 2, 3], [3, 4, -5]], label: [1.0, 0.0]}
            before = session.run(loss, feed)
            for _ in range(20):
                session.run(step, feed)
            assert session.run(loss, feed) < before
