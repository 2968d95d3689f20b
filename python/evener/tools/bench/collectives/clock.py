"""One measurement, as nccl-tests takes it, over whatever carries the ranks.

Warm-up of all sizes, then for each size out of place and in place: a barrier, one call to connect,
`iters` times `agg_iters` calls, one wait; the time is what passed on the CPU from the first of
these calls to end of wait, averaged over processes as -a says. Checks are outside of the time.

nccl-tests has the barrier behind the call to connect. Ours takes far longer than a call (Gloo,
Python), and its ends lie as far apart; the call brings the ranks together again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from evener.tools.bench.collectives.options import TYPES, Options
from evener.tools.bench.collectives.output import Report, Side
from evener.tools.bench.collectives.shapes import Collective, Shape
from evener.tools.bench.collectives.team import Team


class Ready(NamedTuple):
    """A collective of one size on the ranks of one thread, ready to be started.

    Calls are numbered: they may take other parts of the buffers, call 0 the beginning, where `fill`
    and `wrong` look. `together` of them are launched as one (-m).
    """

    run: Callable[[int, int, int], None]
    """(first, count, together): start `count` calls, numbered from `first`."""
    timed: Callable[[int, int], tuple[float, float]]
    """(count, together): call 0 and a wait; then start `count` calls and wait. Seconds from then on
    until all were started, and until all were done."""


class Carrier(Protocol):
    """The ranks of one thread: their buffers and how to start a collective on all of them."""

    def start(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int, in_place: bool
    ) -> Ready:
        """Get a collective of this shape ready."""

    def wait(self) -> None:
        """Until all that was started is done. Raises where a rank failed or time ran out."""

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        """What `record` starts, as a graph; the result launches it."""

    def mark(self) -> None:
        """A moment after all that was started, on every rank; `between` measures pairs of them."""

    def between(self) -> list[float]:
        """Seconds from the 1st mark to the 2nd, the 3rd to the 4th, ...: the slowest rank's."""

    def fill(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> None:  # fmt: skip
        """Put every rank's contribution in."""

    def wrong(
        self, collective: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> int:  # fmt: skip
        """Wrong elements in the results of this thread's ranks."""


class Clock:
    """Runs all sizes of one type, operation and root."""

    def __init__(
        self,
        carrier: Carrier,
        team: Team,
        options: Options,
        collective: Collective,
        ranks: int,
        report: Report,
    ) -> None:
        self.carrier, self.team, self.options = carrier, team, options
        self.collective, self.ranks, self.report = collective, ranks, report
        self.repetition = 0

    def run(self, kind: str, op: str, root: int) -> None:
        """Warm up and measure every size, `run_cycles` times."""
        options, item = self.options, TYPES[kind]
        self.team.barrier()
        size = options.minbytes
        while size <= options.maxbytes:
            shape = self.collective.shape(size // item, item, self.ranks)
            start = self.carrier.start(self.collective, shape, kind, op, root, False)
            self._calls(start.run, 0, options.warmup_iters, 1)
            self.carrier.wait()
            size = max(size, 1) * 2
        cycle = 0
        while options.run_cycles == 0 or cycle < options.run_cycles:
            cycle += 1
            for size in options.sizes():
                shape = self.collective.shape(size // item, item, self.ranks)
                self.report.row(max(shape.send, shape.receive) * item, shape.count, kind, op, root)
                for in_place in (False, True):
                    self.report.side(self._measure(shape, kind, op, root, in_place), in_place)

    def _calls(
        self, start: Callable[[int, int, int], None], first: int, count: int, together: int
    ) -> None:
        """Start `count` calls; -z waits after each that is launched."""
        if not self.options.blocking:
            start(first, count, together)
            return
        for number in range(first, first + count, together):
            start(number, min(together, first + count - number), together)
            self.carrier.wait()
            if self.options.blocking == 1:
                self.team.barrier()

    def _measure(self, shape: Shape, kind: str, op: str, root: int, in_place: bool) -> Side:
        o, carrier, team = self.options, self.carrier, self.team
        start = carrier.start(self.collective, shape, kind, op, root, in_place)
        if o.check:
            carrier.fill(self.collective, shape, kind, op, root, in_place, 0)
        calls = o.iters * o.agg_iters
        if o.cudagraph or o.blocking or o.per_iter_timing:
            cpu, seconds = self._single(start)
        else:
            team.barrier()
            cpu, seconds = start.timed(calls, o.agg_iters)
        cpu, seconds = cpu / calls, seconds / (calls * max(o.cudagraph, 1))
        seconds = team.average(seconds, o.average)
        item = TYPES[kind]
        algbw, busbw = self.collective.bandwidth(shape.count, item, self.ranks, seconds)
        times: list[float] = []
        if o.per_iter_timing:
            threads = team.gather([t / o.agg_iters for t in carrier.between()])
            times = [max(each) for each in zip(*threads, strict=True)]
        wrong = self._check(start, shape, kind, op, root, in_place)
        shown = cpu if o.report_cputime else seconds
        return Side(shown, algbw, busbw, wrong, tuple(times))

    def _single(self, start: Ready) -> tuple[float, float]:
        """As `Ready.timed`, for -G, -z and -I, which do something between or around iterations."""
        o, carrier, team = self.options, self.carrier, self.team
        self._calls(start.run, 0, 1, 1)
        carrier.wait()
        team.barrier()

        def iterations(first: int, count: int) -> None:
            if o.per_iter_timing:
                carrier.mark()
            self._calls(start.run, first * o.agg_iters, count * o.agg_iters, o.agg_iters)
            if o.per_iter_timing:
                carrier.mark()

        only = 0.0
        if o.cudagraph:
            launch = carrier.capture(lambda: iterations(0, o.iters))
            team.barrier()
            begin = time.perf_counter()
            for _ in range(o.cudagraph):
                launch()
        elif o.blocking == 3 or o.per_iter_timing:
            begin = time.perf_counter()
            for number in range(o.iters):
                before = time.perf_counter()
                iterations(number, 1)
                if o.blocking == 3:
                    carrier.wait()
                    only += time.perf_counter() - before
                    team.barrier()
        else:
            begin = time.perf_counter()
            iterations(0, o.iters)
        started = only or time.perf_counter() - begin
        carrier.wait()
        return started, only or time.perf_counter() - begin

    def _check(
        self,
        start: Ready,
        shape: Shape,
        kind: str,
        op: str,
        root: int,
        in_place: bool,
    ) -> int | None:
        o, carrier = self.options, self.carrier
        if not o.check or (in_place and not self.collective.checked_in_place):
            return None
        total = 0
        for _ in range(o.check):
            self.repetition += 1
            what = (self.collective, shape, kind, op, root, in_place, self.repetition)
            carrier.fill(*what)
            self.team.barrier()
            if o.cudagraph:
                carrier.capture(lambda: start.run(0, 1, 1))()
            else:
                start.run(0, 1, 1)
            carrier.wait()
            total = sum(self.team.gather(carrier.wrong(*what)))
            if total:
                break
        return total
