"""Evener: fast distributed training on ordinary networks and ordinary memory.

Importing this package starts nothing and imports no torch: you import each pillar by its own name
(`evener.ddp`, `evener.zero`, ...). It does one thing, which must be done before NCCL is loaded: it
sets NCCL_NET_PLUGIN to Evener's plug-in where that is faster (EVENER_NET), unless you chose a
network.
"""

from importlib.metadata import PackageNotFoundError, version

from evener.errors import EvenerError

try:
    __version__ = version("evener")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

from evener.net.plugin import at_import

at_import()

__all__ = ["EvenerError", "__version__"]
