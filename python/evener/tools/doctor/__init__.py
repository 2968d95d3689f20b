"""`evener doctor`: what is checked by hand before a job is slow, as a checklist with fixes.

Each module holds the checks of one subject: functions that return Lines and change nothing. They
take the root of the file system (and whatever else they ask) as arguments, so that a test can give
them a machine that is broken in a known way.
"""

from evener.tools.doctor.line import Line, examine

__all__ = ["Line", "examine"]
