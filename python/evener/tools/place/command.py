"""`evener place`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from evener.tools.place.plan import Placement


@click.command()
@click.option(
    "--map",
    "map_file",
    required=True,
    type=click.Path(path_type=Path),
    help="Hosts, cards, switches and links (docs/reference/map.md).",
)
@click.option("-np", "--ranks", required=True, type=click.IntRange(min=1), help="Ranks, one a GPU.")
@click.option(
    "--hostfile", type=click.Path(path_type=Path), help="Write `host slots=n` lines here."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def place(map_file: Path, ranks: int, hostfile: Path | None, as_json: bool) -> None:
    """Order hosts and ranks so that neighbours share a switch and a rail.

    Prints the host list, the GPU and card of each rank, and the predicted load of every
    inter-switch link in the map's own order and in the new one.

    \b
    Example:
      evener place --map map.yaml -np 16 --hostfile hosts
      evener launch -np 16 --hostfile hosts python train.py
    """
    from evener.errors import UsageError
    from evener.tools.fabric import read_map
    from evener.tools.place.plan import place as plan

    placement = plan(read_map(map_file), ranks)
    if hostfile:
        try:
            hostfile.write_text(placement.hostfile(), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{hostfile}: {error.strerror}", "name a file that can be written"
            ) from None
    if as_json:
        click.echo(json.dumps(placement.document(), indent=2))
    else:
        click.echo(_text(placement), nl=False)


def _text(placement: Placement) -> str:
    lines = ["# hosts, in order", *placement.hostfile().splitlines(), "", "# ranks"]
    lines.append(f"# {'rank':>4}  {'host':<20} {'local':>5} {'gpu':>4}  {'card':<10} rail  switch")
    for rank in placement.after.ranks:
        lines.append(
            f"  {rank.rank:>4}  {rank.host:<20} {rank.local_rank:>5} {rank.gpu:>4}  "
            f"{rank.card:<10} {rank.rail:>4}  {rank.switch}"
        )
    orders = placement.visible_devices()
    if any(names != ",".join(map(str, range(names.count(",") + 1))) for names in orders.values()):
        lines += ["", "# GPUs in this order, so that equal local ranks share a rail"]
        lines += [f"{host}: CUDA_VISIBLE_DEVICES={names}" for host, names in orders.items()]
    before, after = placement.before, placement.after
    lines += [
        "",
        "# predicted load, share of the bus bandwidth: ring / two-level groups",
        f"# {'from > to':<24} {'links':>12} {'map order':>15} {'placed':>15}",
    ]
    for ends, use in after.ring.links.items():
        cells = [
            f"{s.ring.links[ends].weight:>5.0%} / {s.groups.links[ends].weight:>5.0%}"
            for s in (before, after)
        ]
        links = f"{use.count} x {use.speed * 8 / 1e9:g}G"
        lines.append(f"  {'>'.join(ends):<24} {links:>12} {cells[0]:>15} {cells[1]:>15}")
    lines.append(
        f"  {'leaves its switch':<24} {'':>12} "
        + " ".join(
            f"{s.ring.crossing_share:>7.0%} / {s.groups.crossing_share:>5.0%}"
            for s in (before, after)
        )
    )
    if after.cost >= before.cost:
        lines += ["", "# The map's own order is as good as any found: nothing changes."]
        if after.cost[0]:
            lines.append(
                "# Placement cannot help this cabling; `evener analyze --map` proposes one."
            )
    return "\n".join(lines) + "\n"
