"""Variables that were set and hurt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture

_OFF = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host talk through host memory", "NVLink and PCIe peers"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one host may talk over the network", "shared memory"),
    "NCCL_IB_DISABLE": ("1", "RDMA cards are left out and sockets are used", "RDMA cards"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "cards never reach GPU memory", "GPUDirect RDMA"),
    "NCCL_MAX_NCHANNELS": ("1", "one channel carries everything", "more channels"),
    "NCCL_PROTO": ("LL", "only the low-latency protocol, half the bandwidth", "Simple and LL128"),
}


@check({"settings.switched-off": "variables that forbid a fast path"})
def switched_off(picture: Picture) -> Iterator[Finding]:
    """What a variable forbids."""
    for name, (value, means, back) in _OFF.items():
        where = picture.run.settings.get(name, {}).get(value)
        if where is None:
            continue
        yield Finding(
            "settings.switched-off",
            "warning",
            f"{name}={value}: {means}",
            "It was set by hand, for a test or another machine, and is in force in this run.",
            "measured",
            (where,),
            "Unset it unless it is needed.",
            f"unset {name}",
            f"{back} again.",
        )


@check({"settings.no-nvls": "NVLink SHARP is off; machines without NVLink multicast need it so"})
def no_nvls(picture: Picture) -> Iterator[Finding]:
    """NVLink SHARP off: only a note, because virtual machines without NVLink multicast need it."""
    where = picture.run.settings.get("NCCL_NVLS_ENABLE", {}).get("0")
    if where is None:
        return
    yield Finding(
        "settings.no-nvls",
        "note",
        "NCCL_NVLS_ENABLE=0: the NVLink switch does not reduce",
        "Where GPUs of a host share an NVLink switch, NVLink SHARP makes reductions inside the "
        "host faster. Virtual machines without NVLink multicast cannot use it and fail without "
        "this setting.",
        "measured",
        (where,),
        "Try without it on machines that have NVLink multicast. Nothing changes between hosts.",
        "unset NCCL_NVLS_ENABLE",
        "NVLS in the tuning lines, or an error that says the machine has no multicast.",
    )


@check({"settings.hca-prefix": "`NCCL_IB_HCA=mlx5_1` also takes mlx5_10"})
def hca_prefix(picture: Picture) -> Iterator[Finding]:
    """`NCCL_IB_HCA=mlx5_1` also matches mlx5_10."""
    for value, where in picture.run.settings.get("NCCL_IB_HCA", {}).items():
        if value.startswith(("=", "^")):
            continue
        cards = {
            card.name
            for host in picture.run.hosts.values()
            for (network, _), card in host.cards.items()
            if network != "Socket"
        }
        listed = [part.split(":")[0].strip() for part in re.split(r"[,;]", value)]
        for wanted in listed:
            also = sorted(c for c in cards if c.startswith(wanted) and c not in listed)
            digits = [c for c in also if wanted[-1:].isdigit() and c[len(wanted) :][:1].isdigit()]
            if digits:
                yield Finding(
                    "settings.hca-prefix",
                    "problem",
                    f"NCCL_IB_HCA={value} also takes {', '.join(digits)}",
                    "Names without `=` are prefixes.",
                    "measured",
                    (where,),
                    "Ask for exact names.",
                    f"export NCCL_IB_HCA=={value}",
                    "Only the cards that were meant in `NET/IB : Using`.",
                )
                break
