"""Refuse a wheel that lacks a part or needs a newer glibc than it says.

maturin checks the module it builds, but not the shared objects that ride along as package data,
and it builds silently when one is missing.
"""

import io
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

NEWEST_GLIBC = (2, 28)
REQUIRED = [
    "evener/_native.abi3.so",
    "evener/cli.py",
    "evener/door/site/sitecustomize.py",
    "evener/lib/libevener-tensorflow.so",
    "evener/lib/libnccl-net-evener.so",
    "evener/py.typed",
    "evener/tools/quickstart/projects/ddp/evener.toml",
]


def glibc(data: bytes) -> tuple[int, ...]:
    """The newest GLIBC_x.y that a shared object asks for."""
    newest: tuple[int, ...] = (0,)
    for section in ELFFile(io.BytesIO(data)).iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, needs in section.iter_versions():
            for need in needs:
                if match := re.fullmatch(r"GLIBC_([\d.]+)", need.name):
                    newest = max(newest, tuple(int(part) for part in match[1].split(".")))
    return newest


def main() -> int:
    wheel = Path(sys.argv[1])
    problems = []
    if "-cp310-abi3-manylinux_2_28_" not in wheel.name:
        problems.append(f"{wheel.name}: not cp310-abi3-manylinux_2_28")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        problems += [f"{part} is missing" for part in REQUIRED if part not in names]
        if not any(name.endswith(".data/purelib/evener_ddp.pth") for name in names):
            problems.append("purelib/evener_ddp.pth is missing")
        for name in names:
            if "__pycache__" in name:
                problems.append(f"{name} does not belong in a wheel")
            if not name.endswith(".so"):
                continue
            data = archive.read(name)
            needed = glibc(data)
            print(f"{name}: glibc {'.'.join(map(str, needed))}, {len(data) / 1e6:.1f} MB")
            if needed > NEWEST_GLIBC:
                problems.append(f"{name} needs glibc {'.'.join(map(str, needed))}")
            for trace in (str(Path.home()).encode() + b"/", str(Path.cwd()).encode() + b"/"):
                if trace in data:
                    problems.append(f"{name} holds a path of the machine that built it: {trace!r}")
    for problem in problems:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
