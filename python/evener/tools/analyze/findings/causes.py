"""What NCCL's own warnings mean: each kind once, with all hosts that printed it.

A cause is an expression over the text of warnings. What no cause explains is shown as it stands
(coverage.nccl-warning).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from evener.tools.analyze.findings.base import Finding, Severity, check
from evener.tools.analyze.model import Warned
from evener.tools.analyze.picture import Confidence, Picture
from evener.tools.analyze.words import count, names


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of warning and what to do about it."""

    id: str
    meaning: str
    """For the list of findings."""
    pattern: re.Pattern[str]
    title: str
    detail: str
    do: str
    command: str
    expect: str
    severity: Severity = "problem"
    confidence: Confidence = "inferred"
    unless: re.Pattern[str] | None = None
    """Another warning of the run that means that this one has another cause."""


def _status(number: int, name: str) -> str:
    return rf"(?:with )?(?:error|status)[ =]*(?:{name}\(|)\s*{number}\b"


CAUSES = (
    Cause(
        "network.ib-timeout",
        "RDMA packets that the other end never acknowledges (error 12, vendor 129)",
        re.compile(rf"ompletion.*{_status(12, 'IBV_WC_RETRY_EXC_ERR')}"),
        "RDMA: the other end does not answer (error 12, vendor 129)",
        "A card sent, tried again, and got no acknowledgement. On RoCE the usual cause is the GID "
        "index: the cards talk RoCE v1, or use an address that is not routed. Else a link is "
        "down, a switch drops, or the two networks do not reach one another.",
        "Take the index of RoCE v2 with the IPv4 address of the network that all hosts share "
        "(show_gids lists them; it is 3 on many machines), the same on all hosts. Then test that "
        "pair of cards by itself.",
        "show_gids; export NCCL_IB_GID_INDEX=3; ib_write_bw -d mlx5_0 -x 3 PEER",
        "No error 12. If ib_write_bw fails too, it is the network and not NCCL.",
    ),
    Cause(
        "network.ib-access",
        "a card that is refused GPU memory (error 4, vendor 81): mostly ACS",
        re.compile(
            rf"ompletion.*(?:{_status(4, 'IBV_WC_LOC_PROT_ERR')}"
            rf"|{_status(10, 'IBV_WC_REM_ACCESS_ERR')}|{_status(11, 'IBV_WC_REM_OP_ERR')})"
        ),
        "RDMA: a card is refused the memory (error 4, vendor 81)",
        "The card may not read or write the buffer. With GPUDirect RDMA the usual cause is PCIe "
        "access control (ACS) or the IOMMU, which send its requests to the CPU; else the peer "
        "memory module does not fit the driver.",
        "Check first: if it works without GPUDirect, turn ACS off on all PCIe bridges (on bare "
        "metal) or load the right peer memory module. Do not keep the setting, it is slow.",
        "NCCL_NET_GDR_LEVEL=0 COMMAND    # the check; then: lspci -vvv | grep ACSCtl",
        "No error with the setting: then it is ACS, the IOMMU or the module.",
    ),
    Cause(
        "network.ib-flushed",
        "RDMA work that was thrown away after another error (error 5, vendor 249)",
        re.compile(rf"ompletion.*{_status(5, 'IBV_WC_WR_FLUSH_ERR')}"),
        "RDMA: work was flushed after another error (error 5, vendor 249)",
        "A connection had failed before: what waited on it is thrown away. The cause is the first "
        "error of that connection, here or at its other end.",
        "Look for an earlier error in the logs of both ends. Where there is none, check ACS, the "
        "firmware of card and machine, and the link.",
        "NCCL_NET_GDR_LEVEL=0 COMMAND    # without GPUDirect, as a check",
        "The first error, or none.",
    ),
    Cause(
        "host.shm-full",
        "/dev/shm is full or too small",
        re.compile(
            r"posix_fallocate failed|failed to extend \S*/dev/shm|shared memory.*No space left"
            r"|[Ee]rror while creating shared memory segment"
        ),
        "/dev/shm is full or too small",
        "NCCL puts buffers for ranks of one host there and got no space. Containers get 64 MB "
        "where nothing else is asked for, and killed jobs leave files behind.",
        "Give the container more (Docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with "
        "medium Memory at /dev/shm), and remove files that no process uses.",
        "df -h /dev/shm; ls /dev/shm/nccl-*",
        "No such error, and shared memory in use.",
        unless=re.compile(r"Cuda failure|invalid argument"),
    ),
    Cause(
        "host.shm-apart",
        "ranks of one host that do not share /dev/shm",
        re.compile(r"attaching to shared memory segment|shm.*open failed: No such file"),
        "ranks of one host do not see the same /dev/shm",
        "A rank opened the segment that another rank of its host made, and it was not there: they "
        "are in containers of their own, something removed it, or the other rank had ended.",
        "Let containers of one host share it (--ipc=host), or tell NCCL to do without.",
        "NCCL_SHM_DISABLE=1 COMMAND    # as a check",
        "No such error.",
    ),
    Cause(
        "run.duplicate-gpu",
        "two ranks on one GPU",
        re.compile(r"Duplicate GPU detected"),
        "two ranks use the same GPU",
        "NCCL wants a GPU of its own for each rank of a communicator.",
        "Choose the device by the local rank, and start no more ranks than GPUs.",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        "Each rank on its GPU.",
        confidence="measured",
    ),
    Cause(
        "network.unreachable",
        "a rank that cannot connect to another one",
        re.compile(
            r"[Cc]onnect(?:ion)? (?:(?:to|from) .*)?(?:failed|refused|timed out)|Connection refused"
            r"|No route to host|Network is unreachable|socketStartConnect.*failed"
        ),
        "a rank cannot connect to another one",
        "The address is of an interface that the other host does not reach (docker0, another "
        "subnet), a firewall drops it, or that process had ended.",
        "Name the interface that all hosts share, and open the ports between hosts.",
        "export NCCL_SOCKET_IFNAME=IFACE",
        "Connections between all hosts.",
    ),
    Cause(
        "network.no-interface",
        "no interface fits NCCL_SOCKET_IFNAME",
        re.compile(r"[Nn]o (?:socket|IP|usable) ?interface found"),
        "NCCL finds no interface",
        "None is up, or none has a name that NCCL_SOCKET_IFNAME begins with.",
        "Unset it, or name one that every host has.",
        "ip -br addr; unset NCCL_SOCKET_IFNAME",
        "`Bootstrap : Using` names an interface.",
    ),
    Cause(
        "run.peer-gone",
        "a rank whose connection to another one was closed",
        re.compile(
            r"onnection closed by remote peer|Socket recv failed|Connection reset by peer"
            r"|Broken pipe|Accept failed"
        ),
        "a peer closed its connection",
        "That process ended, or something between cut the connection. This end only notices.",
        "Look at the log of the peer first: it ended for a reason of its own.",
        "",
        "",
        "warning",
        "measured",
    ),
    Cause(
        "run.gpu-memory",
        "no GPU memory left for NCCL",
        re.compile(r"(?:Cuda|CUDA|HIP) failure.*out of memory|Failed to CUDA (?:malloc|calloc)"),
        "a GPU has no memory left for NCCL",
        "NCCL takes some hundred MB per communicator and GPU.",
        "Leave room: a smaller batch, fewer communicators, or smaller buffers.",
        "export NCCL_BUFFSIZE=1048576",
        "No such error.",
        confidence="measured",
    ),
    Cause(
        "host.memlock",
        "memory that may not be locked",
        re.compile(r"ibv_\w+ failed.*Cannot allocate memory|Call to ibv_(?:create|reg)\w* failed"),
        "a card may not lock memory",
        "Registering memory for RDMA fails where the limit of locked memory is low, as in a "
        "service or container that does not raise it.",
        "Raise the limit for the launcher's service and containers.",
        "ulimit -l; docker run --ulimit memlock=-1",
        "`unlimited` in every rank.",
    ),
    Cause(
        "host.kernel-settings",
        "settings of the kernel that RCCL warns of",
        re.compile(r'NUMA auto balancing|Missing "(?:amd_)?iommu='),
        "settings of the kernel cost speed or stability",
        "RCCL asks for NUMA balancing off (it moves pages in use), and for amd_iommu=on and "
        "iommu=pt on the kernel's command line (peer access between GPUs).",
        "Set them on every host.",
        "sysctl kernel.numa_balancing=0; grep -o '[a-z_]*iommu=[a-z]*' /proc/cmdline",
        "No such warning.",
        "warning",
        "measured",
    ),
)


