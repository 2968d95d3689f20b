"""Several tables of one host against one another, and against how its GPUs are joined."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.parse.smi import Matrix
from evener.tools.analyze.picture import Bandwidth, Picture
from evener.tools.analyze.words import count

_APART = 3.0
_NO_NVLINK = re.compile(
    r"GeForce RTX (?:40|50)\d\d|\b(?:L4|L40S?|A2|A10G?|A16|T4)\b|RTX \w* ?6000 Ada|RTX 6000 Ada"
)


def islands(matrix: Matrix) -> list[tuple[str, ...]]:
    """GPUs that NVLink joins, one tuple a set, in order."""
    left, found = matrix.gpus(), []
    while left:
        reached, todo = {left[0]}, [left[0]]
        while todo:
            one = todo.pop()
            for other in left:
                if other not in reached and matrix.cells.get((one, other), "").startswith("NV"):
                    reached.add(other)
                    todo.append(other)
        found.append(tuple(gpu for gpu in left if gpu in reached))
        left = [gpu for gpu in left if gpu not in reached]
    return found


@check(
    {
        "bandwidth.pcie-only": "GPUs of a host that no NVLink joins",
        "bandwidth.nvlink-islands": "NVLink joins GPUs in pairs or groups only, and a run "
        "crosses them",
        "bandwidth.tables-differ": "runs on the same hosts whose peaks are far apart",
    }
)
def several(picture: Picture) -> Iterator[Finding]:
    """Every table, not only the largest."""
    tables = [t for t in picture.tables if not t.mixed and t.peak > 0]
    inside = [t for t in tables if t.table.nodes() <= 1 and t.ranks > 1]
    for matrix, where in picture.run.matrices:
        joined = islands(matrix)
        largest = max((len(one) for one in joined), default=0)
        if largest == 1 < len(joined):
            yield _pcie(matrix, inside, where)
            return
        if len(joined) < 2 or largest < 2:
            continue
        yield from _islands(joined, largest, inside, where)
        return
    names = {d.name for t in inside for d in t.table.devices.values()}
    if names and not picture.run.matrices and all(_NO_NVLINK.search(name) for name in names):
        yield _pcie(None, inside, inside[0].peak_where, sorted(names)[0])
    yield from _apart(tables)


_WAYS = {
    "PIX": "through a PCIe switch (PIX)", "PXB": "through several PCIe switches (PXB)",
    "PHB": "through the CPU (PHB)", "NODE": "through the CPU, between its PCIe bridges (NODE)",
    "SYS": "from one CPU to the other (SYS)",
}  # fmt: skip


def _pcie(matrix: Matrix | None, inside: list[Bandwidth], where: int, name: str = "") -> Finding:
    """GPUs that reach one another over PCIe: no fault, and the reason for what a run reaches."""
    gpus = matrix.gpus() if matrix else []
    cells = (
        {matrix.cells.get((a, b), "") for a in gpus for b in gpus if a != b} if matrix else set()
    )
    ways = [text for key, text in _WAYS.items() if key in cells]
    peak = max((t.peak for t in inside), default=0.0)
    rate = f", {peak:.4g} GB/s" if peak else ""
    far = bool(cells & {"SYS", "NODE"})
    how = "; ".join(ways) or f"{name} has none"
    return Finding(
        "bandwidth.pcie-only",
        "warning" if far or (peak and matrix) else "note",
        f"no NVLink joins the GPUs: they reach one another over PCIe only ({how}){rate}",
        "A ring is as fast as its slowest hop. PCIe gives a small part of NVLink's rate, less "
        "through a CPU and least from one CPU to the other; without peer access bytes also go "
        "through host memory. Nothing is broken.",
        "measured" if matrix else "inferred",
        (where, *(t.peak_where for t in inside[:1])),
        "Keep what talks most on GPUs that are near one another, and see that peer access is on. "
        "Send less: larger batches between updates, or gradients of fewer bits.",
        "nvidia-smi topo -m; nvidia-smi topo -p2p r; nvidia-smi nvlink --status",
        "OK for every pair, and `via P2P` in NCCL's log.",
    )


def _islands(
    joined: list[tuple[str, ...]],
    largest: int,
    inside: list[Bandwidth],
    where: int,
) -> Iterator[Finding]:
    across = [t for t in inside if t.ranks > largest]
    within = [t for t in inside if t.ranks <= largest]
    slow = min(across, key=lambda t: t.peak, default=None)
    sets = ", ".join("-".join(one) for one in joined[:4]) + (" ..." if len(joined) > 4 else "")
    form = "in pairs" if largest == 2 else f"in groups of {largest}"
    if slow is None:
        yield Finding(
            "bandwidth.nvlink-islands",
            "note",
            f"NVLink joins the GPUs {form} only ({sets})",
            "A run over more GPUs than that goes over PCIe between the groups.",
            "measured",
            (where,),
        )
        return
    best = max(within, key=lambda t: t.peak, default=None)
    than = ""
    if best is not None and best.peak > slow.peak:
        than = (
            f", {best.peak:.4g} GB/s with {best.ranks} ({best.peak / slow.peak:.0f} times as much)"
        )
    yield Finding(
        "bandwidth.nvlink-islands",
        "warning",
        f"NVLink joins the GPUs {form} only ({sets}): with {slow.ranks} GPUs the ring goes over "
        f"PCIe, "
        f"{slow.peak:.4g} GB/s{than}",
        "nvidia-smi topo -m shows no NVLink (NV#) between the groups. A ring is as fast as its "
        "slowest "
        "hop, and that is what PCIe and the CPUs give; nothing is broken.",
        "measured",
        (where, slow.peak_where, *([best.peak_where] if best else [])),
        f"Keep what talks most inside such a group (tensor parallel of {largest}), or use a "
        f"machine "
        "whose NVLink reaches all GPUs.",
        "nvidia-smi topo -m; nvidia-smi nvlink --status",
        f"The rate of {largest} GPUs stays inside a group.",
    )


def _apart(tables: list[Bandwidth]) -> Iterator[Finding]:
    """The largest ratio between tables of the same hosts and collective."""
    found: list[tuple[float, Bandwidth, Bandwidth]] = []
    for slow in tables:
        for fast in tables:
            same = slow.table.hosts and slow.table.hosts == fast.table.hosts
            alike = slow.collective == fast.collective or not slow.collective or not fast.collective
            sizes = slow.peak_row.size >= 1 << 22 and fast.peak_row.size >= 1 << 22
            if same and alike and sizes and fast.peak > _APART * slow.peak:
                found.append((fast.peak / slow.peak, slow, fast))
    if not found:
        return
    ratio, slow, fast = max(found, key=lambda item: item[0])
    yield Finding(
        "bandwidth.tables-differ",
        "warning",
        f"two runs on the same hosts are {ratio:.2g} times apart: {slow.peak:.4g} GB/s with "
        f"{count(slow.ranks, 'rank')}, {fast.peak:.4g} with {fast.ranks}",
        "The tables are of the same hosts and collective. What differs between the runs (number of "
        "GPUs, variables, path between the GPUs) is the reason.",
        "measured",
        (slow.peak_where, fast.peak_where),
        "Compare what NCCL logged of both.",
        "evener analyze --compare GOOD.log BAD.log",
        "Equal peaks.",
    )
