"""What may be asked for. Where nccl-tests silently takes something else, this refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from evener.base.units import parse_size
from evener.errors import UsageError
from evener.tools.bench.collectives.shapes import Collective

TYPES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
    "bfloat16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
}
OPERATIONS = ("sum", "prod", "max", "min", "avg", "mulsum")
GLOO_TYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
GLOO_OPERATIONS = ("sum", "prod", "max", "min")


@dataclass(frozen=True, slots=True)
class Options:
    """nccl-tests' options by their long names; sizes in bytes."""

    nthreads: int = 1
    ngpus: int = 1
    minbytes: int = 32 << 20
    maxbytes: int = 32 << 20
    stepbytes: int = 1 << 20
    stepfactor: int = 0
    """0: steps of `stepbytes`."""
    iters: int = 20
    warmup_iters: int = 1
    agg_iters: int = 1
    run_cycles: int = 1
    parallel_init: int = 0
    check: int = 1
    op: str = "sum"
    datatype: str = "float"
    root: int = 0
    blocking: int = 0
    stream_null: int = 0
    timeout: int = 0
    cudagraph: int = 0
    report_cputime: int = 0
    report_timestamps: int = 0
    output_file: str = ""
    average: int = 1
    local_register: int = 0
    unalign: int = 0
    memory: int = 0
    per_iter_timing: int = 0
    per_iter_skip: int = 0
    algo: tuple[str, ...] = ()
    """Evener's own algorithms to measure beside the library's: see `algorithms`."""
    device: str = "auto"

    def sizes(self) -> Iterator[int]:
        """Sizes in bytes, smallest first."""
        size = self.minbytes
        while size <= self.maxbytes:
            yield size
            size = size * self.stepfactor if self.stepfactor else size + self.stepbytes

    def types(self, device: str) -> list[str]:
        """Types to run, in nccl-tests' order."""
        known = list(TYPES) if device == "cuda" else list(GLOO_TYPES)
        return known if self.datatype == "all" else [self.datatype]

    def operations(self, collective: Collective, device: str) -> list[str]:
        """Reductions to run; `none` for collectives that do not reduce."""
        if collective.name == "sendrecv":
            return ["sum"]  # as nccl-tests prints it
        if not collective.reduces:
            return ["none"]
        known = list(OPERATIONS) if device == "cuda" else list(GLOO_OPERATIONS)
        return known if self.op == "all" else [self.op]

    def roots(self, collective: Collective, ranks: int) -> list[int]:
        """Roots to run; -1 for collectives that have none."""
        if not collective.rooted:
            return [-1]
        return list(range(ranks)) if self.root == -1 else [self.root]


def size(text: str, option: str) -> int:
    """Bytes of `8`, `128M`, `1.5G`. Raises UsageError that names the option."""
    try:
        value = parse_size(text)
    except (ValueError, OverflowError):
        value = -1
    if value < 0:
        raise UsageError(f"{option} {text!r} is no size", "write bytes, or a number with K, M or G")
    return value


def check(options: Options, collective: Collective, device: str, ranks: int) -> None:
    """Refuse what cannot run as asked. Raises UsageError with the option and its value."""

    def refuse(problem: str, fix: str) -> None:
        raise UsageError(problem, fix)

    o = options
    if o.minbytes > o.maxbytes:
        refuse(f"-b {o.minbytes} is above -e {o.maxbytes}", "give a -e of at least -b")
    if o.stepfactor in (1,) or o.stepfactor < 0:
        refuse(f"-f {o.stepfactor} would never end", "give 2 or more, or -i for equal steps")
    if not o.stepfactor and not o.stepbytes:
        refuse("-i 0 would never end", "give -i bytes, or -f 2")
    if o.stepfactor and not o.minbytes:
        refuse("-b 0 with -f would never end", "start at -b 8, or use -i")
    if o.root < -1 or o.root >= ranks:
        refuse(f"-r {o.root}: there are ranks 0 to {ranks - 1}", "name one of them, or -1 for all")
    if collective.name == "hypercube" and ranks & (ranks - 1):
        refuse(f"hypercube needs a power of two, not {ranks} ranks", "start 2, 4, 8, ... ranks")
    if o.blocking and o.cudagraph:
        refuse(f"-z {o.blocking} cannot wait inside a graph (-G)", "leave one of them out")
    if o.stream_null and o.cudagraph:
        refuse("-y 1: CUDA captures no graph (-G) on the null stream", "leave one of them out")
    if o.per_iter_timing and o.cudagraph:
        refuse("-I 1 cannot time iterations inside a graph (-G)", "leave one of them out")
    if o.per_iter_skip and not o.per_iter_timing:
        refuse(f"-K {o.per_iter_skip} leaves out samples of -I, which is off", "give -I 1 too")
    if o.per_iter_skip >= o.iters:
        refuse(f"-K {o.per_iter_skip} leaves none of {o.iters} iterations", "give less than -n")
    if device == "cpu":
        if o.cudagraph:
            refuse(f"-G {o.cudagraph}: there are no CUDA graphs on the CPU", "leave -G out")
        for flag, value, why in (
            ("-R", o.local_register, "is for GPUs"),
            ("-y", o.stream_null, "there are no streams on the CPU"),
            ("-M", o.memory, "tells the memory of GPUs"),
            ("-p", o.parallel_init, "on the CPU every rank is a process, and starts by itself"),
            ("-T", o.timeout, "Gloo has a limit of its own: EVENER_TIMEOUT"),
        ):
            if value:
                refuse(f"{flag} {value}: {why}", f"leave {flag} out")
        if o.datatype not in (*GLOO_TYPES, "all"):
            refuse(f"-d {o.datatype}: Gloo has {', '.join(GLOO_TYPES)}", "take one of them")
        if collective.reduces and o.op not in (*GLOO_OPERATIONS, "all"):
            refuse(f"-o {o.op}: Gloo has {', '.join(GLOO_OPERATIONS)}", "take one of them")


def environment(env: Mapping[str, str]) -> tuple[int, float | None]:
    """(NCCL_TESTS_DEVICE, NCCL_TESTS_MIN_BW); refuses what it would have to ignore."""
    if env.get("NCCL_TESTS_SPLIT") or env.get("NCCL_TESTS_SPLIT_MASK"):
        raise UsageError(
            "NCCL_TESTS_SPLIT is set, and evener bench does not split communicators",
            "unset it, or start one job a group",
        )
    first, least = env.get("NCCL_TESTS_DEVICE", "").strip(), env.get("NCCL_TESTS_MIN_BW", "")
    try:
        return int(first or 0), float(least) if least.strip() else None
    except ValueError:
        raise UsageError(
            f"NCCL_TESTS_DEVICE={first!r} or NCCL_TESTS_MIN_BW={least!r} is no number",
            "set a number or unset it",
        ) from None
