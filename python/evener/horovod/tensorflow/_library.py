"""The ops of libevener-tensorflow.so, and the questions that Python puts to its engine."""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

from tensorflow.python.framework import auto_control_deps

from evener.base.log import logger
from evener.embedding.tensorflow import _library as library
from evener.horovod.common.exceptions import HorovodInternalError, NotInitializedError

_ANY_ORDER = frozenset(
    f"Evener{name}"
    for name in (
        "Allreduce",
        "GroupedAllreduce",
        "Allgather",
        "GroupedAllgather",
        "Broadcast",
        "Alltoall",
        "Reducescatter",
        "GroupedReducescatter",
    )
)


@functools.cache
def ops() -> Any:
    """The module of ops, `evener_allreduce` and so on. Raises OpsMissingError."""
    module = library.ops()
    # tf.function runs ops with a state one after the other, in the order of the program. So none of
    # ours would overlap, and ranks with another order would wait for each other. They are to run in
    # any order; TensorFlow has a list of such ops, and no public way to add to it.
    name = "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS"
    known = getattr(auto_control_deps, name, None)
    if known is None:
        logger.warning("this TensorFlow runs the operations of a tf.function one after the other")
    else:
        setattr(auto_control_deps, name, frozenset(known) | _ANY_ORDER)
    return module


@functools.cache
def _handle() -> ctypes.CDLL:
    ops()  # TensorFlow must load the file first
    handle = ctypes.CDLL(str(library.path()))
    handle.evener_horovod_call.restype = ctypes.c_void_p
    handle.evener_horovod_call.argtypes = [ctypes.c_char_p]
    handle.evener_horovod_free.restype = None
    handle.evener_horovod_free.argtypes = [ctypes.c_void_p]
    return handle


def call(what: str, **arguments: Any) -> dict[str, Any]:
    """Ask the engine (crates/tensorflow/src/collectives/control.rs says what there is).

    Blocks without Python's lock. Raises NotInitializedError, ValueError for what cannot be,
    HorovodInternalError for what the ranks do not agree on or where one is gone.
    """
    handle = _handle()
    question = json.dumps({"what": what, **arguments}).encode()
    pointer = handle.evener_horovod_call(question)
    try:
        answer = json.loads(ctypes.string_at(pointer).decode())
    finally:
        handle.evener_horovod_free(pointer)
    error = answer.get("error")
    if error is None:
        return dict(answer)
    text = str(answer["text"])
    if error == "uninitialized":
        raise NotInitializedError
    if error in ("refused", "call"):
        raise ValueError(text)
    raise HorovodInternalError(
        text,
        "look for the first error on the other ranks; call hvd.shutdown() and hvd.init() to begin "
        "anew",
    )
