"""What the lab raises."""

from __future__ import annotations

from evener.errors import EvenerError


class LabError(EvenerError):
    """A lab could not be built, or an operation on it failed."""


class LabUnavailableError(LabError):
    """This machine allows no namespaces: no lab can be built here."""
