"""`evener analyze`: what a job left and a benchmark measured, joined into a verdict.

parse/      bytes to records, one concept a file
evidence/   lines to what watchdogs, recorders, launchers and drivers said, one source a file
collect     records to a run: which line belongs to which communicator; `join` tells these apart
model       the run
picture     what follows from it, with a map of the fabric where there is one
stuck/      who holds a job up, or why that is not decided
findings/   what is wrong and what to do
report/     JSON, text, HTML
"""

from evener.tools.analyze.collect import collect
from evener.tools.analyze.evidence.recorder import own_frame
from evener.tools.analyze.findings import Finding, run_checks
from evener.tools.analyze.picture import Picture, picture
from evener.tools.analyze.report import document, page, terminal

__all__ = [
    "Finding",
    "Picture",
    "collect",
    "document",
    "own_frame",
    "page",
    "picture",
    "run_checks",
    "terminal",
]
