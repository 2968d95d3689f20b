"""Loads libevener-tensorflow.so: the ops, their gradient, and the stores behind them.

`tf.load_op_library` makes functions of the ops that appear while it loads the file, so it must come
first; ctypes then finds the same library and binds it to the stores of `evener._native`, which
`evener.embedding` and `evener.embedding.torch` use too.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import evener
from evener import _native
from evener.embedding.store import RESTORED
from evener.errors import EvenerError


class OpsMissingError(EvenerError):
    """The library of ops is not there, or TensorFlow did not take it."""


def path() -> Path:
    """Where the library of ops is: `tf.load_op_library(str(path()))` is all that a server needs."""
    return Path(evener.__file__).parent / "lib" / "libevener-tensorflow.so"


@functools.cache
def _handle() -> ctypes.CDLL:
    library = ctypes.CDLL(str(path()))
    library.evener_tensorflow_problem.restype = ctypes.c_size_t
    library.evener_tensorflow_problem.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.evener_tensorflow_bind.restype = ctypes.c_int
    library.evener_tensorflow_bind.argtypes = [ctypes.c_void_p]
    library.evener_tensorflow_forget.restype = None
    library.evener_tensorflow_forget.argtypes = [ctypes.c_char_p]
    return library


@functools.cache
def ops() -> Any:
    """The module of ops, `evener_embedding_lookup` and so on. Loads them at the first call.

    Raises OpsMissingError.
    """
    import tensorflow as tf

    file = path()
    if not file.exists():
        raise OpsMissingError(f"{file} is not there", "make setup, or install a wheel of Evener")
    try:
        module = tf.load_op_library(str(file))
    except (RuntimeError, tf.errors.OpError) as error:
        raise OpsMissingError(
            f"TensorFlow {tf.__version__} did not load {file}: {error}",
            "use TensorFlow 2.16 or newer",
        ) from None
    library = _handle()
    room = ctypes.create_string_buffer(512)
    if length := library.evener_tensorflow_problem(room, len(room)):
        raise OpsMissingError(
            f"{file}: {room.raw[:length].decode(errors='replace')}",
            "use TensorFlow 2.16 or newer",
        )
    if not hasattr(module, "evener_embedding_lookup"):
        raise OpsMissingError(
            f"{file} was in this process before tf.load_op_library, so its ops have no functions",
            "import evener.embedding.tensorflow before anything else loads that file",
        )
    if library.evener_tensorflow_bind(_native.embedding_table()) != 0:
        raise OpsMissingError(
            f"{file} and evener._native are of different builds", "make setup, or install again"
        )
    RESTORED.append(forget)
    from evener.embedding.tensorflow import _gradients

    _gradients.register(module)
    return module


def forget(name: str | None = None) -> None:
    """The store `name` (or every one) was closed or made anew: kernels look it up again."""
    _handle().evener_tensorflow_forget(None if name is None else name.encode())
