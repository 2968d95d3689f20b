"""Errors that say that ranks do not agree, or that Gloo does not connect them."""

from __future__ import annotations

import re

from evener.tools.analyze.findings.base import ENDED, LIBRARY, RAISED
from evener.tools.analyze.findings.cause import Cause

PROGRAM_CAUSES = (
    Cause(
        "run.version-mismatch",
        "ranks with different versions of NCCL",
        re.compile(r"[Mm]ismatched NCCL version|NCCL version mismatch"),
        "the ranks run different versions of NCCL",
        "All ranks of a communicator must run one version: another image, wheel or "
        "LD_LIBRARY_PATH is on some host.",
        "Install one version everywhere.",
        'python -c "import torch; print(torch.cuda.nccl.version())"; ldconfig -p | grep libnccl',
        "One version in all logs.",
        confidence="measured",
        root=LIBRARY + 2,
    ),
    Cause(
        "run.set-up-mismatch",
        "ranks that do not agree while they set up a communicator",
        re.compile(r"with family 0 is neither|Message truncated : received"),
        "the ranks do not agree while they set up a communicator",
        "A rank got an answer of another length, or an empty address: one side sets up another "
        "communicator, with another number of ranks or another version of NCCL, or the rank that "
        "had to answer failed before.",
        "See that all ranks have the same world size, NCCL version and order of new_group() calls, "
        "and look for an earlier error of another rank.",
        'grep -h "NCCL version\\|Init START\\|NCCL WARN" *.log | sort | uniq -c; '
        'python -c "import torch; print(torch.cuda.nccl.version())"    # on every host',
        "The same nranks, commId and version in every rank's log.",
        root=RAISED,
    ),
    Cause(
        "run.collective-mismatch",
        "ranks that called different collectives, or with different sizes, as NCCL sees it",
        re.compile(r"[Mm]ismatched collective|collective mismatch|message truncated : receiving"),
        "the ranks called different collectives, or one with different sizes",
        "NCCL found that what one rank sends is not what the other expects: another order of "
        "calls, another shape or type, or code that only some ranks run.",
        "Let torch compare the calls before they run: it names the ranks and shapes. Then look at "
        "code that depends on the rank or on its data (a last, smaller batch; unused parameters).",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL",
        "The rank, the operation and both shapes.",
        confidence="measured",
        root=RAISED,
    ),
    Cause(
        "network.gloo",
        "Gloo's ranks that cannot connect",
        re.compile(
            r"Gloo connect\w* failed|gloo/\S+\] ?(?:connect|timed out connecting)"
            r"|[Uu]nable to (?:find|resolve) (?:address|hostname)|makeDeviceForHostname"
        ),
        "Gloo cannot connect the ranks: the address that one offers is not one that all reach",
        "Gloo takes the address of the host's name where no interface is named. In containers and "
        "on Debian that is often 127.0.1.1 or a bridge, which no other host reaches.",
        "Name the interface that all hosts share, for Gloo too, or let the host's name lead to its "
        "address.",
        "getent hosts $(hostname); ip -br addr; export GLOO_SOCKET_IFNAME=IFACE",
        "The process group is made.",
        root=RAISED + 1,
    ),
    Cause(
        "run.gloo-peer",
        "a peer that closed its connection of Gloo",
        re.compile(r"gloo/\S+\] ?(?:Connection closed|Read error|Write error|.*reset by peer)"),
        "a peer closed its connection (Gloo): that process ended first",
        "This end only notices. Which process ended, and why, is not in this line.",
        "Look at the output of the other ranks: the first that ended has a reason of its own. A "
        "kill for memory leaves none: see the kernel's log.",
        "dmesg -T | grep -iE 'killed process|oom'; ss -tnp    # who had that port",
        "The error of the rank that ended.",
        confidence="measured",
        root=ENDED + 2,
    ),
)
