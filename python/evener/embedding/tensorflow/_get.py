"""`get_variable`, with TFRA's and DeepRec's arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from evener.embedding.tensorflow._options import EmbeddingVariableOption
from evener.embedding.tensorflow._variable import DynamicVariable, graph_of_v1, named
from evener.errors import UsageError

_log = logging.getLogger(__name__)

_COLLECTION = "evener_dynamic_variables"
# How TFRA's tables work inside.
_INNER = {"kv_creator", "bp_v2"}
_EVICT = "give ev_option=EmbeddingVariableOption(evict_option=...)"
# What a program may ask of TFRA or DeepRec, and how it asks for it here.
_OTHERWISE = {
    "restrict_policy": _EVICT,
    "steps_to_live": _EVICT,
    "collections": "add the variable to the graph's collections yourself",
}


def get_variable(
    name: str,
    initializer: Any = None,
    dim: int | None = None,
    devices: Sequence[str] | str | None = None,
    *,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    embedding_dim: int | None = None,
    partitioner: Any = None,
    shared_name: str | None = None,
    trainable: bool = True,
    checkpoint: bool = True,
    init_size: int = 0,
    ev_option: EmbeddingVariableOption | None = None,
    optimizer: Mapping[str, Any] | None = None,
    seed: int | None = None,
    shard: bool = False,
    **unused: Any,
) -> DynamicVariable:
    """The dynamic embedding `name`, made at the first call; the same one at the next.

    `dim` (DeepRec: `embedding_dim`): values per row. `initializer`: a number, a name, or an
    initializer object (see `EmbeddingVariableOption` for more); rows start with values that depend
    on `seed`, key and column alone. `devices`: one store per device, for clusters of parameter
    servers. `partitioner`: of TensorFlow 1; as many stores as it makes parts. `init_size`: rows
    to make room for. `optimizer`: the store's own (`{"kind": "lazy_adam"}`), instead of what
    `DynamicEmbeddingOptimizer` brings. Inside a `tf.compat.v1.variable_scope` the name is the
    scope's, then `name`. `checkpoint`: whether a Saver of TensorFlow 1 holds it. `shard`: rows are
    spread over the ranks of a Horovod job, and each lookup is collective. TFRA's
    `kv_creator` and `bp_v2`, which say how its tables work inside, are taken and have no effect.

    Raises UsageError where the name exists with other options, or an argument cannot be.
    """
    if extra := sorted(set(unused) - _INNER - set(_OTHERWISE)):
        raise UsageError(f"get_variable has no argument {extra[0]!r}", "see its documentation")
    for argument, fix in _OTHERWISE.items():
        if unused.get(argument):
            call = f"get_variable({name!r}, {argument}={unused[argument]!r})"
            raise UsageError(f"{call} has no effect", fix)
    size = dim if dim is not None else embedding_dim
    if size is None or int(size) < 1:
        raise UsageError(f"dim {size} of embedding {name!r} cannot be", "give dim, 1 or more")
    places = [devices] if isinstance(devices, str) else list(devices or [])
    if any("GPU" in place.upper() for place in places):
        _log.warning(
            "embedding %r: rows are in the memory of the host; devices %s stay unused", name, places
        )
        places = []
    parts = max(1, len(places))
    if partitioner is not None and parts == 1:
        parts = _partitions(partitioner, int(size), max(1, init_size))
    full = shared_name or _scoped(name)
    if (found := _existing(full)) is not None:
        if (found.ranks is not None) != shard:
            raise UsageError(
                f"embedding {full!r} exists with shard={not shard}",
                "give the new one another name, or close() the old one",
            )
        if found.dim != int(size) or found.key_dtype != tf.as_dtype(key_dtype):
            raise UsageError(
                f"embedding {full!r} exists with dim {found.dim} and keys {found.key_dtype.name}, "
                f"not dim {size} and keys {tf.as_dtype(key_dtype).name}",
                "give the new one another name, or close() the old one",
            )
        _same_options(found, ev_option, optimizer)
        return found
    made = DynamicVariable(
        full,
        dim=int(size),
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        initializer=initializer,
        seed=seed,
        trainable=trainable,
        devices=places if parts == len(places) else (),
        parts=parts,
        init_size=init_size,
        ev_option=ev_option,
        optimizer=optimizer,
        checkpoint=checkpoint,
        shard=shard,
    )
    _remember(full, made)
    return made


def _same_options(
    found: DynamicVariable,
    ev_option: EmbeddingVariableOption | None,
    optimizer: Mapping[str, Any] | None,
) -> None:
    """Raises UsageError where the variable that is there has other options than are given."""
    given: dict[str, Any] = {} if ev_option is None else ev_option.options()
    there = dict(found.parts[0].options)
    if optimizer is not None:  # its numbers may have changed since
        given["optimizer"] = optimizer["kind"]
        there["optimizer"] = there.get("optimizer", {}).get("kind")
    for option, value in given.items():
        if there.get(option) != value:
            raise UsageError(
                f"embedding {found.name!r} exists with {option}={there.get(option)!r}, "
                f"not {value!r}",
                "give the new one another name, or close() the old one",
            )


def _scoped(name: str) -> str:
    if tf.executing_eagerly():
        return name
    scope = tf.compat.v1.get_variable_scope().name
    return f"{scope}/{name}" if scope else name


def _existing(name: str) -> DynamicVariable | None:
    graph = graph_of_v1()
    if graph is None:
        return named.get(name)
    found = (v for v in graph.get_collection(_COLLECTION) if v.name == name)
    return next(found, None)


def _remember(name: str, variable: DynamicVariable) -> None:
    graph = graph_of_v1()
    if graph is None:
        named[name] = variable
    else:
        graph.add_to_collection(_COLLECTION, variable)


def _partitions(partitioner: Any, dim: int, rows: int) -> int:
    """How many parts a partitioner of TensorFlow 1 makes of the rows."""
    counts = partitioner(shape=tf.TensorShape([rows, dim]), dtype=tf.float32)
    if len(counts) != 2 or counts[1] != 1:
        raise UsageError(
            f"the partitioner cuts rows: {list(counts)}", "use one that cuts along axis 0"
        )
    return int(counts[0])
