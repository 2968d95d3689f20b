"""What NCCL's own warnings mean, and programs' last words: each kind once, with all its hosts.

A cause is an expression over the text of warnings. What no cause explains is shown as it stands
(coverage.nccl-warning).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import CONTEXT, CRASHED, FOLLOWS, LIBRARY, Finding, check
from evener.tools.analyze.findings.cause import Cause
from evener.tools.analyze.findings.gave_up import fatal, gave_up, tried
from evener.tools.analyze.findings.gpu_causes import ANY, GPU_CAUSES
from evener.tools.analyze.findings.program_causes import PROGRAM_CAUSES
from evener.tools.analyze.findings.who import of_process
from evener.tools.analyze.findings.who import ranks as ranks_of
from evener.tools.analyze.model import LOCAL, Run, Warned
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names


def _status(number: int, name: str) -> str:
    return rf"(?:with )?(?:error|status)[ =]*(?:{name}\(|)\s*{number}\b"


_PORT = re.compile(
    r"async (?:error )?event ?: ?(?:port error|port[ _]err|link down|device fatal|local "
    r"catastrophic)"
    r"|[Gg]ot async .{0,40}(?:port error|PORT_ERR|DEVICE_FATAL)"
)

CAUSES = (
    *PROGRAM_CAUSES,
    Cause(
        "network.nvls",
        "NVLink SHARP (NVLS) that cannot be set up: mostly the Fabric Manager",
        re.compile(
            r"NVLS.{0,80}(?:fail|error|[Mm]ulticast memory)|[Mm]ulticast.{0,60}(?:fail|error)"
            r"|error in the Fabric Manager"
        ),
        "NVLink SHARP (NVLS, multicast) cannot be set up: the Fabric Manager or its state",
        "NCCL binds multicast memory on the NVSwitches, and CUDA refuses it. The usual cause is "
        "the "
        "Fabric Manager: it does not run, is of another version than the driver, or was restarted "
        "without a reset of the GPUs; in virtual machines and MIG multicast may be missing.",
        "Go round it now; then restart in order: stop all jobs, reset all GPUs of the host (or "
        "reboot), start the Fabric Manager, and see that it says `Completed`.",
        "export NCCL_NVLS_ENABLE=0; systemctl status nvidia-fabricmanager; "
        "nvidia-smi -q | grep -A4 Fabric; nvidia-smi --gpu-reset",
        "The run works with NCCL_NVLS_ENABLE=0: then it is multicast. After the reset without it.",
        place=re.compile(r"nvls(?:_\w+)?\.cc"),
        root=LIBRARY + 1,
    ),
    Cause(
        "cause.mnnvl",
        "multi-node NVLink (MNNVL) that cannot be set up, or a crash in its set-up",
        re.compile(
            r"MNNVL.{0,80}(?:fail|error|not available|unavailable)|[Ff]abric handle|\b[Ii]mex\b"
            r"|IMEX"
            r"|cuMem(?:ImportFrom|ExportTo)ShareableHandle.{0,80}(?:fail|error)|not permitted"
        ),
        "multi-node NVLink (MNNVL) cannot be set up between the nodes: IMEX or the fabric",
        "Memory of a GPU in another node is imported over NVLink, and the driver refuses it. IMEX "
        "does not run or does not list all nodes, its channel is missing in the container, or the "
        "nodes are in different domains.",
        "Go round it now, then see that nvidia-imex runs with the same list of nodes everywhere "
        "and "
        "that containers have /dev/nvidia-caps-imex-channels.",
        "export NCCL_MNNVL_ENABLE=0; nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels; "
        "nvidia-smi -q | grep -A6 Fabric",
        "The run works with NCCL_MNNVL_ENABLE=0: then it is IMEX or the fabric.",
        place=re.compile(r"mnnvl\.cc"),
        fabric=re.compile(r"p2p\.cc"),
        root=LIBRARY + 1,
    ),
    Cause(
        "network.fabric-manager",
        "GPUs on NVSwitches whose Fabric Manager does not run",
        re.compile(
            r"system not yet initialized|Cuda failure(?: 802)? '?(?:802|system not)"
            r"|SYSTEM_NOT_READY"
        ),
        "the GPUs are not ready: the Fabric Manager does not run (CUDA error 802)",
        "On machines with NVSwitches no CUDA program starts before the Fabric Manager has set up "
        "NVLink. It does not run, failed, or is of another version than the driver.",
        "Start it, with the version of the driver; if it fails, reset all GPUs or reboot.",
        "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric; "
        "apt list --installed 2>/dev/null | grep -i fabricmanager",
        "Fabric State: Completed, Status: Success.",
        root=LIBRARY + 2,
    ),
    Cause(
        "network.ib-port",
        "the port of a card that reports errors or goes down: a flapping link",
        _PORT,
        "the port of a card went down: a flapping link",
        "The card itself reports it (async event), so the link between card and switch is at "
        "fault. "
        "Packets that the others send there are not acknowledged (error 12), which follows from "
        "it.",
        "Look at the cable, the transceiver and the switch's port of that card, and at its "
        "counters; "
        "take the host out until it is stable.",
        "ibqueryerrors; mlxlink -d mlx5_0 -m -c; cat /sys/class/infiniband/*/ports/1/counters/"
        "link_downed; ibdev2netdev",
        "link_downed and symbol_error stay as they are.",
        root=LIBRARY + 2,
        confidence="measured",
    ),
    Cause(
        "network.ib-qp",
        "an RDMA queue pair that cannot be set up (ibv_modify_qp)",
        re.compile(r"ibv_modify_qp failed|modify QP to \w+"),
        "RDMA: a queue pair cannot be set up (ibv_modify_qp)",
        "",
        "See that the GID of that index exists in this container and is of RoCE v2 with the "
        "address "
        "of the network that all hosts share.",
        "show_gids; ip -br addr; ibv_devinfo -v | grep -E 'GID|state'",
        "Queue pairs on all hosts; ib_write_bw between the two cards works.",
        root=LIBRARY + 1,
    ),
    Cause(
        "network.efa",
        "EFA's plug-in that does not start",
        re.compile(
            r"NET/OFI.{0,200}(?:[Ff]ail|[Ee]rror|[Uu]nable|[Cc]ouldn't|not found|No eligible"
            r"|Unexpected|[Oo]nly EFA)"
            r"|aws-ofi-nccl initialization failed|No eligible providers"
        ),
        "EFA: the plug-in aws-ofi-nccl does not work here",
        "It was loaded and found no usable EFA device, or a transfer failed. The container may "
        "lack "
        "/dev/infiniband/uverbs*, the instance or its security group may not allow EFA (the group "
        "must allow all traffic to itself, in and out), or libfabric is too old.",
        "See that the provider is there and that two hosts reach one another over it.",
        "fi_info -p efa -t FI_EP_RDM; ls /dev/infiniband; fi_pingpong -p efa -e rdm PEER",
        "`Selected provider is efa` on every host.",
        root=LIBRARY,
    ),
    Cause(
        "network.no-plugin",
        "a network that is asked for by name, and cannot be used",
        re.compile(r"Failed to initialize any NET plugin"),
        "NCCL can use none of the networks that it may use (NCCL_NET, NCCL_NET_PLUGIN)",
        "A network is asked for by name, so NCCL does not fall back: its devices are not visible "
        "(a container without /dev/infiniband), or its library is not found.",
        "Give the container the devices; or unset the variables, which gives sockets, as a check.",
        "env | grep NCCL_; ls /dev/infiniband; ibv_devices; env -u NCCL_NET -u NCCL_NET_PLUGIN "
        "COMMAND",
        "`Using network IB` (or the plug-in's name) on every host.",
        root=LIBRARY + 1,
    ),
    Cause(
        "network.card-closed",
        "a card that a process may not open",
        re.compile(r"ibv_open_device failed|[Uu]nable to open device"),
        "a card is there and cannot be opened; NCCL goes on without it",
        "The system lists the card (/sys/class/infiniband), and its device file is missing or may "
        "not be opened: the container was not given /dev/infiniband/uverbs*. What is left may be "
        "sockets.",
        "Give the container every device file of its cards, and let it lock memory.",
        "ls -l /dev/infiniband /sys/class/infiniband; docker run --device=/dev/infiniband "
        "--cap-add=IPC_LOCK --ulimit memlock=-1",
        "All cards after `NET/IB : Using`.",
        "warning",
    ),
    Cause(
        "network.ib-request",
        "a card that rejects what its peer sends (invalid request)",
        re.compile(
            r"async (?:fatal )?event.{0,80}invalid request|ompletion.*"
            + _status(9, "IBV_WC_REM_INV_REQ_ERR")
        ),
        "RDMA: a card rejects what the peer sends (invalid request)",
        "The request does not fit what this end prepared: another size (ranks in different "
        "collectives), other versions of NCCL or of its plug-in on the two hosts, or firmware. "
        "Errors 12 and 5 of others follow from it.",
        "Run the same versions everywhere, without a net plug-in as a check, and let torch compare "
        "the collectives.",
        "NCCL_NET_PLUGIN=none TORCH_DISTRIBUTED_DEBUG=DETAIL COMMAND; ofed_info -s; "
        "ibv_devinfo | grep fw_ver    # on both hosts",
        "The setting with which it goes away.",
        root=LIBRARY + 1,
    ),
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
            rf"async (?:fatal )?event.{{0,80}}access violation"
            rf"|ompletion.*(?:{_status(4, 'IBV_WC_LOC_PROT_ERR')}"
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
        root=CRASHED + 5,
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
        root=FOLLOWS,
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
    *GPU_CAUSES,
)


def follows(text: str, run: Run) -> bool:
    """Whether a warning only tells that something else had failed before."""
    one = cause(text, run)
    if one is not None:
        return one.root <= FOLLOWS
    return re.search(r"retcode \d|Failed to execute operation|Timeout waiting", text) is not None


def cause(text: str, run: Run) -> Cause | None:
    """What a warning means, None where nothing here knows."""
    known = run.warnings.get(text)
    place = known.place if known else ""
    for one in CAUSES:
        if (
            one.pattern.search(text)
            or (one.place and one.place.search(place))
            or (one.fabric and one.fabric.search(place) and _imported(text, run))
        ):
            if one.unless and any(one.unless.search(other) for other in run.warnings):
                continue
            return one
    return None


_REFUSED = re.compile(r"Cuda failure.*(?:invalid|not permitted|not supported|101\b)")


def _imported(text: str, run: Run) -> bool:
    """Whether a refused call can be one on the memory of another node's GPU."""
    nodes = (s for s in run.evidence.signs if s.kind == "mnnvl" and "cliqueSize 1 " not in s.text)
    return _REFUSED.search(text) is not None and any(nodes)


