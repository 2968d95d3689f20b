"""`evener bench net`: options in, a table and JSON out."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click

from evener.base import settings
from evener.base.settings import SettingError
from evener.errors import UsageError
from evener.net import plugin_path
from evener.tools.bench import busy
from evener.tools.bench.net import drive
from evener.tools.bench.net.drive import Job, Rows
from evener.tools.lab import Lab, Spec

_SIZES = {"steady": "8,65536,1048576", "ring": "1048576,67108864"}


def _show_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            break
        size /= 1024
    return f"{size:g} {unit}"


def _streams_name(count: int) -> str:
    return "streams" if count == 1 else f"streams x {count}"


@click.command()
@click.option(
    "--lab",
    "lab_spec",
    metavar="SPEC",
    help="Between two simulated nodes: 2x1@2gbit,paths=4 (see evener lab). Default: loopback.",
)
@click.option(
    "--pattern",
    type=click.Choice(["steady", "ring"]),
    default="steady",
    show_default=True,
    help="Messages of one size without end, or all-reduces as NCCL's ring of two ranks does them.",
)
@click.option(
    "--sizes",
    help="Bytes of a message (NCCL's rings send 1 MiB) or of an all-reduce, separated by commas.  "
    "[default: 8,65536,1048576; of a ring 1048576,67108864]",
)
@click.option("--comms", type=click.IntRange(1, 64), default=2, show_default=True, help="Each way.")
@click.option(
    "--depth", type=click.IntRange(1, 32), default=4, show_default=True, help="Messages in flight."
)
@click.option(
    "--streams",
    default="1",
    show_default=True,
    help="TCP streams per communicator and direction, to compare with; several numbers: one row "
    "each. One is moved by the progress thread, as NCCL does by default. Several have a thread "
    "each at both ends and no protocol: what the host can carry.",
)
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True)
@click.option(
    "--repeats",
    type=click.IntRange(1, 99),
    default=1,
    show_default=True,
    help="How often each transport is measured, in turns; the medians count.",
)
@click.option(
    "--plugin",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Another NCCL net plug-in (interface version 11). Default: Evener's.",
)
@click.option(
    "--engine",
    "engines",
    help=f"What carries Evener's bytes: {settings.EVENER_NET_ENGINE.allowed}; several, separated "
    "by commas: one row each. Default: EVENER_NET_ENGINE.",
)
@click.option("--verify", is_flag=True, help="Compare every byte that arrives.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all figures.")
def net(
    lab_spec: str | None,
    pattern: str,
    sizes: str | None,
    comms: int,
    depth: int,
    streams: str,
    seconds: float,
    repeats: int,
    plugin: Path | None,
    engines: str | None,
    verify: bool,
    json_path: Path | None,
) -> None:
    """Plain TCP streams, one a communicator as NCCL does by default, against Evener.

    Two processes drive the plug-in as NCCL's threads would, both directions at once, without a GPU.
    A steady run has --depth messages in flight on each comm; its fairness is Jain's index of what
    the comms had got when the first of them had all. A ring does what NCCL's does: a comm
    each way is a channel, whose chunks wait for the peer's; the GPU's part is a clock.
    """
    settings.check_net()
    sizes = sizes or _SIZES[pattern]
    if not all(one.strip().isdecimal() and int(one) > 0 for one in sizes.split(",")):
        raise UsageError(
            f"--sizes {sizes!r} is not a list of byte counts", "like --sizes 8,1048576"
        )
    counts = [one.strip() for one in streams.split(",")]
    if not all(one.isdecimal() and 1 <= int(one) <= 64 for one in counts):
        raise UsageError(f"--streams {streams!r} is not a list of 1 to 64", "like --streams 1,4")
    asked = [""] if engines is None else [one.strip() for one in engines.split(",")]
    for one in asked:
        try:
            settings.EVENER_NET_ENGINE.get({"EVENER_NET_ENGINE": one})
        except SettingError:
            allowed = settings.EVENER_NET_ENGINE.allowed
            raise UsageError(
                f"--engine {one!r} is not {allowed}", "like --engine tcp,udp"
            ) from None
    count = len(sizes.split(","))
    timeout = 60 + count * (10 + 8 * seconds)
    path = plugin or plugin_path()
    base = Job("", comms, depth, sizes, seconds, verify, pattern)
    jobs = {_streams_name(int(one)): dataclasses.replace(base, streams=int(one)) for one in counts}
    for engine in asked:
        name = f"{path.stem} {engine}".rstrip()
        jobs[name] = dataclasses.replace(base, plugin=str(path), engine=engine)
    spec = Spec.parse(lab_spec) if lab_spec else None
    if spec is not None and spec.world_size != 2:
        raise UsageError(f"--lab {lab_spec} has {spec.world_size} slots", "two: 2x1@...")
    taken: dict[str, list[Rows]] = {name: [] for name in jobs}
    seen = []
    for repeat in range(repeats):
        for name, job in jobs.items():
            which = f" ({repeat + 1} of {repeats})" if repeats > 1 else ""
            click.echo(f"measuring {name}{which} ...", err=True)
            seen.append(busy.others())
            if spec is None:
                taken[name].append(drive.local(job, timeout))
            else:
                with Lab(spec) as lab:
                    taken[name].append(drive.in_lab(lab, job, timeout))
    results = {name: drive.medians(samples) for name, samples in taken.items()}
    _print(results, pattern, repeats)
    if said := busy.warning(seen, len(os.sched_getaffinity(0))):
        click.echo(f"note: {said}")
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "lab": str(spec) if spec else None,
            "job": base.text(),
            "repeats": repeats,
            "others": seen,
            "results": results,
        }
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        click.echo(str(json_path))


def _print(results: dict[str, Rows], pattern: str, repeats: int) -> None:
    from rich.console import Console
    from rich.table import Table

    ring = pattern == "ring"
    table = Table("all-reduce" if ring else "message", "transport")
    rate, time = ("GB/s", "ms") if ring else ("Gb/s each way", "us")
    spread = ["least to most"] if repeats > 1 else []
    for name in (
        rate,
        *spread,
        "ratio",
        time,
        "cpu s/GB",
        "stall ms",
        *([] if ring else ["fairness"]),
    ):
        table.add_column(name, justify="right")
    names, scale = list(results), (1 if ring else 8) / 1e9
    for place, first in enumerate(results[names[0]]):
        for name in names:
            row = results[name][place]
            table.add_row(
                _show_size(row["size"]) if name == names[0] else "",
                name,
                f"{row['bandwidth'] * scale:.2f}",
                *([f"{row['least'] * scale:.2f} to {row['most'] * scale:.2f}"] if spread else []),
                f"{row['bandwidth'] / first['bandwidth']:.2f}",
                f"{row['latency_us'] / 1e3:.2f}" if ring else f"{row['latency_us']:.0f}",
                f"{row['cpu_per_gb']:.2f}",
                f"{row['stall'] * 1e3:.0f}",
                *([] if ring else [f"{row['fairness']:.2f}"]),
                end_section=name == names[-1],
            )
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
