"""How many processors other programs keep busy, looked at while a benchmark itself does nothing.

Figures of a machine that does something else besides are lower, spread more, and can turn a ratio
around: the transport with more threads loses more. A benchmark then says so beside its table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_LOOK = 0.2
# Share of the processors that others may use before a benchmark mentions it.
_MUCH = 0.15


def others(root: Path = Path("/"), seconds: float = _LOOK) -> float:
    """Processors in use during the next `seconds`; 0 where the kernel does not tell."""
    before = _busy(root)
    time.sleep(seconds)
    return max(0.0, (_busy(root) - before) / os.sysconf("SC_CLK_TCK") / seconds)


def warning(seen: Sequence[float], processors: int) -> str:
    """What to say of looks at `others`; "" where the machine was quiet."""
    if not seen or max(seen) < _MUCH * processors:
        return ""
    return (
        f"other programs used up to {max(seen):.1f} of {processors} processors meanwhile: figures "
        "are lower, and ratios are not to be trusted. Run it again when the machine is idle"
    )


def _busy(root: Path) -> int:
    """Ticks of all processors since boot that were neither idle nor waiting for a disk."""
    try:
        fields = (root / "proc/stat").read_text(encoding="ascii").partition("\n")[0].split()[1:]
        ticks = [int(field) for field in fields]
    except (OSError, ValueError):
        return 0
    user, nice, system, _idle, _wait, irq, soft, steal = (*ticks, *[0] * 8)[:8]
    return user + nice + system + irq + soft + steal
