"""Evener's own all-reduce, by algorithm, beside the library's rows (`--algo flat,2d,2d+bf16`).

`ALGORITHM` or `ALGORITHM+WIRE`, as `evener.comm` has them. What is timed is a step of the reducer
that training uses, one gradient of the size: hand in, reduce, hand out, each step by itself and
with fresh values (the library's calls follow one another, which favours them when small). A wire
that keeps less than the gradients' values is not checked here, and its row says N/A. Bandwidths
count the gradient's bytes, not what was sent, so that rows compare: less sent shows as a higher
figure.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from evener.errors import UsageError
from evener.tools.bench.collectives.options import TYPES, Options
from evener.tools.bench.collectives.output import Report, number
from evener.tools.bench.collectives.shapes import ALL, Collective
from evener.tools.bench.collectives.team import Processes

if TYPE_CHECKING:
    import torch

_KINDS = ("float", "half", "bfloat16", "double")


def names() -> tuple[list[str], list[str]]:
    """(algorithms, wires) of `evener.comm`."""
    from evener.comm import forms
    from evener.comm.world.topology import Algorithm

    kinds = [name for name in get_args(Algorithm) if name != "auto"]
    return kinds, list(forms.names())


def parse(text: str) -> tuple[str, str]:
    """(algorithm, wire) of `2d+bf16`. Raises UsageError with what there is."""
    algorithm, _, wire = text.partition("+")
    kinds, wires = names()
    if algorithm not in kinds or (wire or "exact") not in wires:
        raise UsageError(
            f"--algo {text}: evener.comm has no such algorithm",
            f"take {' or '.join(kinds)}, alone or with +{', +'.join(wires)}",
        )
    return algorithm, wire or "exact"


def check(options: Options, collective: Collective, device: str, per_process: int) -> None:
    """Refuse --algo where it cannot be measured. Raises UsageError."""
    for text in options.algo:
        parse(text)
    if not options.algo:
        return
    if collective.name != "all_reduce":
        raise UsageError(
            f"--algo {','.join(options.algo)}: evener.comm reduces gradients, it has no "
            f"{collective.name}",
            "use it with all_reduce",
        )
    if options.op not in ("sum", "avg"):
        raise UsageError(f"--algo with -o {options.op}", "evener.comm has -o sum and avg")
    if options.datatype not in _KINDS:
        raise UsageError(
            f"--algo with -d {options.datatype}: gradients are {', '.join(_KINDS)}",
            "take one of them",
        )
    if device == "cuda" and per_process > 1:
        raise UsageError(
            f"--algo with {per_process} GPUs in one process: evener.comm has one rank per process",
            "start one process per GPU: torchrun --nproc-per-node=4 -m evener bench all_reduce ...",
        )


def run(options: Options, processes: Processes, report: Report, device: torch.device) -> None:
    """Measure every algorithm at every size and put the rows under the library's table."""
    if processes.size == 1:
        raise UsageError("--algo on one rank: there is nothing to reduce", "start 2 ranks or more")
    report.put("#\n# Evener's own algorithms (evener.comm), in place")
    report.put(
        f"# {'size':>10}  {'algorithm':>12}  {'time':>7}  {'algbw':>6}  {'busbw':>6}  "
        f"{'#wrong':>6}  {'vs library':>10}"
    )
    library = {row["size"]: row["in_place"] for row in report.results if "in_place" in row}
    for text in options.algo:
        for size in options.sizes():
            row = _measure(text, size, options, processes, device)
            base = library.get(row["size"], {}).get("bus_bw")
            row["vs_library"] = row["bus_bw"] / base if base else None
            report.failures += bool(row["nwrong"])
            report.algorithms.append(row)
            wrong = "N/A" if row["nwrong"] is None else f"{row['nwrong']:g}"
            gain = "" if row["vs_library"] is None else f"{row['vs_library']:.2f}x"
            report.put(
                f"# {row['size']:>10}  {text:>12}  {number(row['time'], 7)}  "
                f"{number(row['alg_bw'], 6)}  {number(row['bus_bw'], 6)}  {wrong:>6}  {gain:>10}"
            )
        # What it came down to: a wire is used only where something crosses a network.
        last = report.algorithms[-1]
        report.put(f"#   {text} at {last['size']}: {last['detail']}")
        if last["wire"] != parse(text)[1]:
            report.put(f"#   {text} was sent as {last['wire']}: no other form is of use here")


def _measure(
    text: str, size: int, options: Options, processes: Processes, device: torch.device
) -> dict[str, Any]:
    """One algorithm at one size: a reducer of one gradient, warmed up and stepped."""
    import torch

    from evener.comm.options import Options as CommOptions
    from evener.comm.reducer import Reducer
    from evener.tools.bench.collectives.values import DTYPES, fill, reduced, wrong

    algorithm, wire = parse(text)
    kind, ranks = options.datatype, processes.size
    item = TYPES[kind]
    count = max(size // item, 1)
    # A matrix: comm sends gradients of norms and biases, which have one dimension, exactly.
    parameter = torch.nn.Parameter(torch.zeros(1, count, dtype=DTYPES[kind], device=device))
    # `parse` has checked both against what comm allows.
    chosen: dict[str, Any] = {"algorithm": algorithm, "wire": wire, "bucket_bytes": 0}
    chosen["topk_min_bytes"] = 0  # a row is the wire that it is called
    chosen["average"] = options.op == "avg"
    reducer = Reducer([("gradient", parameter)], replace(CommOptions.resolve(), **chosen))
    try:
        parameter.grad = torch.zeros_like(parameter)
        # Normal deviates, as gradients nearly are: what selects or quantises depends on values.
        generator = torch.Generator(device).manual_seed(processes.rank)
        fresh = torch.randn(1, count, device=device, generator=generator).to(parameter.dtype)

        def step() -> None:
            reducer.flush()
            reducer.apply()
            _wait(device)

        total = 0.0
        # The first step of a reducer only measures; scratch memory comes with the second.
        for number in range(-2 - options.warmup_iters, options.iters):
            parameter.grad.copy_(fresh)
            _wait(device)
            processes.barrier()
            begin = time.perf_counter()
            step()
            total += time.perf_counter() - begin if number >= 0 else 0.0
        seconds = sum(processes.gather(total / options.iters)) / ranks
        bad = None
        from evener.comm import wires

        if options.check and not wires.get(wire).lossy:
            # The average of whole numbers need not be one: sums are what is compared.
            op = "sum" if options.op == "sum" else "avg"
            gradient = parameter.grad.view(-1)
            fill(gradient, _mine(kind, op, processes))
            step()
            near = 0.0 if op == "sum" else 0.01
            bad = sum(processes.gather(wrong(gradient, reduced(kind, op, ranks, 1), near)))
        detail = reducer.describe()
    finally:
        reducer.close()
    algbw, busbw = ALL["all_reduce"].bandwidth(count, item, ranks, seconds)
    return {
        "algorithm": text,
        "size": count * item,
        "time": seconds * 1e6,
        "alg_bw": algbw,
        "bus_bw": busbw,
        "nwrong": bad,
        "wire": detail.rpartition("1 ")[2],  # of the one bucket
        "detail": detail,
    }


def _mine(kind: str, op: str, processes: Processes) -> torch.Tensor:
    from evener.tools.bench.collectives.values import contribution

    return contribution(kind, op, processes.rank, processes.size, 1)


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
