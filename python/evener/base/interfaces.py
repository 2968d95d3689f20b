"""This host's network interfaces: their addresses, and which one leads to a peer.

Linux calls through the standard library only (ioctl and /proc): a rank asks once, at start, and
should not wait for a netlink library for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of every configured IPv4 and global IPv6 address, IPv4 first."""
    found: list[tuple[str, str]] = []
    with (
        contextlib.suppress(ImportError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        import fcntl  # not on every platform

        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) in (0x00, 0x10):  # global, loopback
                found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def interface_of(address: str) -> str | None:
    """The interface that owns `address`, None where this host does not have it."""
    return next((name for name, own in addresses() if own == address), None)


def interface_to(address: str) -> str | None:
    """The interface through which the kernel sends to `address` (an IP address or a host name).

    None where there is no route or the name does not resolve.
    """
    own = address_to(address)
    return interface_of(own) if own else None


def address_to(address: str) -> str | None:
    """This host's address from which the kernel sends to `address` (an IP address or a host name).

    Nothing is sent: a UDP socket that is connected tells its own address. None where there is no
    route or the name does not resolve.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with (
                contextlib.suppress(OSError),
                socket.socket(family, socket.SOCK_DGRAM) as probe,
            ):
                probe.connect(target)
                own = str(probe.getsockname()[0])
                if interface_of(own):
                    return own
    return None


def is_loopback(address: str) -> bool:
    """Whether an IP address stays on its host."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def hostname_misleads() -> bool:
    """Whether this host's name resolves to loopback only, or to no address that it owns.

    Gloo listens where the host's name resolves to; such a name cannot be reached by a peer.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return True
    own = {address for _, address in addresses()}
    return not any(address in own and not is_loopback(address) for address in found)