def explained(run: Run) -> bool:
    """Whether any warning or last word has a known cause that is no follower."""
    texts = [*run.warnings, *(record.text for record, _ in run.ended if record.kind == "failed")]
    known = (cause(text, run) for text in texts)
    return any(one is not None and _explains(one) for one in known)


def _explains(one: Cause) -> bool:
    return one.severity == "problem" and one.root > FOLLOWS


def meant(text: str) -> Cause | None:
    """What the text of a program's own error means, where it is more than its words."""
    return next((c for c in (*PROGRAM_CAUSES, *GPU_CAUSES) if c.pattern.search(text)), None)


@check({one.id: one.meaning for one in CAUSES})
def known_warnings(picture: Picture) -> Iterator[Finding]:
    """Warnings and programs' errors whose cause is known, equal causes once."""
    groups: dict[str, list[Warned]] = {}
    texts: dict[str, str] = {}
    kinds: dict[str, Cause] = {}
    run = picture.run
    said = dict(run.warnings)
    for record, where in run.ended:
        if record.kind == "failed":
            said.setdefault(record.text, Warned(1, where))
    for text, warning in said.items():
        if one := cause(text, run):
            groups.setdefault(one.id, []).append(warning)
            texts.setdefault(one.id, text)
            kinds[one.id] = one
    before = fatal(run)
    for id, warnings in groups.items():
        one = kinds[id]
        if id == "network.ib-timeout" and groups.keys() & _BEFORE_TIMEOUT:
            continue  # it follows, and its own advice would mislead
        if id == ANY and len(groups) > 1 and any(_explains(kinds[k]) for k in groups if k != ANY):
            continue  # another cause says more
        who = _who(picture, warnings)
        of = f" on {who}" if who else ""
        times = count(sum(w.times for w in warnings), "time")
        title, detail, command = one.title, one.detail, one.command
        if card := _CARD.search(texts[id]):
            command = command.replace("mlx5_0", card[1])
        if id == "network.ib-qp":
            title, detail = _queue_pair(texts[id])
        elif id == "network.unreachable" and (over := _over(texts[id])):
            title = f"{title} at {over}, an interface of one host alone"
            command = f"export NCCL_SOCKET_IFNAME=^{over},docker,lo    # or the right one's name"
        elif id == ANY:
            title = f"{title}: {texts[id][:100]}"
        elif id == "network.card-closed" and (opened := _closed(run)):
            title = title.replace("a card", opened, 1)
        elif id == "run.collective-mismatch":
            title += _mismatched(texts[id])
        elif id in ("network.ib-port", "run.gpu-memory") and who:
            if re.search(r"catastrophic|[Ff]atal|FATAL", texts[id]):
                title = "a card failed, and its port with it"
            title = f"{who}: {title}"
        root = one.root if one.severity == "problem" or one.root <= FOLLOWS else 0
        if any(w is warning for w in warnings for warning in before) and root > FOLLOWS:
            root += 1  # the last word of NCCL before it gave up
        elif root > CONTEXT and _went_on(picture, warnings):
            root = CONTEXT
        severity = one.severity
        if id == "network.nvls" and tried(run, warnings):
            severity, root = "warning", CONTEXT if run.ended or run.evidence.waits else 0
            title = (
                "NVLink SHARP (NVLS, multicast) is not used: its set-up failed, and NCCL went on"
            )
        yield Finding(
            id,
            severity,
            title,
            f"The log says so {times}{of}, first: {texts[id][:200]}. {detail}{_gid(picture, id)}",
            one.confidence,
            tuple(sorted(w.where for w in warnings)[:5]),
            one.do,
            command,
            one.expect,
            root=root,
        )