def cause(text: str, run_texts: dict[str, Warned]) -> Cause | None:
    """What a warning means, None where nothing here knows."""
    for one in CAUSES:
        if one.pattern.search(text):
            if one.unless and any(one.unless.search(other) for other in run_texts):
                continue
            return one
    return None


@check({one.id: one.meaning for one in CAUSES})
def known_warnings(picture: Picture) -> Iterator[Finding]:
    """Warnings whose cause is known, equal causes once."""
    groups: dict[str, list[Warned]] = {}
    texts: dict[str, str] = {}
    kinds: dict[str, Cause] = {}
    for text, warning in picture.run.warnings.items():
        if one := cause(text, picture.run.warnings):
            groups.setdefault(one.id, []).append(warning)
            texts.setdefault(one.id, text)
            kinds[one.id] = one
    for id, warnings in groups.items():
        one = kinds[id]
        hosts = sorted({host for w in warnings for host, _ in w.processes if host})
        of = f" on {names(hosts)}" if hosts else ""
        times = count(sum(w.times for w in warnings), "time")
        yield Finding(
            id,
            one.severity,
            one.title,
            f"NCCL says so {times}{of}, first: {texts[id][:200]}. {one.detail}{_gid(picture, id)}",
            one.confidence,
            tuple(sorted(w.where for w in warnings)[:5]),
            one.do,
            one.command,
            one.expect,
        )


def _gid(picture: Picture, id: str) -> str:
    """What the log says of GIDs, for error 12."""
    if id != "network.ib-timeout":
        return ""
    values = sorted(picture.run.settings.get("NCCL_IB_GID_INDEX", {}))
    said = f" NCCL_IB_GID_INDEX is set to {', '.join(values)}." if values else ""
    if any(re.search(r"[Gg]ids? ?:{0,1}fe80:", text) for text in picture.run.warnings):
        said += " The GID is link-local (fe80::): on RoCE that does not leave the subnet."
    return said
