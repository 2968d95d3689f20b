"""Compilation that is used again: shapes in buckets, compiled once each, kept for the next process.

    from evener.compile.torch import bucketed        # torch.compile
    from evener.compile.tensorflow import bucketed   # tf.function(jit_compile=True)

`buckets` chooses the sizes, `policy` says when to compile, `driver` does what both frameworks
share, `store` keeps the records that `evener compile report` shows. Importing this package imports
no framework.
"""

from evener.compile.buckets import Plan, choose
from evener.compile.policy import Options

__all__ = ["Options", "Plan", "choose"]
