"""The gradients of lookups: `tf.IndexedSlices` of (keys, gradients) for the anchor.

TensorFlow makes whatever leaves a branch or a loop (`tf.cond`, `tf.while_loop`, `tf.map_fn`, an
RNN) dense, and keys reach over all of int64. So a lookup in there depends on an op outside,
`Enter`, and that on the anchor. The lookup's gradient puts keys and gradients aside, and a count
leaves the branch or loop; the gradient of `Enter` makes slices of what was put aside. So clipping
and loss scales see slices as ever.
"""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph


def register(module: Any) -> None:
    """Register the gradients of the ops in `module`."""

    def attributes(op: Any) -> dict[str, Any]:
        return {name: op.get_attr(name).decode() for name in ("store", "options")}

    def counted(op: Any, keys: Any) -> Any:
        # A lookup that adds no rows counts nothing, so an admission filter would let no key in that
        # a program trains by `model(ids)`. Its gradient shows that it trains.
        of = attributes(op)
        if op.get_attr("insert") or not _filters(of["options"]):
            return keys
        anchor = tf.stop_gradient(op.inputs[1])
        with tf.device("CPU:0"):
            seen = module.evener_embedding_lookup(keys, anchor, insert=True, **of)
        with tf.control_dependencies([seen]):
            return tf.identity(keys)

    def slices(op: Any, gradient: Any) -> Any:
        rows = tf.convert_to_tensor(gradient)
        dim = op.outputs[0].shape[-1]
        if dim is None:
            dim = tf.shape(rows)[-1]
        keys = counted(op, tf.reshape(op.inputs[0], [-1]))
        return tf.IndexedSlices(tf.reshape(rows, [-1, dim]), keys)

    @tf.RegisterGradient("EvenerEmbeddingLookup")
    def lookup(op: Any, gradient: Any) -> tuple[None, Any]:
        return None, slices(op, gradient)

    @tf.RegisterGradient("EvenerEmbeddingLookupInside")
    def lookup_inside(op: Any, gradient: Any) -> tuple[Any, ...]:
        found = slices(op, gradient)
        with tf.device("CPU:0"):
            put = module.evener_embedding_put_aside(
                op.inputs[1], op.inputs[2], found.indices, found.values, **attributes(op)
            )
        return None, put, None

    @tf.RegisterGradient("EvenerEmbeddingEnter")
    def enter(op: Any, put: Any, token: Any) -> Any:
        del token
        with tf.device("CPU:0"):
            keys, gradients = module.evener_embedding_collect(put, op.outputs[1], **attributes(op))
        dim = op.inputs[0].shape[-1]
        return tf.IndexedSlices(tf.reshape(gradients, [-1, dim]), tf.reshape(keys, [-1]))


def outside() -> Any:
    """Return the graph around the branches and loops that are being traced, or None."""
    graph = found = tf.compat.v1.get_default_graph()
    while isinstance(found, ControlFlowFuncGraph):
        found = found.outer_graph
    return None if found is graph else found


def lookup_inside(
    module: Any,
    graph: Any,
    keys: Any,
    anchor: Any,
    *,
    insert: bool,
    name: str | None = None,
    **attributes: Any,
) -> Any:
    """Look `keys` up inside of branches and loops, with `graph` around them."""
    # Once for each lookup: a tape that was opened since the last one has not seen that one's.
    with graph.as_default(), tf.device("CPU:0"):
        inside, token = module.evener_embedding_enter(anchor, **attributes)
    inside.set_shape(anchor.shape)
    token.set_shape([])
    return module.evener_embedding_lookup_inside(
        keys, inside, token, insert=insert, name=name, **attributes
    )


def _filters(options: str) -> bool:
    return bool(json.loads(options).get("admission", {}).get("kind", "none") != "none")
