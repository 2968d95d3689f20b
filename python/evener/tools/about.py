"""What `evener --version` says: this build, its plug-in, and the Python and torch that it runs on.

It is what a bug report needs. Nothing is loaded for it but the native module: the plug-in's
interface versions are read from its file, torch's version from its metadata.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from evener import __version__, _native
from evener.net import PluginError, plugin_path


def describe() -> str:
    """A few lines: version and build, plug-in, Python and torch."""
    return "\n".join([f"evener {__version__}", f"build: {_build()}", _plugin(), _python()])


def _build() -> str:
    commit, profile = _native.build()
    made = f"commit {commit}" if commit else "a checkout"
    return f"{made}, {profile}, {platform.machine()}, abi3 (Python 3.10 and newer)"


def _plugin() -> str:
    try:
        path = plugin_path()
    except PluginError as error:
        return f"plug-in: none: {error.problem} ({error.fix})"
    found = sorted({int(n) for n in re.findall(rb"ncclNetPlugin_v(\d+)", path.read_bytes())})
    spoken = f"versions {found[0]} to {found[-1]}" if found else "no version"
    return f"plug-in: NCCL net interface, {spoken}, {path}"


def _python() -> str:
    parts = [f"python {platform.python_version()}"]
    for name, title in (
        ("torch", "torch"),
        ("nvidia-nccl-cu13", "NCCL"),
        ("nvidia-nccl-cu12", "NCCL"),
    ):
        try:
            parts.append(f"{title} {version(name)}")
        except PackageNotFoundError:
            if name == "torch":
                parts.append("torch is not installed")
    return "runs on: " + ", ".join(parts)
