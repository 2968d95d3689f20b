"""`evener plan-memory tables.json`: reads the tables of a recommender, prints where they lie.

The options are in `evener.tools.plan.memory`, the plan itself is in `placement`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from evener.base.budget import Budget, resolve, size
from evener.base.units import has_unit, parse_rate
from evener.embedding import measure
from evener.embedding.options import Options
from evener.embedding.placement import Cluster, Plan, Table, nearest, plan, seconds
from evener.embedding.serve import opened
from evener.embedding.store import forget
from evener.embedding.use import Use, measured, zipf
from evener.errors import UsageError

_USES = ("zipf", "snapshot", "frequencies")
_FIELDS = {
    "name", "num_embeddings", "embedding_dim", "feature_names", "optimizer", "dtype", "ids",
    "steps", "samples", *_USES,
}  # fmt: skip


def holds_tables(path: str) -> Any:
    """The object of a JSON file that has "tables"; None for all else, which is a model."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "tables" in found else None


def tables_of(found: dict[str, Any], folder: Path, samples: int) -> list[Table]:
    """The tables of such an object. Paths in it are relative to `folder`; `samples`: of a step that
    was counted, where a table does not say. Raises UsageError for what cannot be."""
    given = found["tables"]
    if not isinstance(given, list) or not given:
        raise UsageError('"tables" is no list of tables', "give one object per table")
    tables = [_table(each, folder, samples) for each in given]
    if len({table.name for table in tables}) < len(tables):
        raise UsageError("two tables have one name", "give each a name of its own")
    return tables


def _table(given: Any, folder: Path, samples: int) -> Table:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise UsageError(f"table {given!r} has no name", 'give "name"')
    name = given["name"]
    if unknown := sorted(set(given) - _FIELDS):
        raise UsageError(
            f"table {name!r} has {unknown[0]!r}, which is not known",
            f"fields are {', '.join(sorted(_FIELDS))}",
        )
    rows, dim = (_whole(given, field) for field in ("num_embeddings", "embedding_dim"))
    features = given.get("feature_names", [name])
    if not isinstance(features, list):
        raise UsageError(f"table {name!r} has feature_names={features!r}", "give a list of names")
    ids = given.get("ids", 1)
    each = ids if isinstance(ids, list) else [ids] * len(features)
    fine = all(_number(n) and 0 <= n < 1e9 for n in each) and sum(each) > 0
    if len(each) != len(features) or not fine:
        raise UsageError(
            f"table {name!r} has ids={ids!r} for {len(features)} features",
            "give how many ids a sample has, one number or one per feature",
        )
    optimizer = given.get("optimizer")
    kind = {"kind": optimizer} if isinstance(optimizer, str) else optimizer
    more = {"optimizer": kind} if optimizer is not None else {}
    try:
        options = Options.from_dict({"dim": dim, "dtype": given.get("dtype", "f32"), **more})
        measure.row(options)
    except (ValueError, TypeError) as error:
        raise UsageError(f"table {name!r}: {error}", "see evener.embedding.Options") from None
    return Table(
        name, rows, float(sum(each)), options, _use(given, rows, sum(each), folder, samples)
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(given: dict[str, Any], field: str) -> int:
    value = given.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"table {given['name']!r} has {field}={value!r}", "give a whole number")
    return value


