"""What goes wrong between ranks."""

from __future__ import annotations

from evener.errors import EvenerError


class CommError(EvenerError):
    """A collective failed, timed out, or the ranks do not agree on what to reduce."""