def _over(text: str) -> str:
    """The interface of a link-local address, where it is one that other hosts do not reach."""
    found = re.search(r"\bfe80:[0-9a-f:]{1,40}%([\w.-]{1,40})", text, re.IGNORECASE)
    return found[1] if found and LOCAL.match(found[1]) else ""


# What ends a connection, whose other end then gets no answer.
_BEFORE_TIMEOUT = {"network.ib-port", "network.ib-request", "network.ib-access"}


def _went_on(picture: Picture, warnings: list[Warned]) -> bool:
    """Whether NCCL tried something, went on without it, and the run ended by a crash."""
    evidence = picture.run.evidence
    crashed = any(s.kind in ("segv", "sigbus") for s in evidence.signs) or any(
        e.signal in (4, 7, 8, 11) for e in evidence.exits
    )
    processes = {process for w in warnings for process in w.processes}
    return crashed and bool(picture.run.communicators) and not processes & gave_up(picture.run)


def _closed(run: Run) -> str:
    """The first card that could not be opened, as far as a warning names it."""
    named = (re.search(r"open device (\w+)", text) for text in run.warnings)
    return next((card[1] for card in named if card), "")


def _mismatched(text: str) -> str:
    """The rank or the sizes that a text of a mismatch names."""
    if found := re.search(r"around rank (\d+)", text):
        return f" (around rank {found[1]})"
    if found := re.search(r"local size (\d+) remote size (\d+)", text):
        return f" ({found[1]} bytes here, {found[2]} at the peer)"
    return ""


