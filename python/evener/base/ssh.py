"""What ssh means by what it says: the cause, and the fix for that cause.

A name that does not resolve, a host that does not answer and a key that is missing all end ssh with
status 255; what to do about them has nothing in common.
"""

from __future__ import annotations

import re

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "the name {host} does not resolve",
        "check its spelling; else put it into DNS, /etc/hosts or ~/.ssh/config",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the key of {host} itself is not known here, or is another one than before",
        "compare the key, then: ssh {host} (once, by hand), or ssh-keyscan -H {host} >> "
        "~/.ssh/known_hosts",
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "{host} answers, and accepts no key of yours",
        "ssh-copy-id {host}, or name the key: --ssh-identity-file",
    ),
    (
        r"Connection refused",
        "{host} answers, and no sshd listens there",
        "start sshd there, or name its port: --ssh-port",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down|Operation timed out",
        "{host} has an address, and does not answer",
        "check that it runs, its address, and the firewall (ping {host})",
    ),
    (
        r"bad permissions|UNPROTECTED PRIVATE KEY|Bad owner or permissions",
        "ssh refuses your key or its configuration: others may read or change the file",
        "chmod 600 the file that ssh names, chmod 700 ~/.ssh",
    ),
)


def cause(said: str, host: str) -> tuple[str, str] | None:
    """(what is wrong, fix) from ssh's messages; None where they mean something else."""
    for pattern, problem, fix in _CAUSES:
        if re.search(pattern, said):
            return problem.format(host=host), fix.format(host=host)
    return None
