"""pyroute2's IPRoute without the rest of pyroute2, which triples the time a lab needs to start.

`import pyroute2` loads databases, DHCP, nftables and more. Where the package stands in sys.modules
without having run its `__init__`, its submodules load only what they need. This is done in the
keeper's process alone, which uses nothing else of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any


def _load() -> tuple[Any, Any]:
    lean = None
    spec = importlib.util.find_spec("pyroute2")
    if "pyroute2" not in sys.modules and spec is not None:
        lean = types.ModuleType("pyroute2")
        lean.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["pyroute2"] = lean
    try:
        return _pick()
    except ImportError:
        if lean is None:
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyroute2"]:
        del sys.modules[name]
    return _pick()


def _pick() -> tuple[Any, Any]:
    routes = importlib.import_module("pyroute2.iproute.linux")
    errors = importlib.import_module("pyroute2.netlink.exceptions")
    return routes.IPRoute, errors.NetlinkError


IPRoute, NetlinkError = _load()
