"""The commands `evener bench all_reduce`, ..., `evener bench hypercube`: nccl-tests' options."""

from __future__ import annotations

import sys
from typing import Any

import click

from evener.base.click import require
from evener.errors import UsageError
from evener.tools.bench.collectives.names import NAMES
from evener.tools.bench.collectives.options import OPERATIONS, TYPES, Options, size

_CHOICE = click.IntRange(0, 1)
_REFUSED = {
    ("-D", "--device_implementation"): "kernels of nccl-tests' own on NCCL's device interface",
    ("-V", "--device_cta_count"): "it belongs to -D",
    ("-x", "--cta_policy"): "it is an argument of communicators; NCCL_CTA_POLICY sets it too",
}


def _refuse(_: click.Context, option: click.Parameter, value: str | None) -> None:
    """An option of nccl-tests that is known and not there: said, never ignored."""
    if value is not None:
        names = (option.opts[0], option.opts[1])
        raise UsageError(f"{names[0]} is not there: {_REFUSED[names]}", f"leave {names[0]} out")


_OPTIONS = (
    click.option("-t", "--nthreads", type=click.IntRange(min=1), default=1, help="Threads."),
    click.option("-g", "--ngpus", type=click.IntRange(min=1), default=1, help="GPUs a thread."),
    click.option("-b", "--minbytes", default="32M", help="Smallest size."),
    click.option("-e", "--maxbytes", default="32M", help="Largest size."),
    click.option("-i", "--stepbytes", default="1M", help="Step, where -f is not given."),
    click.option(
        "-f", "--stepfactor", type=int, default=0, help="Factor between sizes, 2 or more."
    ),
    click.option("-n", "--iters", type=click.IntRange(min=1), default=20, help="Iterations."),
    click.option("-w", "--warmup_iters", "--warmup-iters", type=click.IntRange(min=0), default=1),
    click.option(
        "-m",
        "--agg_iters",
        "--agg-iters",
        type=click.IntRange(min=1),
        default=1,
        help="Calls launched together in an iteration.",
    ),
    click.option(
        "-N",
        "--run_cycles",
        "--run-cycles",
        type=click.IntRange(min=0),
        default=1,
        help="Cycles over all sizes; 0 for ever.",
    ),
    click.option(
        "-p",
        "--parallel_init",
        "--parallel-init",
        type=_CHOICE,
        default=0,
        help="Threads (-t) make their communicators side by side.",
    ),
    click.option("-c", "--check", type=click.IntRange(min=0), default=1, help="Checks a size."),
    click.option("-o", "--op", type=click.Choice((*OPERATIONS, "all")), default="sum"),
    click.option("-d", "--datatype", type=click.Choice((*TYPES, "all")), default="float"),
    click.option("-r", "--root", type=int, default=0, help="Root; -1 for all in turn."),
    click.option(
        "-z",
        "--blocking",
        type=click.IntRange(0, 3),
        default=0,
        help="1 wait and barrier after each call, 2 wait only, 3 after each iteration.",
    ),
    click.option("-y", "--stream_null", "--stream-null", type=_CHOICE, default=0),
    click.option("-T", "--timeout", type=click.IntRange(min=0), default=0, help="Seconds; 0 none."),
    click.option(
        "-G", "--cudagraph", type=click.IntRange(min=0), default=0, help="Launches of a CUDA graph."
    ),
    click.option("-C", "--report_cputime", "--report-cputime", type=_CHOICE, default=0),
    click.option("-S", "--report_timestamps", "--report-timestamps", type=_CHOICE, default=0),
    click.option("-J", "--output_file", "--output-file", default="", help="Write JSON here."),
    click.option(
        "-a",
        "--average",
        type=click.IntRange(0, 3),
        default=1,
        help="Time of 0 rank 0, 1 mean, 2 least, 3 largest.",
    ),
    click.option(
        "-R",
        "--local_register",
        "--local-register",
        type=click.IntRange(0, 2),
        default=0,
        help="Register buffers: 1 local, 2 symmetric windows (NCCL 2.27).",
    ),
    click.option(
        "-u", "--unalign", type=click.IntRange(0, 15), default=0, help="First element of buffers."
    ),
    click.option(
        "-I",
        "--per_iter_timing",
        "--per-iter-timing",
        type=_CHOICE,
        default=0,
        help="Time each iteration by events: least, most, 99th of 100, variation.",
    ),
    click.option(
        "-K",
        "--per_iter_skip",
        "--per-iter-skip",
        type=click.IntRange(min=0),
        default=0,
        help="Leave the first of -I's iterations out of its figures.",
    ),
    click.option("-M", "--memory", type=_CHOICE, default=0, help="Report GPU memory."),
    click.option("--device", type=click.Choice(("auto", "cuda", "cpu")), default="auto"),
    click.option(
        "--algo",
        default="",
        metavar="NAME,...",
        help="Also time Evener's own all-reduce: flat, 2d, each with a wire: 2d+bf16.",
    ),
    click.option(
        "--sweep",
        multiple=True,
        metavar="NAME=VALUE,...",
        help="Run once for each combination of these variables' values, say which is best and "
        "why; `default` tries what helps most often. Repeatable.",
    ),
    click.option(
        "--through",
        default="",
        metavar="COMMAND",
        help="Starts each run of a sweep: 'evener launch -np 4 -H a:2,b:2'.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(min=1),
        help="Rounds of a sweep (2): between two, chance shows.",
    ),
    *(
        click.option(*names, hidden=True, expose_value=False, callback=_refuse)
        for names in _REFUSED
    ),
)


def _command(name: str) -> click.Command:
    def call(**given: Any) -> None:
        require("torch")
        from evener.tools.bench.collectives.run import run

        sweep, through, rounds = (given.pop(one) for one in ("sweep", "through", "rounds"))
        if sweep:
            from evener.tools.bench.collectives.sweep import run_sweep

            run_sweep(name, sweep, through, rounds or 2, sys.argv[1:], given["output_file"])
            return
        if through or rounds:
            flag = "--through" if through else "--rounds"
            raise UsageError(f"{flag} is for --sweep, which was not given", f"leave {flag} out")
        given["algo"] = tuple(filter(None, given["algo"].split(",")))
        for option, flag in (("minbytes", "-b"), ("maxbytes", "-e"), ("stepbytes", "-i")):
            given[option] = size(given[option], flag)
        sys.exit(0 if run(name, Options(**given), sys.argv[1:]) else 1)

    call.__doc__ = f"""Time {name} by size, as nccl-tests' {name}_perf does.

    Its options, defaults, table and JSON, with NCCL where there is a GPU and with Gloo on the CPU.
    Start it alone (-g GPUs, or as many CPU ranks), or once a rank with torchrun, mpirun or
    `evener launch`. Sizes take K, M, G (powers of 1024). An argument that nccl-tests would replace
    in silence is refused. Exit status 1: wrong results, or under 0.9 x NCCL_TESTS_MIN_BW.

    \b
    Example:
      evener bench {name} -b 8 -e 128M -f 2 -g 1
    """
    for option in reversed(_OPTIONS):
        call = option(call)
    return click.command(name)(call)


globals().update({name: _command(name) for name in NAMES})
