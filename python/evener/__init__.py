"""Evener: fast distributed training on ordinary networks and ordinary memory.

Importing this package starts nothing and imports no torch: each pillar is imported by its own name
(`evener.ddp`, `evener.lab`, ...).
"""

from importlib.metadata import PackageNotFoundError, version

from evener.errors import EvenerError

try:
    __version__ = version("evener")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["EvenerError", "__version__"]
