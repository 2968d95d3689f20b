"""What a benchmark says, in one sentence, from its figures."""

from __future__ import annotations

from evener.tools.bench.train.results import Cell, Results
from evener.tools.bench.train.stats import Spread
from evener.tools.bench.train.table import number


def verdict(results: Results) -> str:
    """How the best of Evener's columns compares with plain DDP, or FSDP2, on the whole cluster.

    Also the best that sends every gradient, where the best of all does not. A difference that is
    smaller than the spread of the runs is called none.
    """
    row = results.rows[-1]
    found = [
        (column, rate)
        for column in results.columns
        if column.evener and (rate := _rate(results.cell(row, column.name)))
    ]
    reference = results.reference
    base_cell = results.cell(row, reference.name) if reference else None
    base = _rate(base_cell)
    shape, _, count = row.title.partition(": ")
    where = f"On {shape} ({count})" if count else f"On {shape}"
    if reference and base is None and base_cell is not None:
        return f"{where} plain {reference.title} failed, so there is nothing to compare with"
    if reference is None or base is None:
        if not found:
            return f"{where} there is no figure yet"
        column, best = max(found, key=lambda one: one[1].median)
        return (
            f"{where} {column.title} reaches {number(best.median)} {results.sample}s/s per "
            f"{results.device_word}; plain DDP was not measured beside it"
        )
    base_title = reference.title
    if not found:
        return f"{where} {base_title} reaches {number(base.median)} {results.sample}s/s"
    column, best = max(found, key=lambda one: one[1].median)
    said = f"{where} {_compared(column.title, best, base, base_title, results.sample)}"
    exact = [one for one in found if _exact(one[0].name)]
    if exact and not _exact(column.name):
        mild, rate = max(exact, key=lambda one: one[1].median)
        said += f"; {mild.title}, which sends every gradient, {rate.median / base.median:.2f} x"
    failed = [
        c.title for c in results.columns if (cell := results.cell(row, c.name)) and cell.reason
    ]
    return said + (f"; {', '.join(failed)} failed" if failed else "")


def _exact(name: str) -> bool:
    return name.startswith(("exact", "fsdp-exact"))


def _rate(cell: Cell | None) -> Spread | None:
    return cell.rate if cell and not cell.reason else None


def _compared(title: str, best: Spread, base: Spread, base_title: str, sample: str) -> str:
    rates = f"{number(best.median)} {sample}s/s, {number(base.median)}"
    ratio = best.median / base.median
    if best.low <= base.high and base.low <= best.high:
        return (
            f"{title} and {base_title} are as fast as each other within the spread of the runs "
            f"({rates})"
        )
    if ratio < 1:
        return f"{title}, the best of Evener, has {ratio:.2f} x the speed of {base_title} ({rates})"
    return f"{title} is {ratio:.2f} x as fast as {base_title} ({rates})"
