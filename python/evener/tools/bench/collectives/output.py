"""nccl-tests' table, character for character, and its JSON.

The environment goes into the JSON only as far as it concerns the run: upstream writes all of it,
tokens and passwords included.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TextIO

from evener import __version__
from evener.errors import UsageError
from evener.tools.bench.collectives.options import Options

_KEPT = (
    "NCCL_",
    "EVENER_",
    "LIGHT_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_",
)


def number(value: float, width: int) -> str:
    """The most decimals out of two, one and none that fit, else an exponent."""
    for digits in (2, 1, 0):
        text = f"{value:{width}.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


@dataclass
class Device:
    """One rank in the head of the table."""

    rank: int
    host: str
    pid: int
    device: int
    bus: str
    name: str

    def line(self) -> str:
        return (
            f"#  Rank {self.rank:2d} Group  0 Pid {self.pid:6d} on {self.host:>10} device "
            f"{self.device:2d} [{self.bus}] {self.name}"
        )


@dataclass
class Side:
    """One measurement. `wrong` None: not checked."""

    seconds: float
    algbw: float
    busbw: float
    wrong: int | None
    iterations: tuple[float, ...] = ()
    """Seconds of each iteration (-I)."""

    def text(self) -> str:
        wrong = "N/A" if self.wrong is None else f"{float(self.wrong):6g}"
        return (
            f"  {number(self.seconds * 1e6, 7):>7}  {number(self.algbw, 6):>6}  "
            f"{number(self.busbw, 6):>6}  {wrong:>6}"
        )


@dataclass(frozen=True)
class Iterations:
    """What -I says of the single iterations, microseconds. `cv_pct`: deviation in % of the mean."""

    skipped_iterations: int
    min_us: float
    max_us: float
    avg_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    stdev_us: float
    cv_pct: float

    @classmethod
    def of(cls, seconds: tuple[float, ...], skip: int) -> Iterations:
        """The figures over all but the first `skip`. Percentiles by the nearest rank."""
        times = sorted(t * 1e6 for t in seconds[skip:])

        def part(share: int) -> float:
            return times[max(0, -(-share * len(times) // 100) - 1)]

        mean, deviation = fmean(times), pstdev(times)
        return cls(
            skip, times[0], times[-1], mean, part(50), part(95), part(99), deviation,
            deviation / mean * 100 if mean else 0.0,
        )  # fmt: skip

    def text(self) -> str:
        shown = (self.min_us, self.max_us, self.p99_us, self.cv_pct)
        return "".join(f"  {number(value, 7):>7}" for value in shown)


@dataclass
class Report:
    """Writes as it goes; only the main thread of process 0 has one that writes."""

    options: Options
    collective: str
    version: int
    writes: bool
    arguments: list[str]
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    results: list[dict[str, Any]] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    started: str = field(default_factory=lambda: _now())
    bandwidths: list[float] = field(default_factory=list)
    failures: int = 0
    algorithms: list[dict[str, Any]] = field(default_factory=list)
    """--algo: a row an algorithm and size."""
    functions: list[str] = field(default_factory=list)
    """NCCL's, of which the collective is made here: one of its own, or ncclSend and ncclRecv."""
    memory: dict[str, int] = field(default_factory=dict)
    """-M: bytes on the GPU that uses most, by what they are for."""

    def put(self, text: str, end: str = "\n") -> None:
        """Text to the table, at once: each number is seen when it is measured."""
        if self.writes:
            self.stream.write(text + end)
            self.stream.flush()

    def head(self, devices: list[Device]) -> None:
        o = self.options
        self.devices = devices
        step = f"{o.stepfactor}(factor)" if o.stepfactor else f"{o.stepbytes}(bytes)"
        made = f" functions={','.join(self.functions)}" if self.functions else ""
        self.put(f"# evener {__version__} nccl-library={self.version}{made}")
        self.put(f"# Collective test starting: {self.collective}_perf")
        self.put(
            f"# nThread {o.nthreads} nGpus {o.ngpus} minBytes {o.minbytes} maxBytes {o.maxbytes} "
            f"step: {step} warmup iters: {o.warmup_iters} iters: {o.iters} agg iters: "
            f"{o.agg_iters} validation: {o.check} graph: {o.cudagraph} unalign: {o.unalign}"
        )
        self.put("#")
        self.put("# Using devices")
        for device in devices:
            self.put(device.line())
        self.put("#")
        stamp = f" {'':>20}" if o.report_timestamps else ""
        left = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}"
        self.put(f"{left}           out-of-place                       in-place          ")
        each = "".join(f"  {word:>7}" for word in ("min", "max", "p99", "cv"))
        side = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
        side += each if o.per_iter_timing else ""
        self.put(
            f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}{side}{side}"
            + (f" {'timestamp':>20}" if stamp else "")
        )
        side = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
        each = "".join(f"  {word:>7}" for word in ("(us)", "(us)", "(us)", "(%)"))
        side += each if o.per_iter_timing else ""
        self.put(f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}{side}{side}{stamp}")

    def row(self, size: int, count: int, kind: str, op: str, root: int) -> None:
        self.put(f"{size:12d}  {count:12d}  {kind:>8}  {op:>6}  {root:6d}", end="")
        self.results.append(
            {"size": size, "count": count, "type": kind, "redop": op, "root": str(root)}
        )

    def side(self, side: Side, in_place: bool) -> None:
        self.put(side.text(), end="")
        self.bandwidths.append(side.busbw)
        self.failures += bool(side.wrong)
        time = "cpu_time" if self.options.report_cputime else "time"
        self.results[-1]["in_place" if in_place else "out_of_place"] = {
            time: side.seconds * 1e6,
            "alg_bw": side.algbw,
            "bus_bw": side.busbw,
            "nwrong": None if side.wrong is None else float(side.wrong),
        }
        if side.iterations:
            figures = Iterations.of(side.iterations, self.options.per_iter_skip)
            self.put(figures.text(), end="")
            self.results[-1][f"{'in_place' if in_place else 'out_of_place'}_per_iter"] = {
                **asdict(figures),
                "times_us": [t * 1e6 for t in side.iterations],
            }
        if in_place:
            self.put(f"  {_now():>19}" if self.options.report_timestamps else "")

    @property
    def mean(self) -> float:
        """Mean of all bus bandwidths, GB/s."""
        return sum(self.bandwidths) / len(self.bandwidths) if self.bandwidths else 0.0

    def foot(self, least: float | None) -> bool:
        """The last lines and the JSON; whether the run is good."""
        slow = least is not None and self.mean < 0.9 * least
        verdict = "" if least is None else "FAILED" if slow else "OK"
        state = "FAILED" if self.failures else "OK"
        self.put(f"# {'Out of bounds values':<20} : {self.failures} {state}")
        self.put(f"# {'Avg bus bandwidth':<20} : {self.mean:g} {verdict}")
        if self.memory:
            parts = " | ".join(
                f"{name} {size / 2**20:.1f} MB" for name, size in self.memory.items()
            )
            self.put(f"# {'GPU memory usage':<20} : {parts}")
        self.put("#")
        self.put(f"# Collective test concluded: {self.collective}_perf")
        if self.writes and self.options.output_file:
            self._write(least, slow)
        return not (self.failures or slow)

    def _write(self, least: float | None, slow: bool) -> None:
        o = self.options
        document = {
            "version": 3,
            "start_time": self.started,
            "args": [f"{self.collective}_perf", *self.arguments],
            "env": sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_KEPT)),
            "nccl_version": self.version,
            "evener_version": __version__,
            **({"nccl_functions": self.functions} if self.functions else {}),
            "config": {
                "nthreads": o.nthreads,
                "ngpus": o.ngpus,
                "minimum_bytes": o.minbytes,
                "maximum_bytes": o.maxbytes,
                "step_bytes": o.stepbytes,
                "step_factor": o.stepfactor,
                "warmup_iters": o.warmup_iters,
                "iterations": o.iters,
                "aggregated_iterations": o.agg_iters,
                "validation": o.check,
                "graph": o.cudagraph,
                "devices": [
                    {
                        "rank": d.rank,
                        "group": 0,
                        "pid": d.pid,
                        "hostname": d.host,
                        "device": d.device,
                        "device_hex": d.bus,
                        "device_info": d.name,
                    }
                    for d in self.devices
                ],
            },
            "results": self.results,
            **({"algorithms": self.algorithms} if self.algorithms else {}),
            "out_of_bounds": {"count": self.failures, "okay": not self.failures},
            "average_bus_bandwidth": {
                "bandwidth": self.mean,
                "okay": "unchecked" if least is None else not slow,
            },
            **({"gpu_memory": self.memory} if self.memory else {}),
            "errors": [],
            "end_time": _now(),
        }
        try:
            Path(o.output_file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"-J {o.output_file}: {error.strerror}", "name a file that can be written"
            ) from None


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")
