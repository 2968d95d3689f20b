"""`nvidia-smi -q` and `sacct`: the state of GPUs and of jobs, in blocks and tables."""

from __future__ import annotations

import re

from evener.tools.analyze.evidence.kernel import bus
from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Evidence, Sign

_GPU = re.compile(r"^\s*GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_PAIR = re.compile(r"^\s*([A-Za-z][\w /()-]{1,60}?)\s*: (.{1,120})$")
_BAD = re.compile(r"GPU is lost|Unknown Error|ERR!|GPU requires reset", re.IGNORECASE)
_SACCT = ("JobID", "State")
_ENDS = re.compile(
    r"\b(OUT_OF_ME\w*\+?|NODE_FAIL|TIMEOUT|PREEMPTED|FAILED|CANCELLED|BOOT_FAIL|DEADLINE)\b"
)
WORDS = (b"GPU 0", b"JobID", b"Remap", b"ncorrectable", b"Slowdown", b"Recovery Action", b"Fabric")


class State:
    """Blocks of one file; a block goes on until its source's format ends."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._bus = ""
        self._section = ""
        self._columns = False
        self._left = 0

    @property
    def active(self) -> bool:
        """Whether every line matters now."""
        return bool(self._bus) or self._columns

    def line(self, line: Line) -> None:
        """Take any line."""
        text = line.text
        if found := _GPU.match(text):
            self._bus, self._section, self._left = bus(found[1]), "", 2000
            self._evidence.read["nvidia-smi -q"] += 1
            return
        if all(word in text for word in _SACCT) and ":" not in text:
            self._columns, self._left = True, 5000
            self._evidence.read["sacct"] += 1
            return
        if self.active:
            self._left -= 1
            if self._left < 0:
                self._bus, self._columns = "", False
                return
        if self._bus:
            self._gpu(line)
        elif self._columns:
            self._job(line)

    def _gpu(self, line: Line) -> None:
        text = line.text.rstrip()
        found = _PAIR.match(text)
        if not found:
            if text.strip():
                self._section = text.strip()
            return
        name, value = found[1].strip(), found[2].strip()
        bad = ""
        if _BAD.search(value):
            bad = f"{name}: {value}"
        elif name == "Pending" and value == "Yes":
            bad = f"{self._section}: a row waits for its remapping"
        elif name == "Remapping Failure Occurred" and value == "Yes":
            bad = "a row could not be remapped"
        elif "Uncorrectable" in name and value.isdigit() and int(value) > 0:
            volatile = self._section.startswith("Volatile")
            bad = f"{value} {name} errors ({self._section})" if volatile else ""
        elif name.startswith("GPU Recovery Action") and value not in ("None", "N/A"):
            bad = f"{name}: {value}"
        elif name == "Status" and self._section == "Fabric" and value not in ("Success", "N/A"):
            self._fabric(line, f"Fabric status {value}")
            return
        elif name == "State" and self._section == "Fabric" and value not in ("Completed", "N/A"):
            self._fabric(line, f"Fabric state {value}")
            return
        if bad:
            self._evidence.add(Sign("gpu-state", bad, line.where, line.host, what=self._bus))
        elif "Slowdown" in name and value == "Active" and "HW" in name:
            self._evidence.add(
                Sign("throttled", f"{name}: {value}", line.where, line.host, what=self._bus)
            )

    def _fabric(self, line: Line, text: str) -> None:
        self._evidence.add(Sign("fabric", text, line.where, line.host, what=self._bus))

    def _job(self, line: Line) -> None:
        if found := _ENDS.search(line.text):
            kind = {
                "NODE_FAIL": "node-fail", "PREEMPTED": "evicted", "TIMEOUT": "time-limit",
            }.get(found[1], "job-state")  # fmt: skip
            if found[1].startswith("OUT_OF_ME"):
                kind = "oom-kill"
            self._evidence.add(
                Sign(kind, " ".join(line.text.split())[:200], line.where, what=found[1])
            )
        elif not line.text.strip():
            self._columns = False
