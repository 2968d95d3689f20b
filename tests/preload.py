"""Imported once by the fork server of `tests.worlds`: what every rank will need."""

import evener.comm.reducer
import evener.ddp  # noqa: F401
