"""Copies of the plug-in without its newer interfaces, as old and new releases of NCCL see it."""

import ctypes
import sys
from pathlib import Path

from evener.net import plugin_path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from net_elf import hide

NAMES = [f"ncclNetPlugin_v{version}" for version in range(6, 13)]


def test_a_copy_shows_only_the_older_interfaces(tmp_path: Path) -> None:
    copy = tmp_path / "libnccl-net-old.so"
    assert hide(plugin_path(), copy, NAMES[3:]) == NAMES[3:]
    library = ctypes.CDLL(str(copy))
    seen = [name for name in NAMES if hasattr(library, name)]
    assert seen == NAMES[:3]
