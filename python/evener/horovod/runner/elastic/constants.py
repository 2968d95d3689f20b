"""Texts of upstream's elastic driver."""

from __future__ import annotations

RESET_LIMIT_EXCEEDED_MESSAGE = "the job has changed {} times, which is its limit"
