"""Network cards: up, speed, MTU, RDMA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evener.tools.doctor.line import Line, read

_VIRTUAL = ("lo", "docker", "virbr", "br-", "veth", "cni", "flannel", "cali", "tun", "tap")


def ethernet(root: Path) -> Iterator[Line]:
    """Interfaces with a link."""
    up = []
    folder = root / "sys/class/net"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(_VIRTUAL) or read(path / "operstate") not in ("up", "unknown"):
            continue
        speed, mtu = read(path / "speed"), read(path / "mtu")
        rate = int(speed) if speed.lstrip("-").isdigit() else -1
        up.append(path.name)
        shown = f"{rate / 1000:g} Gb/s" if rate > 0 else "speed not told"
        state = f"{shown}, MTU {mtu or '?'}"
        if 0 < rate < 10_000:
            yield Line(
                "nics",
                path.name,
                "bad",
                state,
                "check cable and port, or name another card (NCCL_SOCKET_IFNAME)",
                f"10 Gb/s are {10_000 / rate:g} times as fast",
            )
        elif mtu.isdigit() and int(mtu) < 9000:
            yield Line(
                "nics",
                path.name,
                "info",
                state,
                f"ip link set {path.name} mtu 9000, where the switches allow it",
                _jumbo(int(mtu)),
            )
        else:
            yield Line("nics", path.name, "good", state)
    if not up:
        fix = "ip link: bring one up"
        yield Line("nics", "interfaces", "bad", "none has a link", fix, severity="broken")


def _jumbo(mtu: int) -> str:
    """What frames of 9000 bytes gain: each has 52 bytes of IP and TCP inside, 38 around it."""
    now, then = (100 * (size - 52) / (size + 38) for size in (mtu, 9000))
    return f"{then:.0f}% of the rate are data, {now:.0f}% now; {9000 / mtu:.0f} times fewer packets"


def rdma(root: Path) -> Iterator[Line]:
    """RDMA devices, which NCCL prefers where it finds them."""
    folder = root / "sys/class/infiniband"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        yield Line("nics", "RDMA", "info", "none: NCCL uses Evener's transport or its sockets")
        return
    yield Line("nics", "RDMA", "good", ", ".join(names))
    if not (root / "sys/module/nvidia_peermem").exists() and (root / "proc/driver/nvidia").exists():
        yield Line(
            "nics",
            "GPUDirect RDMA",
            "bad",
            "nvidia_peermem is not loaded",
            "modprobe nvidia-peermem",
            "cards read GPUs' memory themselves, without a copy through the host's",
        )
    for name in names:
        if any(other != name and other.startswith(name) for other in names):
            yield Line(
                "nics",
                f"NCCL_IB_HCA={name}",
                "info",
                "would also match longer names",
                f"write NCCL_IB_HCA=={name}",
            )


def replies(root: Path) -> Iterator[Line]:
    """With several cards in one network the kernel answers on one and drops what the others get."""
    folder = root / "proc/sys/net/ipv4/conf"
    names = [path.name for path in sorted(folder.iterdir())] if folder.is_dir() else []
    cards = [
        name
        for name in names
        if name not in ("all", "default")
        and not name.startswith(_VIRTUAL)
        and read(root / f"sys/class/net/{name}/operstate") == "up"
    ]
    if len(cards) < 2:
        return
    # The kernel takes the larger of a card's own value and that of all.
    everywhere = read(folder / "all/rp_filter")
    strict = [n for n in cards if max(read(folder / n / "rp_filter"), everywhere) == "1"]
    if strict:
        yield Line(
            "nics",
            "reverse path filter",
            "bad",
            f"strict on {', '.join(strict)}: with {len(cards)} cards, packets that come by another "
            "card than answers leave by are dropped",
            "sysctl -w net.ipv4.conf.all.rp_filter=2",
            "the other cards carry traffic",
        )
    else:
        yield Line("nics", "reverse path filter", "good", f"not strict on {', '.join(cards)}")


CHECKS = (ethernet, rdma, replies)
