"""All ten collectives on real Gloo ranks, with results checked; and checks that can fail."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import worlds

from evener.tools.bench.collectives import algorithms
from evener.tools.bench.collectives.clock import Clock
from evener.tools.bench.collectives.gloo import GlooCarrier
from evener.tools.bench.collectives.names import NAMES
from evener.tools.bench.collectives.options import Options
from evener.tools.bench.collectives.output import Report
from evener.tools.bench.collectives.shapes import ALL
from evener.tools.bench.collectives.team import Processes, Shared, Team


def team(rank: int, size: int) -> Team:
    processes = Processes()
    processes.rank, processes.size = rank, size
    return Team(processes, 1, 0, Shared(1))


def measure(rank: int, size: int, name: str, options: Options, carrier: Any = None) -> Report:
    report = Report(options, name, 0, rank == 0, [], io.StringIO())
    carrier = carrier or GlooCarrier(options, rank, size)
    clock = Clock(carrier, team(rank, size), options, ALL[name], size, report)
    for kind in options.types("cpu"):
        for op in options.operations(ALL[name], "cpu"):
            for root in options.roots(ALL[name], size):
                clock.run(kind, op, root)
    return report


def everything(rank: int, size: int) -> list[tuple[str, int, list[Any]]]:
    found = []
    for name in NAMES:
        if name == "hypercube" and size & (size - 1):
            continue
        options = Options(
            minbytes=8, maxbytes=20000, stepfactor=50, iters=1, warmup_iters=0, root=-1, check=2,
            datatype="bfloat16" if name == "all_gather" else "float", op="all", agg_iters=2,
        )  # fmt: skip
        report = measure(rank, size, name, options)
        sides = [
            row[side]["nwrong"] for row in report.results for side in ("out_of_place", "in_place")
        ]
        found.append((name, report.failures, sides))
    return found


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_results_are_right(ranks: int) -> None:
    for rank in worlds.run([ranks], everything):
        for name, failures, sides in rank:
            assert failures == 0, name
            unchecked = name in ("alltoall", "sendrecv")
            assert sides.count(None) == (len(sides) // 2 if unchecked else 0)
            assert all(side in (0.0, None) for side in sides)


class Corrupting(GlooCarrier):
    """Rank 1 spoils one element of what it received."""

    def wait(self) -> None:
        if self.rank == 1:
            self.buffers._receive[5] ^= 1


def spoiled(rank: int, size: int) -> tuple[int, list[Any]]:
    options = Options(minbytes=4096, maxbytes=4096, iters=1)
    report = measure(rank, size, "all_reduce", options, Corrupting(options, rank, size))
    return report.failures, [report.results[0]["out_of_place"]["nwrong"]]


def test_a_wrong_element_anywhere_fails_the_run() -> None:
    # Every rank knows, though one rank is wrong.
    assert worlds.run([2], spoiled) == [(2, [1.0]), (2, [1.0])]


def lazy(rank: int, size: int) -> int:
    """All-reduce replaced by a copy: what a broken transport would leave behind."""
    keep, dist.all_reduce = dist.all_reduce, lambda *_, **__: None
    try:
        options = Options(minbytes=4096, maxbytes=4096, iters=1)
        return measure(rank, size, "all_reduce", options).failures
    finally:
        dist.all_reduce = keep


def test_a_collective_that_does_nothing_fails() -> None:
    assert worlds.run([2], lazy) == [2, 2]


def own(rank: int, size: int) -> tuple[int, list[dict[str, Any]]]:
    algo = ("flat", "flat+bf16", "flat+topk")
    options = Options(minbytes=4096, maxbytes=4096, iters=2, algo=algo)
    report = measure(rank, size, "all_reduce", options)
    algorithms.run(options, team(rank, size).processes, report, torch.device("cpu"))
    said = "flat+bf16 was sent as exact" in report.stream.getvalue()  # type: ignore[attr-defined]
    assert said == (rank == 0)  # two ranks of one node: nothing crosses a network
    return report.failures, report.algorithms


def test_own_algorithms_are_rows_with_checked_results() -> None:
    for failures, rows in worlds.run([2], own):
        assert failures == 0
        assert {row["wire"] for row in rows} == {"exact"}
        assert [row["algorithm"] for row in rows] == ["flat", "flat+bf16", "flat+topk"]
        # Top-k leaves values out by design, so there is nothing to compare with.
        assert [row["nwrong"] for row in rows] == [0, 0, None]
        for row in rows:
            assert row["size"] == 4096
            assert row["bus_bw"] == pytest.approx(4096 / row["time"] / 1e3)
            assert row["vs_library"] > 0


def own_broken(rank: int, size: int) -> int:
    keep, dist.all_reduce = dist.all_reduce, lambda *_, **__: None
    try:
        options = Options(minbytes=4096, maxbytes=4096, iters=1, algo=("flat",))
        report = Report(options, "all_reduce", 0, rank == 0, [], io.StringIO())
        algorithms.run(options, team(rank, size).processes, report, torch.device("cpu"))
        return report.failures
    finally:
        dist.all_reduce = keep


def test_own_algorithm_that_does_nothing_fails() -> None:
    assert worlds.run([2], own_broken) == [1, 1]


def test_averages_over_processes() -> None:
    def check(how: int) -> float:
        one = team(0, 1)
        return one.average(2.0, how)

    assert [check(how) for how in range(4)] == [2.0] * 4
