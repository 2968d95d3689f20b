"""What changed between two runs, in order of effect: their ends, then speed, then the set-up."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evener.tools.analyze.collect import collect
from evener.tools.analyze.findings import Finding, run_checks
from evener.tools.analyze.findings.base import FOLLOWS
from evener.tools.analyze.model import Run
from evener.tools.analyze.picture import Picture, picture
from evener.tools.analyze.report.verdict import verdict
from evener.tools.analyze.words import names, size

_SHARE = 0.05
# Larger files are not read twice to see whether they are two runs.
_SMALL = 64 << 20


class One(NamedTuple):
    """One of the two runs."""

    path: Path
    seen: Picture
    findings: list[Finding]

    @property
    def ended(self) -> bool:
        """Whether it hung or failed."""
        return any(finding.root > FOLLOWS for finding in self.findings)


def two_runs(good: Path, bad: Path, asked: bool) -> tuple[One, One] | None:
    """The two runs, None where the files are parts of one and nobody asked to compare.

    Two files are two runs where each has whole communicators of its own over the same ranks, or a
    whole benchmark of the same hosts, and one of them failed and the other did not.
    """
    if not asked and not all(p.is_file() and p.stat().st_size < _SMALL for p in (good, bad)):
        return None
    runs = [One(path, seen := picture(collect([path])), run_checks(seen)) for path in (good, bad)]
    one, other = runs
    if asked:
        return one, other
    if one.ended == other.ended or not (_whole(one.seen) and _whole(other.seen)):
        return None
    mine, theirs = one.seen.world, other.seen.world
    assert mine is not None and theirs is not None
    apart = mine.name != theirs.name or not mine.name
    return (one, other) if apart and mine.size == theirs.size else None


def _whole(seen: Picture) -> bool:
    world = seen.world
    return world is not None and world.size > 1 and len(world.members) == world.size


def changes(good: One, bad: One) -> tuple[str, bool]:
    """The text, and whether anything differs."""
    found = [
        *_ends(good, bad),
        *_speed(good, bad),
        *_setup(good.seen, bad.seen),
        *_findings(good, bad),
    ]
    head = f"{bad.path} against {good.path}: "
    if not found:
        return head + "nothing that this reads differs.\n", False
    first = found[0]
    lines = [f"{head}{first[0].lower() + first[1:] if first[:2].istitle() else first}"]
    for number, text in enumerate(found, 1):
        lines += [
            "",
            *textwrap.wrap(
                f"{number}. {text}", 96, subsequent_indent="   ", break_on_hyphens=False
            ),
        ]
    lines += ["", f"`evener analyze {bad.path}` says what to do."]
    return "\n".join(lines) + "\n", True


def _ends(good: One, bad: One) -> Iterator[str]:
    if bad.ended:
        how = "both ended badly" if good.ended else "only this run ended badly"
        yield f"{how}: {verdict(bad.seen, bad.findings)}"
    elif good.ended:
        yield f"the first run ended badly and this one did not: {verdict(good.seen, good.findings)}"


def _speed(good: One, bad: One) -> Iterator[str]:
    before, after = good.seen.bandwidth, bad.seen.bandwidth
    if before is None or after is None or before.peak <= 0:
        return
    ratio = after.peak / before.peak
    if abs(ratio - 1) > _SHARE:
        yield (
            f"The peak is {after.peak:.4g} GB/s, was {before.peak:.4g} ({ratio:.0%}); the mean is "
            f"{after.mean:.4g}, was {before.mean:.4g}."
        )
    rows = {(r.size, r.type): r for r, _ in before.table.rows}
    worst: tuple[float, str] | None = None
    for row, _ in after.table.rows:
        other = rows.get((row.size, row.type))
        mine = row.out_of_place or row.in_place
        theirs = (other.out_of_place or other.in_place) if other else None
        if mine and theirs and theirs.busbw > 0 and mine.busbw < theirs.busbw * (1 - _SHARE):
            share = mine.busbw / theirs.busbw
            text = f"{size(row.size)}: {mine.busbw:.4g} GB/s, was {theirs.busbw:.4g} ({share:.0%})"
            worst = min(worst or (2.0, ""), (share, text))
    if worst and worst[0] < ratio * (1 - _SHARE):
        yield f"The size that lost most is {worst[1]}."


def _setup(good: Picture, bad: Picture) -> Iterator[str]:
    """What NCCL chose or was told, from what matters most."""
    before, after = good.run, bad.run
    yield from _two("Networks", _networks(before), _networks(after))
    yield from _two("GPUDirect RDMA", _direct(before), _direct(after))
    for name, value in (("Hosts", "hosts"), ("NCCL", "versions")):
        old, new = sorted(getattr(before, value)), sorted(getattr(after, value))
        yield from _two(
            name, [o or "(without a name)" for o in old], [n or "(without a name)" for n in new]
        )
    if good.world and bad.world:
        yield from _two("Ranks", [str(good.world.size)], [str(bad.world.size)])
        yield from _two("Channels", [str(good.world.channels)], [str(bad.world.channels)])
        yield from _two("Ways between ranks", _ways(good), _ways(bad))
        rings = [str(len(one.world.distinct_rings())) for one in (good, bad) if one.world]
        yield from _two("Distinct rings", rings[:1], rings[1:])
    yield from _two("Cards", _cards(before), _cards(after))
    for name in sorted(before.settings.keys() | after.settings.keys()):
        old, new = sorted(before.settings.get(name, {})), sorted(after.settings.get(name, {}))
        yield from _two(name, old or ["(not set)"], new or ["(not set)"])


def _two(name: str, before: list[str], after: list[str]) -> Iterator[str]:
    if before != after and (before or after):
        old, new = (names(v, 6) if v else "(none)" for v in (before, after))
        yield f"{name}: {new}, was {old}."


def _networks(run: Run) -> list[str]:
    found = {n for host in run.hosts.values() for n in host.networks}
    return sorted(found | {n for host in run.hosts.values() for n, _ in host.used})


def _direct(run: Run) -> list[str]:
    used = {way for host in run.hosts.values() for way, n in host.direct.items() if n}
    return ["on" if way else "off" for way in sorted(used)]


def _ways(seen: Picture) -> list[str]:
    return sorted(way for way, n in seen.world.transports.items() if n) if seen.world else []


def _cards(run: Run) -> list[str]:
    return sorted({card.name for host in run.hosts.values() for card in host.cards.values()})


def _findings(good: One, bad: One) -> Iterator[str]:
    known = {finding.id for finding in good.findings}
    for finding in bad.findings:
        if finding.id not in known and finding.severity != "note" and not finding.root:
            known.add(finding.id)
            yield f"New: {finding.title} ({finding.id})."
    left = {finding.id for finding in bad.findings}
    for finding in good.findings:
        if finding.id not in left and finding.severity != "note" and not finding.root:
            left.add(finding.id)
            yield f"Gone: {finding.title} ({finding.id})."
