"""`Compression`: in what form a tensor travels."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """A form: how a tensor becomes it, and comes back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """(what travels, what `decompress` needs to know)."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its own type again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        del ctx
        return tensor


class _Narrow(Compressor):
    dtype = tf.float16

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Narrow):
    """float32 and float64 travel as float16."""


class BF16Compressor(_Narrow):
    """float32 and float64 travel as bfloat16."""

    dtype = tf.bfloat16


class Compression:
    """The forms."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
