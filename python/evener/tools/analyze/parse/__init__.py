"""Readers of what a cluster prints: one concept a module, each a pure function of bytes.

`inputs.expand` and `stream.read` are the doors that the rest of `evener.tools.analyze` uses.
"""

from evener.tools.analyze.parse.inputs import Input, UnreadableError, expand
from evener.tools.analyze.parse.stream import read

__all__ = ["Input", "UnreadableError", "expand", "read"]
