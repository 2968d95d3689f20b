"""What the kernel allows: buffers, limits, congestion control, AF_XDP, io_uring, huge pages."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from evener.tools.doctor.line import Line, read

_LEAST = {
    "net.core.rmem_max": 64 << 20,
    "net.core.wmem_max": 64 << 20,
    "net.core.netdev_max_backlog": 30_000,
}
_LAST_OF_THREE = {"net.ipv4.tcp_rmem": 64 << 20, "net.ipv4.tcp_wmem": 64 << 20}
_SHM = "NCCL and data loaders do not end with `No space left on device` or a bus error"
_AF_XDP = 44
_XDP_CHANGES = "for EVENER_NET_ENGINE=xdp alone; without it that takes UDP sockets"
_CAP_NET_RAW, _CAP_BPF, _CAP_SYS_ADMIN = 13, 39, 21


def buffers(root: Path) -> Iterator[Line]:
    """Socket buffers: a flow cannot exceed buffer / round trip."""
    for name, least in (_LEAST | _LAST_OF_THREE).items():
        text = read(root / "proc/sys" / name.replace(".", "/"))
        if not text:
            continue
        value = int(text.split()[-1])
        if value >= least:
            yield Line("kernel", name, "good", text.replace("\t", " "))
        else:
            wanted = f"'4096 131072 {least}'" if name in _LAST_OF_THREE else str(least)
            fix = f"sysctl -w {name}={wanted}"
            yield Line("kernel", name, "bad", text.replace("\t", " "), fix, _gain(name, value))


def _gain(name: str, value: int) -> str:
    if name == "net.core.netdev_max_backlog":
        return "fewer drops where one processor takes the packets of many flows; not measured here"
    most = f"{value * 8 / 1e-3 / 1e9:.1f} Gb/s at a round trip of 1 ms"
    if name in _LAST_OF_THREE:
        return f"one flow may go beyond {most}, its limit now (buffer / round trip)"
    return f"flows of programs that set their buffers themselves may go beyond {most}"


def congestion(root: Path) -> Iterator[Line]:
    """bbr without fq paces in software per socket; cubic is the safe choice in a cluster."""
    control = read(root / "proc/sys/net/ipv4/tcp_congestion_control")
    queue = read(root / "proc/sys/net/core/default_qdisc")
    if not control:
        return
    if control == "bbr" and queue != "fq":
        yield Line(
            "kernel",
            "congestion control",
            "bad",
            f"bbr with queue discipline {queue or '?'}",
            "sysctl -w net.core.default_qdisc=fq, or net.ipv4.tcp_congestion_control=cubic",
            "the network card's queue paces flows, and not a timer for each socket; Evener's net "
            "takes cubic instead of bbr anyway (EVENER_NET_CONGESTION)",
        )
    else:
        yield Line("kernel", "congestion control", "good", f"{control}, {queue or '?'}")


def limits(_: Path) -> Iterator[Line]:
    """Locked memory (pinned buffers, RDMA) and open files (sockets)."""
    for name, which, least, fix, gain, severity in (
        (
            *("locked memory", resource.RLIMIT_MEMLOCK, 1 << 30, "ulimit -l unlimited"),
            *("RDMA can register its buffers; TCP needs none", "slow"),
        ),
        (
            *("open files", resource.RLIMIT_NOFILE, 4096, "ulimit -n 65536"),
            *("jobs of many ranks and flows do not end with `Too many open files`", "broken"),
        ),
    ):
        soft, _hard = resource.getrlimit(which)
        if soft == resource.RLIM_INFINITY or soft >= least:
            shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
            yield Line("kernel", name, "good", shown)
        else:
            yield Line(
                "kernel",
                name,
                "bad",
                str(soft),
                f"{fix} (limits.conf keeps it)",
                gain,
                "broken" if severity == "broken" else "slow",
            )


def shared_memory(root: Path) -> Iterator[Line]:
    """/dev/shm: NCCL between ranks of a host, data loaders."""
    path = root / "dev/shm"
    if not path.is_dir():
        fix = "mount -t tmpfs tmpfs /dev/shm"
        yield Line("kernel", "/dev/shm", "bad", "not there", fix, _SHM, "broken")
        return
    stat = os.statvfs(path)
    size = stat.f_blocks * stat.f_frsize
    if size < 1 << 30:
        yield Line(
            "kernel",
            "/dev/shm",
            "bad",
            f"{size >> 20} MiB",
            "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm",
            _SHM,
            "broken",
        )
    else:
        yield Line("kernel", "/dev/shm", "good", f"{size >> 20} MiB")


def af_xdp(root: Path) -> Iterator[Line]:
    """Whether packets can bypass the kernel's network stack."""
    try:
        socket.socket(_AF_XDP, socket.SOCK_RAW).close()
    except OSError as error:
        yield Line(
            "kernel",
            "AF_XDP",
            "info",
            f"not available ({error.strerror}); {_XDP_CHANGES}",
            "run with CAP_NET_RAW and CAP_BPF on a kernel with CONFIG_XDP_SOCKETS",
        )
        return
    status = read(root / "proc/self/status").splitlines()
    held = next((line.split()[1] for line in status if line.startswith("CapEff")), "0")
    bits = int(held, 16)
    load = bits >> _CAP_BPF & 1 or bits >> _CAP_SYS_ADMIN & 1
    if load and bits >> _CAP_NET_RAW & 1:
        yield Line("kernel", "AF_XDP", "good", f"available; {_XDP_CHANGES}")
    else:
        yield Line(
            "kernel",
            "AF_XDP",
            "info",
            f"the kernel has it, this process may not load a program; {_XDP_CHANGES}",
            "run with CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF",
        )


