"""`nvidia-smi topo -m`: the matrix of distances between GPUs and cards of one host.

            GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity
    GPU0     X    NV18  PIX   0-47          0
    NIC0    PIX   SYS    X
    NIC Legend:
      NIC0: mlx5_0
Older drivers print `mlx5_0` itself as the head. Columns after the last GPU or card are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ESCAPES = re.compile(rb"\x1b\[[0-9;]*m")
_LABEL = re.compile(r"^(?:GPU\d{1,3}|NIC\d{1,3}|mlx\d_\w+|[a-z]{3,6}_\w+|eth\d+)$")
_LEGEND = re.compile(r"(?:^|\s)(NIC\d{1,3}): (\S+)\s*$")
_DISTANCE = re.compile(r"^(?:X|PIX|PXB|PHB|NODE|SYS|NV\d{1,3})$")


@dataclass(slots=True)
class Matrix:
    """Distances by (row, column); `names` gives the card behind `NIC0`."""

    columns: tuple[str, ...]
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def gpus(self) -> list[str]:
        """Labels of the GPUs, in order."""
        return [name for name in self.columns if name.startswith("GPU")]

    def cards(self) -> list[str]:
        """Labels of the cards, in order."""
        return [name for name in self.columns if not name.startswith("GPU")]


def head(line: bytes) -> Matrix | None:
    """A new matrix where `line` is the head of one."""
    if b"GPU0" not in line:
        return None
    before, _, after = _plain(line).partition("GPU0")
    words = ["GPU0", *after.split()]
    if "X" in words or (before.strip() and not (words[1:] and _LABEL.match(words[1]))):
        return None  # in a sentence or a row
    columns = []
    for word in words:
        if not _LABEL.match(word):
            break
        columns.append(word)
    return Matrix(tuple(columns))


def row(line: bytes, matrix: Matrix) -> bool:
    """Put a row or a legend line into `matrix`; whether it was one."""
    text = _plain(line)
    if legend := _LEGEND.search(text):
        matrix.names[legend[1]] = legend[2]
        return True
    words = text.split()
    # Anything may precede the label: a time, a pod.
    first = next((i for i, w in enumerate(words[:12]) if w in matrix.columns), 0)
    words = words[first:]
    if len(words) <= len(matrix.columns) or not _LABEL.match(words[0]):
        return False
    cells = words[1 : len(matrix.columns) + 1]
    if not all(_DISTANCE.match(cell) for cell in cells):
        return False
    matrix.cells.update(
        {(words[0], column): cell for column, cell in zip(matrix.columns, cells, strict=True)}
    )
    return True


def _plain(line: bytes) -> str:
    return _ESCAPES.sub(b"", line).decode("utf-8", "replace")
