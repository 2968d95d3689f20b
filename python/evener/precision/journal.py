"""What a machine's decisions were: its events, in the log, in the records and for who asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.base.log import info0
from evener.base.records import StatsFile
from evener.precision.rules import Event, Facts, Machine, Probe

_SHOWN = 20  # events, in a report


class Journal:
    """The journal of one machine, which it asks. `events`: all so far."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.events: list[Event] = []
        self._stats: StatsFile | None = None

    def open(self, rank: int) -> None:
        """Write records from now on, where EVENER_STATS_DIR asks. rank: of this process."""
        self._stats = StatsFile.open("precision", rank)

    def close(self) -> None:
        """The last record."""
        if self._stats is not None:
            self._stats.write(self.report())

    def observe(self, facts: Facts, probe: Probe, zeros: Callable[[], float] | None = None) -> None:
        """What follows from a step; see `Machine.observe`."""
        for event in self.machine.observe(facts, probe, zeros):
            self.events.append(event)
            info0(
                "precision, step %d: %s > %s (%s: %s)",
                event.step,
                event.before.value,
                event.after.value,
                event.cause,
                event.text,
            )
        if self._stats is not None and self._stats.due:
            self._stats.write(self.report())

    def report(self) -> dict[str, Any]:
        """The state, the share of half steps, and the last events."""
        machine = self.machine
        return {
            "state": machine.state.name,
            "steps": machine.step,
            "half_steps": machine.half_steps,
            "switches": machine.switches,
            "events": [
                {"step": e.step, "cause": e.cause, "to": e.after.name, "text": e.text}
                for e in self.events[-_SHOWN:]
            ],
        }
