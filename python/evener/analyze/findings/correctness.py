"""Results that are wrong: before any bandwidth counts."""

from __future__ import annotations

from collections.abc import Iterator

from evener.analyze.findings.base import Finding, check
from evener.analyze.picture import Picture
from evener.analyze.words import count, size


@check
def wrong_values(picture: Picture) -> Iterator[Finding]:
    """Results that were checked and were wrong."""
    for table in picture.run.tables:
        bad = [
            (row, where)
            for row, where in table.rows
            if any(side and side.wrong for side in (row.out_of_place, row.in_place))
        ]
        if bad:
            yield Finding(
                "correctness.wrong-values",
                "problem",
                f"wrong results at {count(len(bad), 'size')}",
                "The benchmark checked its results and found wrong elements, first at "
                f"{size(bad[0][0].size)}. No bandwidth counts until this is right.",
                "measured",
                tuple(where for _, where in bad[:3]),
                "Find the part that corrupts: run inside one host, then over sockets.",
                "NCCL_NET=Socket evener bench all_reduce -b 1M -e 1G -f 2 -c 1",
                "#wrong is 0.",
            )
