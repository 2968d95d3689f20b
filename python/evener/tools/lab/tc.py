"""Queues, rates and packet filters (tc) over one netlink socket.

pyroute2 does links, addresses and routes. This part is our own because pyroute2 0.9 has no classic
BPF, no bfifo, and no rate above 34 Gb/s for tbf; and because the 64 classes of a flow cap go out in
one batch here. Formats: linux/pkt_sched.h, linux/pkt_cls.h, linux/filter.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from evener.tools.lab.layout import SEGMENTING_BURST, Shape

_REQUEST, _ACK, _EXCL, _REPLACE, _CREATE = 0x1, 0x4, 0x200, 0x100, 0x400
_NLMSG_ERROR = 2
_NEWQDISC, _DELQDISC, _NEWTCLASS, _NEWTFILTER = 36, 37, 40, 44
_ROOT, _INGRESS = 0xFFFFFFFF, 0xFFFFFFF1
_INGRESS_HANDLE = 0xFFFF0000
_KIND, _OPTIONS = 1, 2
_ETH_P_IP = 0x0800
_ETHERNET = 1  # link layer of a ratespec: without it the kernel wants a rate table

_DROP = 2  # TC_ACT_SHOT
_PASS = 0xFFFFFFFF  # TC_ACT_UNSPEC: go on as if there were no filter
FLOW_CLASSES = 64

# Classic BPF: (code, jump if true, jump if false, operand)
Instruction = tuple[int, int, int, int]
_LD_RANDOM: Instruction = (0x20, 0, 0, 0xFFFFF000 + 56)  # SKF_AD_OFF + SKF_AD_RANDOM
_DROP_ALL: tuple[Instruction, ...] = ((0x06, 0, 0, _DROP),)


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def _ratespec(rate: int) -> bytes:
    """`rate` in bytes per second; those above 2^32 - 1 need a RATE64 attribute besides."""
    return struct.pack("=BBHhHI", 0, _ETHERNET, 0, -1, 0, min(rate, 0xFFFFFFFF))


def _ticks(size: int, rate: int) -> int:
    """The time that `size` bytes take at `rate` bytes per second, in the scheduler's 64 ns."""
    return min(size * 10**9 // rate // 64, 0xFFFFFFFF)


class TrafficControl:
    """A netlink socket in the network namespace that the calling thread is in right now."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        """Close the socket; what was set stays."""
        self._socket.close()

    def shape(self, device: int, shape: Shape) -> None:
        """Let out `shape` through `device`: tbf at the root replaces what was there."""
        self._send([self._tbf(device, shape)])

    def cap_flows(self, device: int, shape: Shape | None, cap: int, queue_ns: int) -> None:
        """Let out no more than `cap` bits per second of a flow, and no more than `shape` in all.

        htb with 64 classes; a flow's class is (source port xor destination port) / 2 modulo 64,
        because the kernel's connect() hands out even ports, and in one of a connection's two
        directions all flows have the listener's port as their source. Two flows of one class
        share a cap.
        """
        total = 100 * 10**9 if shape is None else shape.rate
        cap = min(cap, total)
        each = max(total // FLOW_CLASSES, 8)
        queue = Shape.of(cap, queue_ns)
        self.clear(device)
        glob = _attribute(2, struct.pack("=5I", 3, 10, 1, 0, 0))
        batch = [self._message(_NEWQDISC, _CREATE | _REPLACE, device, 1 << 16, _ROOT, "htb", glob)]
        batch.append(self._htb_class(device, 1 << 16, 0x1FFFF, total, total, queue.burst))
        for minor in range(1, FLOW_CLASSES + 1):
            handle = 1 << 16 | minor
            batch.append(self._htb_class(device, 0x1FFFF, handle, each, cap, queue.burst))
            limit = struct.pack("=I", max(queue.limit, 2 * 65536))
            batch.append(
                self._message(
                    _NEWQDISC, _CREATE | _EXCL, device, (16 + minor) << 16, handle, "bfifo", limit
                )
            )
        program: list[Instruction] = [
            (0xB1, 0, 0, 14),  # X = length of the IP header that starts after 14 bytes
            (0x48, 0, 0, 14),  # A = the source port
            (0x02, 0, 0, 0),  # M[0] = A
            (0x48, 0, 0, 16),  # A = the destination port
            (0x61, 0, 0, 0),  # X = M[0]
            (0xAC, 0, 0, 0),  # A ^= X
            (0x74, 0, 0, 1),  # A >>= 1
            (0x54, 0, 0, FLOW_CLASSES - 1),
            (0x04, 0, 0, 1 << 16 | 1),  # A += 1:1
            (0x16, 0, 0, 0),  # return A
        ]
        batch.append(self._bpf(device, 1 << 16, program, direct=False))
        self._send(batch)

    def clear(self, device: int) -> None:
        """Let out whatever comes."""
        message = self._message(_DELQDISC, 0, device, 0, _ROOT, None, b"")
        self._send([message], allowed=(2, 22))  # ENOENT, EINVAL: there was none

    def drop(self, device: int, share: float = 1.0) -> None:
        """Lose `share` of the IPv4 packets that arrive through `device`, without a word.

        ARP passes: a path whose neighbour cannot be found would report "unreachable", and then it
        would not be silent.
        """
        program = _DROP_ALL
        if share < 1:
            threshold = int(share * 0xFFFFFFFF)
            # random > threshold: pass, else drop
            program = (
                _LD_RANDOM,
                (0x25, 0, 1, threshold),
                (0x06, 0, 0, _PASS),
                (0x06, 0, 0, _DROP),
            )
        self.undrop(device)
        ingress = self._message(
            _NEWQDISC, _CREATE | _EXCL, device, _INGRESS_HANDLE, _INGRESS, "ingress", b""
        )
        self._send([ingress, self._bpf(device, _INGRESS_HANDLE, program, direct=True)])

    def undrop(self, device: int) -> None:
        """Let in whatever comes."""
        message = self._message(_DELQDISC, 0, device, _INGRESS_HANDLE, _INGRESS, None, b"")
        self._send([message], allowed=(2, 22))

    def _tbf(self, device: int, shape: Shape) -> bytes:
        rate = shape.rate // 8
        options = _attribute(1, _ratespec(rate) + bytes(12) + struct.pack("=3I", shape.limit, 0, 0))
        options += _attribute(6, struct.pack("=I", max(shape.burst, SEGMENTING_BURST)))
        if rate > 0xFFFFFFFF:
            options += _attribute(4, struct.pack("=Q", rate))
        # "replace" keeps packets that wait only where limit and kind stay: good enough for a fault.
        return self._message(_NEWQDISC, _CREATE | _REPLACE, device, 1 << 16, _ROOT, "tbf", options)

    def _htb_class(
        self, device: int, parent: int, handle: int, rate: int, ceil: int, burst: int
    ) -> bytes:
        rate, ceil = rate // 8, ceil // 8
        numbers = struct.pack(
            "=5I", _ticks(burst, rate), _ticks(burst, ceil), max(burst // 4, 1600), 0, 0
        )
        options = _attribute(1, _ratespec(rate) + _ratespec(ceil) + numbers)
        if rate > 0xFFFFFFFF:
            options += _attribute(6, struct.pack("=Q", rate))
        if ceil > 0xFFFFFFFF:
            options += _attribute(7, struct.pack("=Q", ceil))
        return self._message(_NEWTCLASS, _CREATE | _EXCL, device, handle, parent, "htb", options)

    def _bpf(
        self, device: int, parent: int, program: Sequence[Instruction], *, direct: bool
    ) -> bytes:
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
        options = _attribute(4, struct.pack("=H", len(program))) + _attribute(5, code)
        if direct:
            options += _attribute(8, struct.pack("=I", 1))
        return self._message(
            _NEWTFILTER, _CREATE | _EXCL, device, 1, parent, "bpf", options, protocol=_ETH_P_IP
        )

    def _message(
        self,
        kind: int,
        flags: int,
        device: int,
        handle: int,
        parent: int,
        name: str | None,
        options: bytes,
        protocol: int | None = None,
    ) -> bytes:
        info = 0 if protocol is None else (1 << 16 | socket.htons(protocol))
        body = struct.pack("=BxxxiIII", 0, device, handle, parent, info)
        if name is not None:
            body += _attribute(_KIND, name.encode() + b"\0") + _attribute(_OPTIONS, options)
        self._sequence += 1
        header = struct.pack(
            "=IHHII", 16 + len(body), kind, _REQUEST | _ACK | flags, self._sequence, 0
        )
        return header + body

    def _send(self, messages: list[bytes], allowed: tuple[int, ...] = ()) -> None:
        """Send and wait for every acknowledgement. Raises OSError with the kernel's number."""
        # A dozen at a time, so that acknowledgements never overflow the receive buffer.
        for start in range(0, len(messages), 12):
            part = messages[start : start + 12]
            self._socket.send(b"".join(part))
            waiting = len(part)
            while waiting:
                data = self._socket.recv(65536)
                while data:
                    length, kind = struct.unpack_from("=IH", data)
                    if kind == _NLMSG_ERROR:
                        waiting -= 1
                        number = -struct.unpack_from("=i", data, 16)[0]
                        if number and number not in allowed:
                            raise OSError(number, f"tc: {os.strerror(number)}")
                    data = data[(length + 3) & ~3 :]
