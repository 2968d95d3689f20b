"""Results that are wrong, and tables that measured nothing: before any bandwidth counts."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.model import Table
from evener.tools.analyze.parse.table import Row
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names, size

# nccl-tests up to 2.11 prints the largest relative difference, and counts as wrong what is above
# these by type of element: adding in another order rounds in another way.
_TOLERANCE = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
_FLOAT8 = 0.13


def wrong(row: Row) -> bool:
    """Whether a row's results are wrong, by its count or by its relative difference."""
    for side in (row.out_of_place, row.in_place):
        if side is None:
            continue
        if side.wrong:
            return True
        tolerance = _FLOAT8 if "8" in row.type and row.type[0] == "f" else 0.0
        if side.error is not None and side.error > _TOLERANCE.get(row.type, tolerance):
            return True
    return False


@check({"correctness.wrong-values": "a benchmark checked its results and they were wrong"})
def wrong_values(picture: Picture) -> Iterator[Finding]:
    """Results that were checked and were wrong."""
    for table in picture.run.tables:
        bad = [(row, where) for row, where in table.rows if wrong(row)]
        if not bad and not (table.failed or table.out_of_bounds):
            continue
        if bad:
            title = f"wrong results at {count(len(bad), 'size')}"
            detail = f"found wrong elements, first at {size(bad[0][0].size)}"
        else:
            title = "the benchmark says that values are out of bounds"
            detail = f"says {table.out_of_bounds:.6g} values are out of bounds"
        yield Finding(
            "correctness.wrong-values",
            "problem",
            title,
            f"The benchmark checked its results and {detail}. No bandwidth counts until this is "
            "right.",
            "measured",
            tuple(where for _, where in bad[:3]) or (table.where,),
            "Find the part that corrupts: run inside one host, then over sockets.",
            "NCCL_NET=Socket evener bench all_reduce -b 1M -e 1G -f 2 -c 1",
            "#wrong is 0.",
        )


def _idle(table: Table) -> bool:
    """Whether the table has times and no traffic: bus bandwidth is 0 for one rank."""
    sides = [s for row, _ in table.rows for s in (row.out_of_place, row.in_place) if s is not None]
    return any(s.algbw > 0.1 for s in sides) and all(s.busbw == 0 for s in sides)


@check(
    {
        "correctness.separate-runs": "processes that each ran a benchmark of their own (built "
        "without MPI)",
        "correctness.one-rank": "a benchmark of one rank: bus bandwidth 0, nothing was sent",
    }
)
def separate(picture: Picture) -> Iterator[Finding]:
    """Processes that did not find one another measured themselves."""
    for table in picture.run.tables:
        copies = table.copies()
        if copies > 1:
            sure = bool(table.twice) or table.options > 1
            who = sorted(host for host in table.hosts if host)
            yield Finding(
                "correctness.separate-runs",
                "problem",
                f"{copies} benchmarks ran side by side, each by itself",
                _why(table)
                + (f" They are on {names(who)}." if who else "")
                + " So the processes did not form one job, and nothing crossed between them. Rows "
                "of both are mixed here: their mean says nothing.",
                "measured" if sure else "inferred",
                (*list(table.twice.values())[:2], table.where),
                "Build nccl-tests with MPI=1 (make clean first) for the MPI that starts it, or "
                "use `evener bench`, which needs no MPI.",
                "make clean; make MPI=1 MPI_HOME=/path/to/mpi",
                "One head, one list of devices with rank 0 once, and one average.",
            )
        elif _idle(table):
            yield Finding(
                "correctness.one-rank",
                "problem",
                "the bus bandwidth is 0: the benchmark had one rank",
                "One rank sends nothing to anyone. Several processes that each have one rank were "
                "built without MPI, or started without it.",
                "measured" if len(table.devices) == 1 else "inferred",
                (table.rows[0][1],),
                "Give it several GPUs (-g 8), or build it with MPI=1 and start it with mpirun.",
                "make clean; make MPI=1 MPI_HOME=/path/to/mpi",
                "A bus bandwidth above 0, and as many devices in the head as ranks.",
            )


@check({})
def alone(picture: Picture) -> Iterator[Finding]:
    """A communicator of one rank, where no table says more."""
    world = picture.world
    if world is None or world.size != 1 or not world.rings or picture.tables:
        return
    hosts = sorted({m.host for c in picture.run.communicators for m in c.members.values()})
    on = f" on each of {names(hosts)}" if len(hosts) > 1 else ""
    yield Finding(
        "correctness.one-rank",
        "warning",
        f"the largest communicator has one rank{on}",
        "One rank sends nothing to anyone. Where several were meant, the processes did not find "
        "one another: the program was built without MPI, or each was started by itself.",
        "measured",
        (world.where,),
        "Start it with its launcher, and build nccl-tests with MPI=1.",
        "make clean; make MPI=1 MPI_HOME=/path/to/mpi",
        "nranks in the line `Init COMPLETE` is the number of GPUs.",
    )


def _why(table: Table) -> str:
    if table.twice:
        ranks = ", ".join(str(rank) for rank in sorted(table.twice)[:4])
        return f"Rank {ranks} stands twice in the list of devices, for two processes."
    if table.options > 1:
        return f"The line of options stands {table.options} times before any row."
    if table.averages > 1:
        return f"The table has {table.averages} averages."
    return "Most rows stand twice, with different times."
