"""Readers of what a cluster prints: one concept a module, each a pure function of bytes.

`inputs.expand` and `stream.read` are the doors that the rest of `evener.analyze` uses.
"""

from evener.analyze.parse.inputs import Input, UnreadableError, expand
from evener.analyze.parse.stream import read

__all__ = ["Input", "UnreadableError", "expand", "read"]
