"""What the bandwidth table shows by itself: falling, spikes, far from line rate."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.parse.table import Row, Side
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, size

FALLS = 0.15
"""Share below the peak at the largest size that counts as falling."""
SPIKE = 0.10
"""Share below both neighbouring sizes that counts as a spike."""
APART = 0.15
"""Share by which in place and out of place may differ."""
FAR = 0.70
"""Share of the line rate below which the peak is far from it."""
ABOVE = 1.05
"""Share of the line rate above which the peak shows that the line rate is wrong."""
TWICE = 2.1
"""Times the line rate to which an all-reduce may come that does not go along rings: over a tree of
two nodes, or where switches reduce, each card carries the data once and not twice."""
LARGE = 1 << 20
"""Bytes from which bandwidth, not latency, decides."""
_SIDES = (("out of place", "out_of_place"), ("in place", "in_place"))


@check({"bandwidth.falls-with-size": "the largest size is slower than the peak"})
def falls_with_size(picture: Picture) -> Iterator[Finding]:
    """The largest size is slower than the peak."""
    found = picture.bandwidth
    if found is None or found.mixed:
        return
    row, where = found.series[-1]
    last = [(words, getattr(row, name)) for words, name in _SIDES if getattr(row, name)]
    if not last or row.size <= found.peak_row.size or found.peak <= 0:
        return
    best = max(side.busbw for _, side in last)
    drop = 1 - best / found.peak
    if drop < FALLS:
        return
    figures = " and ".join(f"{side.busbw:.4g} {words}" for words, side in last)
    yield Finding(
        "bandwidth.falls-with-size",
        "warning",
        f"{drop:.0%} slower at {size(row.size)} than at {size(found.peak_row.size)}",
        f"{figures} GB/s against a peak of {found.peak:.4g} GB/s. A path that is free of "
        "congestion holds its peak: here queues build up when messages last longer, which links "
        "shared by several flows do.",
        "measured",
        (where, found.peak_where),
        "Look for congestion: pause frames, ECN marks and drops on the switch ports between hosts.",
        "ethtool -S IFACE | grep -E 'pause|discard|ecn'",
        "A curve that stays at its peak.",
    )


@check({"bandwidth.spikes": "single sizes far below both their neighbours"})
def spikes(picture: Picture) -> Iterator[Finding]:
    """Single sizes far below both their neighbours."""
    found = picture.bandwidth
    if found is None or found.mixed:
        return
    dips: list[tuple[float, str, Row, int]] = []
    for words, name in _SIDES:
        points: list[tuple[Row, Side, int]] = [
            (row, getattr(row, name), where)
            for row, where in found.series
            if getattr(row, name) and row.size >= LARGE
        ]
        for before, here, after in zip(points, points[1:], points[2:], strict=False):
            beside = min(before[1].busbw, after[1].busbw)
            if beside > 0 and here[1].busbw < (1 - SPIKE) * beside:
                dips.append((1 - here[1].busbw / beside, words, here[0], here[2]))
    if dips:
        dips.sort(key=lambda dip: -dip[0])
        yield Finding(
            "bandwidth.spikes",
            "note",
            f"{count(len(dips), 'size')} far below the neighbouring sizes",
            "; ".join(
                f"{size(row.size)} {words}: {drop:.0%} below" for drop, words, row, _ in dips[:4]
            )
            + ". A size that is slow once is other traffic or a changed algorithm.",
            "measured",
            tuple(where for *_, where in dips[:3]),
            "Repeat these sizes with more iterations.",
            f"evener bench {found.collective or 'all_reduce'} -b {dips[0][2].size} "
            f"-e {dips[0][2].size} -n 100 -N 5",
            "Equal values in each cycle, or a dip that stays and has a cause.",
        )


@check({"bandwidth.in-place-differs": "in place and out of place differ at several large sizes"})
def in_place_differs(picture: Picture) -> Iterator[Finding]:
    """In place and out of place differ at several large sizes: the runs are noisy."""
    found = picture.bandwidth
    if found is None or found.mixed:
        return
    apart = []
    large = 0
    for row, where in found.series:
        if row.size >= LARGE and row.out_of_place and row.in_place:
            large += 1
            one, other = row.out_of_place.busbw, row.in_place.busbw
            if min(one, other) < (1 - APART) * max(one, other):
                apart.append((row, where))
    if len(apart) >= 2:
        yield Finding(
            "bandwidth.in-place-differs",
            "note",
            f"in place and out of place differ by over {APART:.0%} at "
            f"{len(apart)} of {large} sizes",
            "Both move the same bytes over the network. Such differences are noise of the fabric: "
            "flows that meet differently on shared links from run to run.",
            "measured",
            tuple(where for _, where in apart[:3]),
            "Treat a difference below this as no difference, and repeat.",
            f"evener bench {found.collective or 'all_reduce'} -b 1M -e 1G -f 2 -n 50 -N 3",
        )


@check({"bandwidth.below-line-rate": "the peak is far below what the cards carry"})
def far_from_line_rate(picture: Picture) -> Iterator[Finding]:
    """The peak against what the cards can carry."""
    found, rate = picture.bandwidth, picture.line_rate
    if found is None or not rate or found.mixed or found.peak >= FAR * rate:
        return
    if found.collective not in ("all_reduce", "all_gather", "reduce_scatter", ""):
        return
    yield Finding(
        "bandwidth.below-line-rate",
        "problem",
        f"peak {found.peak:.3g} GB/s of {rate:.3g} GB/s line rate ({found.peak / rate:.0%})",
        f"The line rate is that of {picture.line_rate_from}. A sample of median bus bandwidth over "
        f"{size(LARGE)}: {_median(picture):.3g} GB/s.",
        "inferred",
        (found.peak_where,),
        "Follow the findings on the fabric and the network; they say where it is lost.",
    )


@check(
    {"bandwidth.above-line-rate": "the peak is above what the cards report, so the report is wrong"}
)
def above_line_rate(picture: Picture) -> Iterator[Finding]:
    """More than the cards can carry: then it is not what they can carry."""
    found, rate = picture.bandwidth, picture.line_rate
    if found is None or not rate or picture.traffic or found.peak <= ABOVE * rate:
        return
    if found.collective in ("all_reduce", "") and picture.twice and found.peak <= TWICE * rate:
        return
    if found.collective not in ("all_reduce", "all_gather", "reduce_scatter", ""):
        return
    yield Finding(
        "bandwidth.above-line-rate",
        "note",
        f"peak {found.peak:.3g} GB/s is more than the line rate of {rate:.3g} GB/s",
        f"The line rate is that of {picture.line_rate_from}, as the drivers report it. Virtual "
        "cards report a number of their own (veth and virtio 10 Gb/s).",
        "inferred",
        (found.peak_where,),
        "Do not judge by this line rate. Give a map with the cards' true speeds.",
        "evener analyze FILES --map map.yaml",
        "The share of the true line rate.",
    )


def _median(picture: Picture) -> float:
    rows = picture.bandwidth.table.rows if picture.bandwidth else []
    values = [
        side.busbw
        for row, _ in rows
        if row.size >= LARGE
        for side in (row.out_of_place, row.in_place)
        if side
    ]
    return median(values) if values else 0.0
