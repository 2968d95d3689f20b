"""`horovod.tensorflow` on uneven nodes in a lab: what crosses a card, in one level and in two."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.comm.test_uneven_lab import lab_of, launched

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
    ),
]
STEPS, BYTES = 4, 4 * 1_000_000

# Gradients of a tape: those are what top-k may send in part.
COUNTS = f"""
import json, os, sys
import numpy as np
import tensorflow as tf
import evener.horovod.tensorflow as hvd
from tests import forked

def sent():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])

def all_sent():
    # The second barrier: a rank that goes on while another still has to read would be counted.
    hvd.barrier()
    count = sent()
    hvd.barrier()
    return count

forked.ranks(*json.loads(sys.argv[1]))
found = {{}}
for two, topk in ((0, 0), (1, 0), (0, 1), (1, 1)):
    os.environ.update(LIGHT_2D_ALLREDUCE=str(two), LIGHT_TOPK_ALLREDUCE=str(topk))
    hvd.init()
    v = tf.Variable(tf.zeros((1000, 1000)))
    x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(1000, 1000)), tf.float32)
    steps = []
    for step in range({STEPS} + 2):
        before = all_sent()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * x)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradient = tape.gradient(loss, [v])[0].numpy()
        steps.append(all_sent() - before)
    # The least: on a busy machine TCP sends again what was only late.
    found[f"{{('flat', '2d')[two]}} {{('exact', 'topk')[topk]}}"] = min(steps[2:])
    every = hvd.allgather_object(gradient.tobytes())
    assert all(each == every[0] for each in every), "ranks differ"
    if not topk:
        want = sum(np.random.default_rng(rank).normal(size=(1000, 1000)).astype("f4")
                   for rank in range(hvd.size()))
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-5)
    hvd.shutdown()
# The ranks of a node share a pipe, and `print` would write each word by itself.
sys.stdout.write(f"SENT {{json.dumps(found)}}\\n")
sys.stdout.flush()
"""


@pytest.mark.parametrize("shape", [[2, 1], [3, 1]], ids=str)
def test_the_bytes_that_cross_a_card(shape: list[int]) -> None:
    env = {"EVENER_GUARD_STEPS": "0", "LIGHT_TOPK_RATIO": "0.01", "EVENER_TOPK_WARMUP": "0"}
    ranks = sum(shape)
    with lab_of("2x1") as lab:
        found, said = launched(lab, ["-c", COUNTS, json.dumps(shape)], "SENT", **env)
    assert len(found) == ranks
    assert "inner groups of [" in said
    # A card has the bytes of all ranks of its node: any of them has counted the same.
    sent = json.loads(found[0])
    print(shape, sent)
    assert 1 <= sent["2d exact"] / BYTES < 1.03, sent
    assert 1 <= sent["flat exact"] / (2 * (ranks - 1) / ranks * BYTES) < 1.03, sent
    # Each pair of nodes exchanges one part, where a ring passes on that of every rank.
    assert sent["2d topk"] < 1.1 * 0.01 * 2 * BYTES, sent
    assert sent["flat topk"] > 1.6 * sent["2d topk"], sent