def io_uring(root: Path) -> Iterator[Line]:
    """The file tier of memory needs it."""
    text = read(root / "proc/sys/kernel/io_uring_disabled")
    if text in ("", "0"):
        found = "allowed" if text else "not told by this kernel"
        yield Line("kernel", "io_uring", "good" if text else "info", found)
    else:
        fix = "sysctl -w kernel.io_uring_disabled=0"
        gain = "nothing today: the tier of memory on files that needs it is planned"
        yield Line("kernel", "io_uring", "info", "disabled", fix, gain)


def huge_pages(root: Path) -> Iterator[Line]:
    """Fewer TLB misses for large pinned buffers; nothing fails without.

    Evener's page arenas ask for transparent ones (madvise); reserved ones it does not use.
    """
    text = read(root / "proc/sys/vm/nr_hugepages")
    transparent = read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    mode = transparent[transparent.find("[") + 1 : transparent.find("]")] if transparent else "?"
    state = f"{text or '?'} reserved, transparent: {mode}"
    if mode in ("always", "madvise"):
        yield Line("kernel", "huge pages", "good", f"{state}: offloaded pages are mapped by them")
    else:
        yield Line(
            "kernel",
            "huge pages",
            "info",
            f"{state}: offloaded pages take 4 KiB ones, nothing fails",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            "512 times fewer pages in host memory, and fewer TLB misses of the CPU's optimizer",
        )


def balancing(root: Path) -> Iterator[Line]:
    """The kernel moves pages between NUMA nodes behind a running job: stalls, and NCCL's advice."""
    value = read(root / "proc/sys/kernel/numa_balancing")
    if not value:
        return
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if value == "0" or nodes < 2:
        shown = "off" if value == "0" else "on, with one NUMA node: no effect"
        yield Line("kernel", "NUMA balancing", "good", shown)
    else:
        yield Line(
            "kernel",
            "NUMA balancing",
            "bad",
            f"on, over {nodes} nodes: pages of running jobs are moved",
            "sysctl -w kernel.numa_balancing=0",
            "no stalls while the kernel moves pages; how long they are depends on the job",
        )


def governor(root: Path) -> Iterator[Line]:
    """A CPU that sleeps deeply or clocks down answers the network late."""
    folder = root / "sys/devices/system/cpu"
    found = sorted({read(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")})
    if not found:
        return
    if found == ["performance"]:
        yield Line("kernel", "CPU governor", "good", "performance")
    else:
        yield Line(
            "kernel",
            "CPU governor",
            "info",
            f"{', '.join(found)}: small messages may wait for the clock to rise",
            "cpupower frequency-set -g performance",
            "steadier latency of small messages; not measured here",
        )


CHECKS = (
    buffers,
    congestion,
    limits,
    balancing,
    governor,
    shared_memory,
    af_xdp,
    io_uring,
    huge_pages,
)
