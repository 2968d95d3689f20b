"""What is wrong, how it is known, what to do about it, and what to expect then.

A check is a function from a Picture to findings, registered with `@check`; one file a subject.
"""

from evener.tools.analyze.findings.base import (
    Finding,
    Severity,
    catalogue,
    check,
    markdown,
    run_checks,
)

__all__ = ["Finding", "Severity", "catalogue", "check", "markdown", "run_checks"]
