"""What files say of a run that hung or failed: one reader a source, and the records they make.

Readers never decide: they say what a rank, a launcher or a driver said, and where. The findings of
`findings/` join it.
"""

from evener.tools.analyze.evidence.reader import Reader
from evener.tools.analyze.evidence.records import Evidence

__all__ = ["Evidence", "Reader"]
