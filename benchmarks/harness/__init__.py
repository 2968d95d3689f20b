"""What the benchmarks share: a clock for ways that take turns, jobs, records, and a table.

A benchmark is a script of this folder that is run by itself, `python benchmarks/NAME.py`. It says
in its head what it measures, parses with `arguments`, lets what it compares take `turns` in one run
(so that a busy machine slows all of it alike), and keeps the samples with `keep`: the command, the
machine and the versions stand in every record. What needs a process of its own goes through
`again`, `ranks` or `in_lab`, whose processes `say` what they found.
"""

from .jobs import MARK, Job, again, arguments_of, in_lab, ranks, say
from .places import device, join, sent_bytes, settle
from .records import Kept, arguments, choose, keep, record, show, write
from .turns import interval, paired, quartiles, ratio, turns

__all__ = [
    "MARK",
    "Job",
    "Kept",
    "again",
    "arguments",
    "arguments_of",
    "choose",
    "device",
    "in_lab",
    "interval",
    "join",
    "keep",
    "paired",
    "quartiles",
    "ranks",
    "ratio",
    "record",
    "say",
    "sent_bytes",
    "settle",
    "show",
    "turns",
    "write",
]
