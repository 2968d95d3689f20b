"""Readers of what a cluster prints: one concept a module, each a pure function of bytes.

`stream.read` is the only door that the rest of `evener.tools.analyze` uses.
"""

from evener.tools.analyze.parse.stream import UnreadableError, read

__all__ = ["UnreadableError", "read"]