def _use(given: dict[str, Any], rows: int, ids: float, folder: Path, samples: int) -> Use:
    """Exactly one of `_USES`."""
    what = f"table {given['name']!r}"
    kinds = [kind for kind in _USES if kind in given]
    if len(kinds) != 1:
        raise UsageError(
            f"{what} has {' and '.join(kinds) or 'nothing'} for how its rows are used",
            f"give one of {', '.join(_USES)}",
        )
    if kinds == ["zipf"]:
        exponent = given["zipf"]
        if not _number(exponent) or not 0 <= exponent <= 10:
            raise UsageError(
                f"{what} has zipf={exponent!r}", "give an exponent, as 1.05; 0: all alike"
            )
        return zipf(rows, exponent)
    if kinds == ["snapshot"]:
        paths = given["snapshot"] if isinstance(given["snapshot"], list) else [given["snapshot"]]
        times, counts, steps = _snapshots([folder / str(path) for path in paths])
    else:
        pairs = np.array(given["frequencies"], dtype=object)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or not all(map(_number, pairs.ravel())):
            raise UsageError(
                f"{what} has frequencies that are no pairs", "give [[times, rows], ...]"
            )
        times, counts = pairs.astype(float).T
        steps = _whole(given, "steps") if "steps" in given else 0
    samples = _whole(given, "samples") if "samples" in given else samples
    return measured(rows, times, counts, steps, samples * ids, what)


def _snapshots(folders: list[Path]) -> tuple[np.ndarray, np.ndarray, int]:
    """Frequencies, how many rows have each, and steps; of one folder per rank."""
    if not folders:
        raise UsageError("snapshot is an empty list", "give one folder per rank")
    found = []
    for folder in folders:
        store = opened(folder, f"evener-plan-{folder}")
        try:
            store.restore(folder)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"{folder}: {error}", "give a folder that is whole") from error
        finally:
            forget(store.name)
        found += [rows.frequencies for rows in store.export()]
        steps = int(store.stats()["steps"])
    times, counts = np.unique(np.concatenate(found or [np.empty(0, np.int64)]), return_counts=True)
    return times, counts, steps


def _budget(gpu: str, host: str, ssd: str) -> Budget:
    """Read the budget of a node. With a size, the SSD may be one that this machine lacks."""
    limits: dict[str, str | int] = {"gpu": 0 if gpu == "auto" else gpu, "host": host}
    folder, colon, amount = ssd.rpartition(":")
    if folder and colon and has_unit(amount):
        return dataclasses.replace(resolve(limits), ssd=size(amount, "ssd"), folder=folder)
    return resolve(limits | ({"ssd": ssd} if ssd else {}))


def run(
    found: dict[str, Any], path: str, *, gpu: str, host: str, ssd: str, batch: str, ranks: int,
    nodes: int, between: str, as_json: bool,
) -> None:  # fmt: skip
    """Plan and print. Exit(1): it does not fit."""
    if not batch.isdecimal() or not int(batch):
        raise UsageError(f"batch {batch!r} is not known", "give samples per rank, as 8192")
    cluster = Cluster(int(batch), ranks, nodes)
    rate = parse_rate(between, "--between")
    tables = tables_of(found, Path(path).parent, cluster.batch * cluster.size)
    budget = _budget(gpu, host, ssd)
    made = plan(tables, cluster, budget)
    fixes = [] if made.fits else list(nearest(tables, cluster, budget, made))
    times = seconds(made, cluster, rate)
    if as_json:
        click.echo(json.dumps(_record(made, fixes, times), indent=2))
    else:
        _show(made, cluster, fixes, times, gpu == "auto")
    if not made.fits:
        raise click.exceptions.Exit(1)


def _record(made: Plan, fixes: list[str], times: dict[str, float]) -> dict[str, Any]:
    places = [
        {
            **{f.name: getattr(p, f.name) for f in dataclasses.fields(p) if f.name != "table"},
            "name": p.table.name,
            "host_rows": p.host_rows,
            "options": p.table.options.to_dict(),
        }
        for p in made.places
    ]
    totals = {f"{tier}_bytes": made.bytes(tier) for tier in ("gpu", "host", "ssd")}
    return {
        "plan": {
            "fits": made.fits, **totals, "budget": dataclasses.asdict(made.budget),
            "places": places, "nearest": fixes, "code": list(code(made)),
        },
        "times": times,
        "step_seconds": sum(times.values()),
        "crossing_bytes": sum(p.crossing for p in made.places),
    }  # fmt: skip


def _short(value: Any) -> str:
    """A dataclass as one would type it: what is not the default."""
    changed = (
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != f.default
    )
    return f"{type(value).__name__}({', '.join(changed)})"


