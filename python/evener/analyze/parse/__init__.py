"""Readers of what a cluster prints: one concept a module, each a pure function of bytes.

`stream.read` is the only door that the rest of `evener.analyze` uses.
"""

from evener.analyze.parse.stream import UnreadableError, read

__all__ = ["UnreadableError", "read"]
