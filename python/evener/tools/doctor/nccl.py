"""NCCL and the network plug-in: found, loadable, of which interface versions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from evener.net.plugin import adopt, as_given
from evener.tools.doctor.line import Line

NAME = "libnccl-net-evener.so"
VERSIONS = range(5, 13)
_SOCKETS = "NCCL takes its sockets in its place, which use one path"


def library(_: Path) -> Iterator[Line]:
    """The NCCL that torch loads."""
    try:
        import torch
    except ModuleNotFoundError:
        yield Line("nccl", "NCCL", "info", "comes with torch, which is not installed here")
        return
    if not torch.version.cuda:
        yield Line("nccl", "NCCL", "info", "not in this torch (built for the CPU)")
        return
    yield Line("nccl", "NCCL", "good", _version())


def choice(_: Path) -> Iterator[Line]:
    """Whether a job on this machine gets Evener's plug-in, and why."""
    env = as_given()
    said = adopt(env)
    if env.get("NCCL_NET_PLUGIN", "").endswith(NAME):
        yield Line("nccl", "network of jobs here", "good", said)
    else:
        yield Line("nccl", "network of jobs here", "info", said)


def plugin(_: Path) -> Iterator[Line]:
    """Evener's plug-in for NCCL, or another one that was asked for."""
    asked = os.environ.get("NCCL_NET_PLUGIN", "")
    import evener.errors

    package = Path(evener.errors.__file__).parent
    found = sorted(package.rglob("libnccl-net*.so"))
    if not found:
        yield Line(
            "nccl",
            "network plug-in",
            "bad",
            f"{NAME} is not in {package}",
            "install evener from a wheel: it carries the plug-in",
            "1.6 times NCCL's sockets over one path of 25 Gb/s, 2.2 times over four hidden ones "
            "(docs/benchmarks/network.md)",
        )
    for path in found:
        yield examine_plugin(path)
    for name in asked.split(","):
        if "/" in name and not Path(name).exists():
            yield Line(
                "nccl",
                "NCCL_NET_PLUGIN",
                "bad",
                f"{name} is not there: NCCL uses its sockets",
                "unset it, or run `evener net env`",
                "the network that was asked for",
            )
    if asked and asked not in ("evener", "none") and NAME not in asked:
        yield Line("nccl", "NCCL_NET_PLUGIN", "info", f"{asked}: not Evener's plug-in")


def examine_plugin(path: Path) -> Line:
    """Load a plug-in and list the interface versions that it exports."""
    name = f"plug-in {path.name}"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return Line("nccl", name, "bad", f"cannot be loaded: {error}", f"ldd {path}", _SOCKETS)
    versions = [v for v in VERSIONS if hasattr(loaded, f"ncclNetPlugin_v{v}")]
    if not versions:
        return Line(
            "nccl", name, "bad", "exports no ncclNetPlugin_v5 to v12", "install it anew", _SOCKETS
        )
    shown = "interface " + ", ".join(f"v{v}" for v in versions)
    taken = [v for v in versions if v in accepted()]
    if not accepted():
        return Line("nccl", name, "good", shown)
    if not taken:
        return Line(
            "nccl",
            name,
            "bad",
            f"{shown}; NCCL {_version()} takes v{min(accepted())} to v{max(accepted())}: it would "
            "use sockets",
            "install a plug-in and an NCCL that fit",
            _SOCKETS,
        )
    return Line("nccl", name, "good", f"{shown}; NCCL {_version()} takes v{max(taken)}")


# The first release of NCCL that knows a version, and the oldest version that it still takes
# (plugin/net.cc of each release).
_TAKES = (
    ((2, 19), range(5, 8)),
    ((2, 20), range(5, 9)),
    ((2, 24), range(5, 10)),
    ((2, 26), range(6, 11)),
    ((2, 28), range(6, 12)),
    ((2, 30), range(6, 13)),
)


def accepted(version: tuple[int, ...] | None = None) -> range:
    """The interface versions that an NCCL takes (default: torch's); empty where not known."""
    if version is None:
        try:
            version = loaded()
        except ModuleNotFoundError:
            return range(0)
    known = [takes for first, takes in _TAKES if version[:2] >= first]
    return known[-1] if known else range(0)


def loaded(maps: Path = Path("/proc/self/maps")) -> tuple[int, ...]:
    """The version of the NCCL that torch has loaded, as the library says it: with a newer wheel, or
    with LD_PRELOAD, it is another than torch was built with, which `torch.cuda.nccl.version()`
    says. Empty where torch is built for the CPU. Raises ModuleNotFoundError without torch."""
    import torch

    if not torch.version.cuda:
        return ()
    lines = maps.read_text().splitlines()
    number = ctypes.c_int()
    for path in sorted({line[line.index("/") :] for line in lines if "/libnccl.so" in line}):
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    return tuple(torch.cuda.nccl.version())


def _version() -> str:
    return ".".join(map(str, loaded()))


CHECKS = (library, plugin, choice)