def code(made: Plan) -> Iterator[str]:
    """Lines that make these tables so, for `evener.embedding.torch`."""
    halves = [p.table for p in made.places if p.table.options.dtype != "f32"]
    for table in halves:
        kind = {"f16": "FP16", "bf16": "BF16"}[table.options.dtype]
        yield f'# data_type="{kind}" in the configuration of {table.name!r}'
    yield "EmbeddingBagCollection("
    yield "    tables,"
    optimizers = {p.table.name: _short(p.table.options.optimizer) for p in made.places}
    if len(set(optimizers.values())) == 1:
        yield f"    optimizer={next(iter(optimizers.values()))},"
    else:
        yield f"    optimizer={_mapping(optimizers)},"
    if any(place.gpu_rows for place in made.places):
        yield '    device="cuda",'
        copies = {p.table.name: str(p.gpu_rows) for p in made.places if p.gpu_rows}
        yield f"    cache_rows={_mapping(copies)},"
    folder = made.budget.folder
    tiers = {
        p.table.name: f"SsdTier({folder!r}, rows={p.host_rows})" for p in made.places if p.ssd_rows
    }
    if tiers:
        yield f"    storage={_mapping(tiers)},"
    yield ")"


def _mapping(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name!r}: {value}" for name, value in values.items()) + "}"


def _show(
    made: Plan, cluster: Cluster, fixes: list[str], times: dict[str, float], no_gpu: bool
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rows = sum(place.table.rows for place in made.places)
    console.print(
        f"[bold]{len(made.places)} tables, {rows:,} rows[/]; figures are of one rank of "
        f"{cluster.size}, with {cluster.batch:,} samples per step"
    )
    if no_gpu:
        console.print("  no --gpu: no row is kept on a GPU")
    console.print("[green]fits[/]" if made.fits else "[red]does not fit[/]")
    for fix in fixes:
        console.print(f"  fits with {fix}")
    lines: dict[str, list[str]] = {
        "table": [p.table.name for p in made.places],
        "rows": [f"{p.rows:,}" for p in made.places],
        "bytes/row": [f"{p.row_bytes:,.0f}" for p in made.places],
        "host rows": [f"{p.host_rows:,}" for p in made.places],
    }
    if made.bytes("ssd"):
        lines["SSD rows"] = [f"{p.ssd_rows:,}" for p in made.places]
        lines["from SSD"] = [f"{p.cold:.1%}" for p in made.places]
    if made.bytes("gpu"):
        lines["GPU rows"] = [f"{p.gpu_rows:,}" for p in made.places]
        lines["from GPU"] = [f"{p.kept:.1%}" for p in made.places]
    _grid(lines, console)
    tiers = [t for t in ("gpu", "host", "ssd") if t == "host" or getattr(made.budget, t)]
    _grid(
        {
            "where": tiers,
            "memory": [f"{made.bytes(tier) / 1e9:.2f} GB" for tier in tiers],
            "budget": [f"{getattr(made.budget, tier) / 1e9:.2f} GB" for tier in tiers],
        },
        console,
    )
    shown = {what: took for what, took in times.items() if took}
    _grid({"of a step": [*shown], "seconds": [f"{took:.4f}" for took in shown.values()]}, console)
    most = max(times, key=lambda what: times[what])
    crossing = sum(place.crossing for place in made.places)
    console.print(
        f"{sum(times.values()):.4f} s at least for the tables of a step, bound by {most}; "
        f"{crossing / 1e6:.2f} MB to other nodes (a prediction, not a measurement)"
    )
    for line in code(made):
        console.print(line, markup=False)


def _grid(columns: dict[str, list[str]], console: Console) -> None:
    grid = Grid(box=None)
    for title in columns:
        grid.add_column(
            title, justify="left" if title == next(iter(columns)) else "right", no_wrap=True
        )
    for line in zip(*columns.values(), strict=True):
        grid.add_row(*line)
    console.print(grid, crop=False)
