"""What the files do not hold: ranks without lines, rings cut short, lines not understood."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.findings.causes import cause
from evener.tools.analyze.model import Warned
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, ranges


@check({"coverage.missing-ranks": "ranks that left no line"})
def missing_ranks(picture: Picture) -> Iterator[Finding]:
    """Ranks that a communicator counts and no line is from."""
    world = picture.world
    if world is None or not world.size:
        return
    missing = [rank for rank in range(world.size) if rank not in world.members]
    if not missing:
        return
    yield Finding(
        "coverage.missing-ranks",
        "note",
        f"{count(len(missing), 'rank')} of {world.size} left no line",
        f"Their hosts are not known (ranks {ranges(missing)}); pairs of two of them are left out.",
        "measured",
        (world.where,),
        "Give the files of all hosts, made with NCCL_DEBUG=INFO on every rank.",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p.log",
        "Every pair between hosts is found.",
    )


@check({"coverage.cut-rings": "rings that the log cut and nothing else completes"})
def cut_rings(picture: Picture) -> Iterator[Finding]:
    """Rings that NCCL printed in part and that nothing else completes."""
    world = picture.world
    cut = [ring for ring in world.rings.values() if not ring.whole] if world else []
    if not cut or world is None:
        return
    yield Finding(
        "coverage.cut-rings",
        "note",
        f"{count(len(cut), 'ring')} of {len(world.rings)} cut short in the log",
        "NCCL prints the first 20 ranks (up to 2.22) or 128 characters (from 2.23). A cut ring is "
        "not closed here; its pairs are taken from NET lines where there are any.",
        "measured",
        tuple(ring.where for ring in cut[:3]),
        "Log the graph too: each rank then names its neighbours.",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET",
        "Every ring is whole.",
    )


@check({"coverage.unknown-lines": "lines of NCCL that are not understood"})
def unknown_lines(picture: Picture) -> Iterator[Finding]:
    """NCCL lines that no parser knows."""
    run = picture.run
    if not run.unknown:
        return
    yield Finding(
        "coverage.unknown-lines",
        "note",
        f"{count(run.unknown, 'line')} of NCCL not understood",
        "For example: " + " | ".join(text for text, _ in run.unknown_samples[:3]),
        "measured",
        tuple(where for _, where in run.unknown_samples[:3]),
    )


@check({"coverage.unread": "files that are no text, or packed and cut: what was not read"})
def unread(picture: Picture) -> Iterator[Finding]:
    """Files of a folder that were left out, and the ends of packed ones that are missing."""
    run = picture.run
    if run.skipped:
        yield Finding(
            "coverage.unread",
            "note",
            f"{count(len(run.skipped), 'file')} left out: neither text nor a recorder's dump",
            "For example: " + ", ".join(map(str, run.skipped[:3])),
            "measured",
        )
    if run.cut:
        yield Finding(
            "coverage.unread",
            "warning",
            f"{count(len(run.cut), 'packed file')} cut or damaged, and read up to there",
            "What the end of a log says of a failure may be missing.",
            "measured",
            tuple(run.cut[:3]),
            "Pack them again once the job has ended, or give the logs themselves.",
        )


# What NCCL tells where it looks for something that is not there, and goes on.
_HARMLESS = re.compile(
    r"Failed to open lib|cannot open shared object|No plugin found|Could not find|dlvsym|dlopen"
    r"|nvml|Could not get (?:speed|fabric)|NET/IB : No device|unable to open"
    r"|version mismatch.*minor|Cannot load|Unable to load libnccl",
    re.IGNORECASE,
)


@check({"coverage.nccl-warning": "a warning of NCCL that nothing above explains"})
def warnings(picture: Picture) -> Iterator[Finding]:
    """NCCL's other warnings; those that differ in numbers only count as one."""
    texts = picture.run.warnings
    kinds: dict[str, list[tuple[str, Warned]]] = {}
    for text, warning in texts.items():
        if cause(text, picture.run) is None:
            kinds.setdefault(re.sub(r"nccl-\w+|0x\w+|\d+", "#", text), []).append((text, warning))
    ranked = sorted(kinds.values(), key=lambda found: -sum(w.times for _, w in found))
    for found in ranked[:5]:
        text = found[0][0]
        yield Finding(
            "coverage.nccl-warning",
            "note" if _HARMLESS.search(text) else "warning",
            f"NCCL warns: {text[:120]}",
            f"Printed {count(sum(w.times for _, w in found), 'time')}.",
            "measured",
            (found[0][1].where,),
            "Read the warning: NCCL prints one where something failed.",
        )


@check({"coverage.mixed-versions": "different NCCL versions in one job"})
def versions(picture: Picture) -> Iterator[Finding]:
    """Different NCCL versions in one job."""
    if len(picture.run.versions) > 1:
        yield Finding(
            "coverage.mixed-versions",
            "warning",
            "different NCCL versions: " + ", ".join(sorted(picture.run.versions)),
            "Ranks of one communicator must run one version; files of several runs are analyzed "
            "one run at a time.",
            "measured",
            tuple(picture.run.versions.values()),
            "Install one version everywhere, or give the files of one run.",
            'python -c "import torch; print(torch.cuda.nccl.version())"',
        )


@check({"coverage.broken-rows": "rows of a table that other output broke"})
def broken_rows(picture: Picture) -> Iterator[Finding]:
    """Rows that other output came into and that could not be put together."""
    for table in picture.run.tables:
        if table.average is not None and not table.rows and table.heads:
            yield Finding(
                "coverage.broken-rows",
                "note",
                "no row of a table can be read",
                f"It ended with a mean of {table.average:.4g} GB/s, so it had rows: other output "
                "is in the middle of them.",
                "measured",
                (table.where,),
                "Write other output to files of its own.",
                expect="Whole rows.",
            )
        elif table.broken:
            yield Finding(
                "coverage.broken-rows",
                "note",
                f"{count(table.broken, 'row')} of a table broken by other output",
                "They are left out of all figures.",
                "measured",
                (table.where,),
                "Write NCCL's log to files of its own.",
                "export NCCL_DEBUG_FILE=nccl.%h.%p.log",
                "Whole rows.",
            )
