"""Is this good? The peak as a share of what the cards or the links between GPUs carry."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, size

# NVLink of one GPU, one way, GB/s, as their maker states it: links times rate.
_NVLINK = (
    ("V100", 150.0), ("A800", 200.0), ("A100-SXM", 300.0), ("A100 SXM", 300.0), ("H800", 200.0),
    ("H100 80GB HBM3", 450.0), ("H100 SXM", 450.0), ("H200", 450.0), ("H20", 450.0),
    ("B200", 900.0), ("B300", 900.0),
)  # fmt: skip
_SPEEDS = (10, 25, 40, 50, 100, 200, 400, 800)
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


@check({"bandwidth.share-of-line": "GB/s per card, or per GPU in one host, against its line"})
def share(picture: Picture) -> Iterator[Finding]:
    """What the peak is worth: per card between hosts, of NVLink inside one."""
    found = picture.bandwidth
    if found is None or found.mixed or found.peak <= 0 or found.collective not in _RINGS:
        return
    cards = picture.cards_used
    nodes = len(picture.world.hosts()) if picture.world else 0
    nodes = max(nodes, found.table.nodes())
    at = f"Peak {found.peak:.4g} GB/s at {size(found.peak_row.size)}"
    if nodes > 1 and cards:
        each = found.peak / cards
        if picture.spread or 0 < picture.card_speed < each / 1.05:
            return  # one device for all cards, or a speed that is none
        twice = picture.twice and found.collective == "all_reduce"
        way = "Along a ring each host sends as much as the bus bandwidth says" + (
            "; over a tree of two hosts, or with reductions in switches, down to half of it."
            if twice
            else "."
        )
        line = picture.card_speed
        if line:
            share = f", {each / line:.0%} of its line of {line:.4g} GB/s"
            judged = "90% is a full card; below 70% something costs bandwidth."
        else:
            fits = [s for s in _SPEEDS if 0.7 <= each * 8 / s <= 1.0]
            share = ""
            judged = (
                f"That is {each * 8:.3g} Gb/s: good for a card of {fits[0]} Gb/s, little for a "
                "faster one."
                if fits
                else f"That is {each * 8:.3g} Gb/s per card."
            ) + " No file says how fast the cards are."
        yield Finding(
            "bandwidth.share-of-line",
            "note",
            f"{each:.4g} GB/s per card{share}",
            f"{at} over {count(cards, 'card')} per host. {way} {judged}",
            "inferred",
            (found.peak_where,),
            "" if line else "Give the topology file, which has the speed of each card.",
            "" if line else "export NCCL_TOPO_DUMP_FILE=topo.xml",
        )
    elif nodes > 1 and len(found.table.devices) >= nodes:
        gpus_per_host = len(found.table.devices) / nodes
        each = found.peak / gpus_per_host
        half = (
            " along a ring, down to half of it over a tree of two hosts or with NVLS"
            if picture.twice and found.collective == "all_reduce"
            else ""
        )
        yield Finding(
            "bandwidth.share-of-line",
            "note",
            f"{each:.4g} GB/s per GPU",
            f"{at} over {count(nodes, 'host')} of {gpus_per_host:g} GPU(s) each. With one card "
            f"per GPU that is {each * 8:.3g} Gb/s per card{half}; no line says how many cards "
            "there are or how fast.",
            "inferred",
            (found.peak_where,),
            "Log the network lines, or give the topology file, which has the speed of each card.",
            "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_TOPO_DUMP_FILE=topo.xml",
        )
    elif nodes == 1 and len(found.table.devices) > 1:
        gpus = {device.name for device in found.table.devices.values()}
        rate = next((r for key, r in _NVLINK if gpus and all(key in g for g in gpus)), 0.0)
        if not rate:
            return
        name = next(iter(gpus))
        yield Finding(
            "bandwidth.share-of-line",
            "note",
            f"{found.peak / rate:.0%} of the NVLink of {name}",
            f"{at}; NVLink of this GPU carries {rate:.4g} GB/s one way, if all its links are "
            "there. Large sizes usually come to 75% to 90% of it, and above 100% where the NVLink "
            "switch reduces (NVLS).",
            "inferred",
            (found.peak_where,),
            "Below half of it: see that all links are up, and that the largest size is large.",
            "nvidia-smi nvlink --status",
        )
