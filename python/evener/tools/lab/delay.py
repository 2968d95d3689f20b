"""Delay of cables, in a process of its own: kernels of small machines have no netem.

A cable with delay is two, and frames go from one to the other by way of `_native.delay_lines`. It
takes large units of the kernel's as they are (PACKET_VNET_HDR), so a delay costs little: about two
microseconds of a core for each frame and cable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from evener.tools.lab import linux

_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_RCVBUFFORCE = 33
_ETH_P_ALL = 3
_BUFFER = 16 << 20


class Delays:
    """Lines of the namespace that the calling thread is in; the process ends with its parent."""

    def __init__(self, lines: list[tuple[str, str]], seed: int) -> None:
        """`lines`: the two devices of each. Raises OSError."""
        ends = [_end(device) for line in lines for device in line]
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = linux.fork_bound()
        if not self.process:
            _carry(theirs.fileno(), [end.fileno() for end in ends], seed)
        theirs.close()
        for end in ends:
            end.close()

    def set(self, line: int, *, first: bool, delay_ns: int, ahead: float) -> None:
        """Delay what comes in at the `first` or the second end of `line`; `ahead`: the share that
        is not delayed."""
        message = struct.pack("=3Q", 2 * line + (not first), delay_ns, int(ahead * 2**32))
        self._control.send(message)

    def close(self) -> None:
        """End the process."""
        self._control.close()


def _end(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_PACKET, _VNET_HDR, 1)
    end.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    try:
        end.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BUFFER)
    except PermissionError:  # without root: as much as one may have
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    end.bind((device, _ETH_P_ALL))
    return end


def _carry(control: int, ends: list[int], seed: int) -> None:
    """In the new process: until the lab ends."""
    status = 1
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        for fd in opened:
            if fd > 2 and fd != control and fd not in ends:
                with contextlib.suppress(OSError):
                    os.close(fd)
        with contextlib.suppress(PermissionError):
            # Before what it carries frames for: on a busy machine a delay would be a longer one.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        from evener import _native

        _native.delay_lines(control, ends, seed)
        status = 0
    finally:
        os._exit(status)
