"""The driver's and the kernel's lines on GPUs: Xid and SXid, as dmesg or journald print them.

NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 07 (...)
nvidia-nvswitch0: SXid (PCI:0000:8a:00.0): 12028, Non-fatal, Link 46 egress ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Evidence, Xid

_XID = re.compile(
    r"NVRM: (?:GPU\d+: )?Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})[^)]{0,40}\): (\d{1,4})(?:, "
    r"(.{0,200}))?"
)
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): (\d{1,6})(?:, (.{0,200}))?")
_LOST = re.compile(
    r"NVRM: .{0,40}GPU(?: at)?(?: PCI:)?\s*([0-9a-fA-F:.]{4,20}).{0,40}fallen off the bus"
)
_GPU = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]{4,20})")
"""The first of three lines, of which the last says that it is lost."""
_PID = re.compile(r"pid='?(\d{1,10})")
WORDS = (b"Xid", b"fallen off the bus", b"NVRM: The NVIDIA GPU")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means: `who` is gpu, memory, link, firmware, bus or program."""

    who: str
    text: str
    do: str


_RESET = "Drain the node, reset the GPU (nvidia-smi --gpu-reset) or reboot"
_MEANINGS: dict[int, Meaning] = {
    13: Meaning("program", "an illegal instruction or address in a kernel", ""),
    31: Meaning("program", "a memory fault of a kernel (an address that is not mapped)", ""),
    43: Meaning("program", "the GPU stopped the program's channel", ""),
    48: Meaning("memory", "an uncorrectable (double bit) ECC error", _RESET),
    61: Meaning("firmware", "the GPU's microcontroller halted", _RESET),
    62: Meaning("firmware", "the GPU's microcontroller halted", _RESET),
    63: Meaning(
        "memory", "a row of memory is to be remapped (ECC)", "Reset the GPU when it is idle"
    ),
    64: Meaning(
        "memory",
        "a row of memory could not be remapped (ECC)",
        "Drain the node and replace the GPU",
    ),
    68: Meaning("firmware", "a video processor error", _RESET),
    69: Meaning("program", "a graphics class error", ""),
    74: Meaning(
        "link", "an NVLink error", "Check the NVLink bridge, board and switch, and reset the GPU"
    ),
    79: Meaning(
        "bus",
        "the GPU fell off the bus",
        "Reboot the node; check power, heat and the slot if it comes again",
    ),
    92: Meaning("memory", "many correctable ECC errors", _RESET),
    94: Meaning(
        "memory",
        "a contained uncorrectable ECC error: only the program that used it dies",
        _RESET + " soon; replace it if the error comes again",
    ),
    95: Meaning(
        "memory",
        "an uncontained uncorrectable ECC error",
        _RESET + "; replace it if the error comes again",
    ),
    109: Meaning("firmware", "a context switch timed out", _RESET),
    119: Meaning(
        "firmware",
        "the GPU's system processor (GSP) does not answer",
        _RESET + "; update the driver",
    ),
    120: Meaning(
        "firmware", "an error of the GPU's system processor (GSP)", _RESET + "; update the driver"
    ),
    121: Meaning("link", "an error of the link between CPU and GPU (C2C)", _RESET),
    136: Meaning("link", "an error of the link's memory path", _RESET),
    137: Meaning("link", "an NVLink fault of a remote access", _RESET),
    140: Meaning("memory", "an uncorrectable ECC error that was not recovered", _RESET),
    143: Meaning("firmware", "an error at the GPU's start", _RESET),
    154: Meaning(
        "firmware", "the GPU asks for a recovery action", "Take the action that the line names"
    ),
    171: Meaning("memory", "an uncorrectable error in DRAM or SRAM", _RESET),
    **{
        code: Meaning(
            "link",
            "an NVLink error",
            "Drain the node and reset all its GPUs, or "
            "reboot; look at the NVLink switch and its "
            "cables if it comes again",
        )
        for code in range(144, 151)
    },
}
FOLLOWS = frozenset({45})
"""Codes that only clean up after another."""


def meaning(code: int) -> Meaning:
    """What a code means; an unknown one is a fault of the GPU."""
    return _MEANINGS.get(code, Meaning("gpu", "an error of the GPU", _RESET))


def bus(text: str) -> str:
    """A PCI address as `dc:00`, however it is spelled."""
    parts = text.strip(": .").lower().split(":")
    if len(parts) < 2:
        return text.lower()
    return f"{parts[-2]}:{parts[-1].split('.')[0]}"


class Kernel:
    """Errors of GPUs in one file."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._gpu = ""

    def line(self, line: Line) -> None:
        """Take one line that has one of WORDS."""
        if found := _XID.search(line.text):
            text = (found[3] or "").strip()
            pid = _PID.search(text)
            self._add(found, line, text, int(pid[1]) if pid else -1)
        elif found := _SXID.search(line.text):
            self._add(found, line, (found[3] or "").strip(), -1, switch=True)
        elif found := _GPU.search(line.text):
            self._gpu = found[1]
        elif "fallen off the bus" in line.text:
            found = _LOST.search(line.text)
            gpu, self._gpu = found[1] if found else self._gpu, ""
            if gpu:
                text = line.text.strip()[:200]
                self._evidence.add(Xid(bus(gpu), 79, text, line.where, host=line.host))

    def _add(
        self, found: re.Match[str], line: Line, text: str, pid: int, switch: bool = False
    ) -> None:
        self._evidence.add(
            Xid(bus(found[1]), int(found[2]), text, line.where, pid, switch, line.host)
        )
