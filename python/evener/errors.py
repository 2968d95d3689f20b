"""What Evener raises. One rule: a message names the thing, its value and the fix."""

from __future__ import annotations


class EvenerError(Exception):
    """Base of every error that Evener raises on purpose.

    `str()` gives what is wrong and, on a line of its own, what to do about it. The command line
    prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        """`problem`: the thing and its value. `fix`: what the reader can do, as an imperative."""
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}\n  fix: {fix}" if fix else problem)


class UsageError(EvenerError):
    """What the user gave cannot be: an option, a file, an environment variable."""

    exit_code = 2
