"""`libnccl-net.so`, the name that NCCL loads when no variable names a plug-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from evener.net.plugin import PluginError, plugin_path

_MARK = b"NET/Evener : "


def target(prefix: Path) -> Path:
    """Where `libnccl-net.so` lies under `prefix`."""
    return prefix / "lib" / "libnccl-net.so"


def is_ours(path: Path) -> bool:
    """Whether the library at `path` is a copy of Evener's, of any version."""
    return path.is_file() and _MARK in path.read_bytes()


def enable(prefix: Path) -> Path:
    """Copy the plug-in to `prefix`/lib/libnccl-net.so; the path.

    Raises PluginError where another plug-in has that name, or the file cannot be written.
    """
    source, to = plugin_path(), target(prefix)
    if to.exists() and not is_ours(to):
        raise PluginError(
            f"{to} is another NCCL plug-in",
            "move it away, or choose another --prefix",
        )
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        part = to.with_name(f".{to.name}.{os.getpid()}")
        shutil.copyfile(source, part)
        part.chmod(0o755)
        part.replace(to)
    except OSError as error:
        raise PluginError(
            f"{to} cannot be written: {error.strerror}",
            "run as root, or choose a --prefix of your own",
        ) from None
    _refresh()
    return to


def disable(prefix: Path) -> Path | None:
    """Remove what `enable` put there; the path, or None where there was nothing.

    Raises PluginError where another plug-in has that name, or the file cannot be removed.
    """
    to = target(prefix)
    if not to.exists():
        return None
    if not is_ours(to):
        raise PluginError(f"{to} is not Evener's", "it was not installed by `evener net enable`")
    try:
        to.unlink()
    except OSError as error:
        raise PluginError(
            f"{to} cannot be removed: {error.strerror}", "run as root, or remove it by hand"
        ) from None
    _refresh()
    return to


def found_by_loader(path: Path) -> bool:
    """Whether a program that asks for `libnccl-net.so` would get this one."""
    folders = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    for folder in folders:
        if (folder / path.name).exists():
            return (folder / path.name).samefile(path)
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if ldconfig is None:
        return False
    listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    return f" => {path}\n" in listing


def _refresh() -> None:
    """Let the loader's cache know. Without the right to, the cache stays as it was."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if ldconfig is not None and os.geteuid() == 0:
        subprocess.run([ldconfig], capture_output=True, check=False)