# A card that NCCL names: `NET/IB : mlx5_1:1 Got async event`, `on dev mlx5_bond_0:1`.
_CARD = re.compile(r"(?:NET/IB ?: ?|\bdev |\bhca )([a-zA-Z][\w-]{2,40}):\d{1,3}\b")


def _who(picture: Picture, warnings: list[Warned]) -> str:
    """The hosts that printed a warning, and the ranks where they are few and known."""
    processes = {process for w in warnings for process in w.processes if process[0]}
    hosts = sorted({host for host, _ in processes})
    if not hosts:
        return ""
    numbers = {of_process(picture, host, pid) for host, pid in processes} - {-1}
    known = len(numbers) == len(processes) and 0 < len(numbers) <= 4
    return names(hosts) + (f" ({ranks_of(numbers)})" if known else "")


_QUEUE_PAIRS = (
    (
        r"No such device|\b19\b",
        "No such device",
        "The GID that was taken belongs to a network interface that is not in this container or "
        "network namespace (macvlan, a pod's own network): the card is visible, its interface is "
        "not. Host networking (--net=host, hostNetwork) or an interface of the card in the "
        "container (SR-IOV, an RDMA network plug-in) ends it.",
    ),
    (
        r"timed out|\b110\b",
        "the other card's address does not answer (110)",
        "The address behind the other end's GID was not resolved: the two RoCE networks do not "
        "reach "
        "one another (VLAN, route, firewall), the GID index differs between the hosts, or a "
        "port is "
        "down. It is the RDMA network, not TCP.",
    ),
    (
        r"unreachable|\b101\b|No route|\b113\b",
        "no route to the other card's address (101)",
        "There is no route between the addresses behind the two GIDs: cards of different "
        "subnets, or "
        "a GID of IPv6 link-local on one side. It is the RDMA network, not TCP.",
    ),
    (
        r"Invalid argument|\b22\b",
        "Invalid argument",
        "The card refuses a value: mostly a GID index that is empty or differs from the other "
        "end's, "
        "or an MTU that the port does not have.",
    ),
)


def _queue_pair(text: str) -> tuple[str, str]:
    """Title and meaning of a refused ibv_modify_qp, by its error."""
    device = re.search(r"\bdev(?:ice)? (\w+(?::\d+)?)", text)
    of = f" on {device[1]}" if device else ""
    after = text[max(text.find("modify"), 0) :]
    for pattern, short, detail in _QUEUE_PAIRS:
        if re.search(pattern, after):
            return f"RDMA: a queue pair cannot be set up{of} (ibv_modify_qp: {short})", detail
    return (
        f"RDMA: a queue pair cannot be set up{of} (ibv_modify_qp)",
        "The card refuses the address or the values of the other end: GID, MTU or port.",
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
